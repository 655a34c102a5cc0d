"""What happens while a text is written: one line on a terminal, a few times a second, gone at the end."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Protocol

import click

from paceline.cli._report import live_line
from paceline.core.stats import SpeculationStats

if TYPE_CHECKING:
    from paceline import LLM

EVERY_S = 0.2

Write = Callable[[str], None]
Size = Callable[[], os.terminal_size]


class Row(Protocol):
    """Where the line is shown."""

    def show(self, lines: Callable[[int], str]) -> None:
        """lines: the line for a width in columns."""
        ...

    def clear(self) -> None: ...


class CurrentRow:
    """The row of the cursor, where nothing else is written meanwhile."""

    def __init__(self, write: Write, size: Size) -> None:
        self._write, self._size = write, size

    def show(self, lines: Callable[[int], str]) -> None:
        self._write(f"\r{lines(self._size().columns - 1)}\x1b[K")

    def clear(self) -> None:
        self._write("\r\x1b[K")


class LastRow:
    """The terminal's last row, below a text that is written to the same terminal: scrolling is kept to the
    rows above it (DECSTBM), so that neither ever has to be drawn again because of the other."""

    def __init__(self, write: Write, size: Size) -> None:
        self._write, self._size = write, size
        self._rows = 0

    def show(self, lines: Callable[[int], str]) -> None:
        size = self._size()
        if size.lines < 3:
            return
        reserve = self._reserve(size.lines) if size.lines != self._rows else ""
        line = lines(size.columns - 1)
        self._write(f"{reserve}\x1b7\x1b[{size.lines};1H{line}\x1b[K\x1b8")

    def _reserve(self, rows: int) -> str:
        """One row down, which scrolls where there is none, and up again: the cursor is then above the last
        row and still in its column. Setting the margins would move it."""
        self._rows = rows
        return f"\x1bD\x1b[A\x1b7\x1b[1;{rows - 1}r\x1b8"

    def clear(self) -> None:
        if self._rows:
            self._write(f"\x1b7\x1b[r\x1b[{self._rows};1H\x1b[2K\x1b8")
            self._rows = 0


class Counters:
    """Of one request, which runs alone. `note` is told of every piece of its text, once that is written."""

    def __init__(self, llm: LLM, row: Row, clock: Callable[[], float] = time.perf_counter) -> None:
        self._llm, self._row, self._clock = llm, row, clock
        self._before = llm.speculation
        self._tokens = self._first = 0
        self._first_at: float | None = None
        self._due = clock() + EVERY_S

    def note(self, num_tokens: int) -> None:
        now = self._clock()
        self._tokens += num_tokens
        if self._first_at is None and num_tokens:
            self._first, self._first_at = num_tokens, now
        if now >= self._due:
            self._due = now + EVERY_S
            self._row.show(self._lines(now))

    def _lines(self, now: float) -> Callable[[int], str]:
        later = self._tokens - self._first
        rate = later / (now - self._first_at) if later and self._first_at is not None else None
        speculation = _since(self._llm.speculation, self._before)
        return lambda width: live_line(rate, speculation, self._llm.lanes, width)


@contextmanager
def counters(llm: LLM, *, wanted: bool, beside_text: bool) -> Iterator[Callable[[int], None]]:
    """What is to be told of the number of tokens in every piece of text; it does nothing unless standard
    error is a terminal. beside_text: whether the text goes to standard output meanwhile."""
    row = _row(beside_text=beside_text) if wanted else None
    if row is None:
        yield lambda _: None
        return
    try:
        yield Counters(llm, row).note
    finally:
        row.clear()


def _row(*, beside_text: bool) -> Row | None:
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return None
    if not (beside_text and sys.stdout.isatty()):
        return CurrentRow(_write, _size)
    return LastRow(_write, _size) if os.name == "posix" else None


def _write(text: str) -> None:
    click.echo(text, nl=False, err=True, color=True)


def _size() -> os.terminal_size:
    try:
        return os.get_terminal_size(sys.stderr.fileno())
    except OSError:
        return os.terminal_size((80, 24))


def _since(now: SpeculationStats, before: SpeculationStats) -> SpeculationStats:
    """Without depths, which the line does not show."""
    names = [each.name for each in fields(now) if each.name != "accepted_by_depth"]
    return SpeculationStats(**{name: getattr(now, name) - getattr(before, name) for name in names})
