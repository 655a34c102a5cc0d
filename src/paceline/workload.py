"""Workloads: when requests come, and how long they are."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from math import inf, isfinite
from pathlib import Path
from typing import Protocol

from paceline.errors import ConfigError, shown


@dataclass(frozen=True, slots=True)
class Lengths:
    """One request of a trace that holds no text. at_s: since the first one.  Tokens of prompt and output."""

    at_s: float
    prompt: int
    output: int


class Arrivals(Protocol):
    def times(self) -> Iterator[float]:
        """Seconds at which request after request comes, never falling, without end."""
        ...


@dataclass(frozen=True, slots=True)
class AtOnce:
    """All are there from the beginning."""

    def times(self) -> Iterator[float]:
        while True:
            yield 0.0


@dataclass(frozen=True, slots=True)
class Steady:
    """One every `1 / rate` seconds."""

    rate: float

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def times(self) -> Iterator[float]:
        for number in count():
            yield number / self.rate


@dataclass(frozen=True, slots=True)
class Bursts:
    """Gaps are drawn from a gamma distribution, as by `vllm bench serve --burstiness`.

    rate: requests per second.  burstiness: the distribution's shape; 1 = a Poisson process, below that they
    come in bursts, above it evenly.
    """

    rate: float
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        if not 0 < self.burstiness < inf:
            raise ConfigError(f"the burstiness is {shown(self.burstiness)}: give a number above 0.")

    def times(self) -> Iterator[float]:
        chance, now = random.Random(self.seed), 0.0
        while True:
            now += chance.gammavariate(self.burstiness, 1.0 / (self.rate * self.burstiness))
            yield now


def _check_rate(rate: float) -> None:
    if not 0 < rate < inf:
        raise ConfigError(f"the rate is {shown(rate)}: give requests per second, above 0.")


# ---------------------------------------------------------------- traces of lengths

_COLUMNS = (
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),  # Azure/AzurePublicDataset, 2023
    ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),  # the same, as Vidur has it: seconds
)
_MOST_TOKENS = 2**24


def read_lengths(path: Path) -> list[Lengths]:
    """A CSV file of the Azure LLM inference traces of 2023 (CC-BY-4.0; Splitwise, ISCA 2024), by time.

    Raises ConfigError naming file, line and remedy.
    """
    rows = []
    for where, fields in _rows(path):
        moment, prompt, output = fields
        rows.append(Lengths(_seconds(moment, where), _tokens(prompt, where), _tokens(output, where)))
    if not rows:
        raise ConfigError(f"{path} holds no request: give a file with at least one row below its header.")
    rows.sort(key=lambda row: row.at_s)
    first = rows[0].at_s
    return [Lengths(row.at_s - first, row.prompt, row.output) for row in rows]


def _rows(path: Path) -> Iterator[tuple[str, tuple[str, str, str]]]:
    """Each row with its place, for messages."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            names = tuple(name.strip() for name in next(reader, []))
            if names not in _COLUMNS:
                expected = " or ".join(",".join(each) for each in _COLUMNS)
                raise ConfigError(
                    f"{path}, line 1: the columns are {shown(','.join(names))}: give {expected}."
                )
            for fields in reader:
                where = f"{path}, line {reader.line_num}"
                if len(fields) == 3:
                    yield where, (fields[0], fields[1], fields[2])
                elif any(fields):
                    raise ConfigError(f"{where} has {len(fields)} columns instead of 3: mend or delete it.")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8.") from None
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: {error}: mend or delete it.") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}.") from None


def _seconds(text: str, where: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = (datetime.fromisoformat(text.strip()) - datetime(2023, 1, 1)).total_seconds()
        except (ValueError, TypeError):
            raise ConfigError(
                f"{where}: {shown(text)} is no time: write it as 2023-11-16 18:15:46.68, or in seconds."
            ) from None
    if not isfinite(seconds):
        raise ConfigError(f"{where}: {shown(text)} is no time: write a finite number of seconds.")
    return seconds


def _tokens(text: str, where: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 0 < number <= _MOST_TOKENS:
        raise ConfigError(f"{where}: {shown(text)} is no number of tokens: write a whole one, above 0.")
    return number


def thinned(rows: Sequence[Lengths], most: int, seed: int = 0) -> list[Lengths]:
    """A sample of so many of the rows that lasts as long as all of them: their times are kept.

    Raises ConfigError where there are none to take.
    """
    if most < 1:
        raise ConfigError(f"{most} requests are no workload: take at least 1.")
    if most >= len(rows):
        return list(rows)
    return [rows[at] for at in sorted(random.Random(seed).sample(range(len(rows)), most))]


def faster(rows: Sequence[Lengths], times: float) -> list[Lengths]:
    """The same requests in so many times less time."""
    if not 0 < times < inf:
        raise ConfigError(f"the speed of the trace is {shown(times)}: give a number above 0.")
    return [Lengths(row.at_s / times, row.prompt, row.output) for row in rows]
