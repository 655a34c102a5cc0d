"""Answers of the target: the text that a head learns to foresee, as token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.errors import ModelError


class Answer(msgspec.Struct, frozen=True):
    """One line of the answers' file (JSONL). category: of the prompt, for the reports. source: where it is
    from. temperature: that the answer was sampled at."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    category: str = "general"
    source: str = ""
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class NumberedAnswer:
    """line: from 0."""

    line: int
    answer: Answer


def read_answers(path: Path, first: int = 0) -> Iterator[NumberedAnswer]:
    """The answers from line `first` on. A last line without its end is one still being written, and is left.

    Raises ModelError that names the line which cannot be read.
    """
    decoder = msgspec.json.Decoder(Answer)
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if number < first:
                continue
            if not line.endswith(b"\n"):
                return
            if not line.strip():
                continue
            try:
                yield NumberedAnswer(number, decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise ModelError(
                    f"{path}, line {number + 1} is not an answer ({error}): each line is an object with "
                    "prompt_token_ids and token_ids. Mend or delete the line."
                ) from None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
