"""Lines of files that people hand in: JSONL, compressed or not."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from paceline.errors import ConfigError


def numbered_lines(path: Path, content: str) -> Iterator[tuple[int, bytes]]:
    """Each line that is not blank, with its number from 1; without a byte order mark, and unpacked if the
    name ends in `.gz`. content: what the file is to hold, for the message where there is none.

    Raises ConfigError naming the file, and the line that cannot be read.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}: give a JSONL file of {content}.")
    number = 0
    with _opened(path) as file:
        while True:
            number += 1
            try:
                line = file.readline()
            except (EOFError, OSError, zlib.error) as error:
                raise ConfigError(f"{path}, line {number} cannot be read ({error}): is it whole?") from None
            if not line:
                return
            if line.strip():
                yield number, line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")
