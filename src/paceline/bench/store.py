"""Finished cells, one line each: what a benchmark that was stopped need not measure again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from paceline.bench.records import Cell
from paceline.errors import ConfigError, EngineError

CELLS = "cells.jsonl"
_PACKAGE = Path(__file__).resolve().parent.parent


def key_of(description: Mapping[str, Any]) -> str:
    """Of everything that figures depend on: the configuration, the prompts, the machine, this very code."""
    said = json.dumps({**description, "code": code_digest()}, sort_keys=True, default=str)
    return hashlib.sha256(said.encode()).hexdigest()[:24]


@cache
def code_digest() -> str:
    """Of the sources of this package: a version stays the same while code is worked on."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h", ".cu"):
            digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class CellStore:
    """Appends to `cells.jsonl` in a folder. A last line without an end, which a kill leaves, is cut off.

    Raises ConfigError for a folder that cannot be written, or a line that is no cell.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / CELLS
        self._found: dict[str, Cell] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                file.seek(0)
                whole = 0
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        break
                    whole += len(line)
                    cell = self._cell(number, line)
                    self._found[cell.key] = cell
                file.truncate(whole)
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}; choose another --out.") from None

    def _cell(self, number: int, line: bytes) -> Cell:
        try:
            return msgspec.json.decode(line, type=Cell)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{self.path}, line {number} is no cell of this version ({error}): delete the line, or "
                "choose another --out."
            ) from None

    def get(self, key: str) -> Cell | None:
        return self._found.get(key)

    def __iter__(self) -> Iterator[Cell]:
        return iter(self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def add(self, cell: Cell) -> None:
        """On disk when this returns. Raises EngineError."""
        try:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode(cell) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise EngineError(f"cannot write {self.path}: {error.strerror}.") from None
        self._found[cell.key] = cell
