"""The line of counters, and what a terminal shows while and after it is there."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from typing import Any

import click
import pytest
from click.testing import Result

from paceline.cli import _counters
from paceline.cli._counters import Counters, CurrentRow, LastRow
from paceline.cli._report import live_line
from paceline.cli._stream import stream
from paceline.config import Config
from paceline.core.params import SamplingParams
from paceline.core.stats import SpeculationStats
from paceline.engine.outputs import LaneStats

from .fake import FakeLLM
from .screen import Screen

SPECULATION = SpeculationStats(
    num_drafts=10,
    num_draft_tokens=39,
    num_accepted_tokens=14,
    num_drafted_nodes=440,
    num_hits=13,
    num_leaf_hits=12,
    num_misses=1,
)
LANES = LaneStats(
    "overlapped",
    "disaggregated",
    target_gap_median_s=0.00061,
    target_gap_p99_s=0.004,
    draft_idle_share=0.557,
)
LOST = replace(LANES, drafter_losses=1, drafter_away=True, drafter_loss_reason="was ended by\n signal 9")

# ---------------------------------------------------------------- what it says


def test_everything_there_is_to_say() -> None:
    assert live_line(31.24, SPECULATION, LANES, 200) == (
        "31.2 tokens/s | mean acceptance length 2.40 | hits 13, leaf hits 12, misses 1 | "
        "nodes 440 drafted, 39 verified, 14 accepted | target gap 0.6 ms | draft idle 56%"
    )


def test_it_is_shorter_where_there_is_no_room() -> None:
    short = "31.2 tok/s | length 2.40 | hit/leaf/miss 13/12/1 | nodes 440/39/14 | gap 0.6 ms | idle 56%"
    assert live_line(31.24, SPECULATION, LANES, 100) == short
    assert live_line(31.24, SPECULATION, LANES, 30) == short[:30]
    assert live_line(31.24, SPECULATION, LANES, 0) == ""


def test_without_a_drafter_there_are_only_speed_and_gap() -> None:
    lanes = LaneStats("serial-chain", "serial", target_gap_median_s=0.0001)
    assert live_line(8.0, SpeculationStats(), lanes, 200) == "8.0 tokens/s | target gap 0.1 ms"


def test_in_turn_there_are_no_landings_and_no_idle_share() -> None:
    stats = SpeculationStats(num_drafts=1, num_draft_tokens=4, num_accepted_tokens=1, num_drafted_nodes=4)
    lanes = LaneStats("serial-chain", "serial", target_gap_median_s=0.02, draft_idle_share=0.4)
    assert live_line(None, stats, lanes, 200) == (
        "mean acceptance length 2.00 | nodes 4 drafted, 4 verified, 1 accepted | target gap 20.0 ms"
    )


def test_nothing_is_known_at_first() -> None:
    assert live_line(None, SpeculationStats(), LaneStats("serial-chain", "serial"), 80) == ""


def test_a_lost_drafter() -> None:
    assert "8.0 tokens/s | drafter lost: was ended by signal 9 | mean" in live_line(
        8.0, SPECULATION, LOST, 300
    )
    back = replace(LOST, drafter_away=False, drafter_joins=1)
    assert " | drafter lost once and back: was ended by signal 9 | " in live_line(8.0, SPECULATION, back, 300)
    long = replace(LOST, drafter_loss_reason="x" * 100 + "\x1b[2J")
    assert "\x1b" not in live_line(8.0, SPECULATION, long, 500)
    assert live_line(8.0, SPECULATION, long, 60).startswith(f"8.0 tok/s | drafter lost: {'x' * 23}... | len")


# ---------------------------------------------------------------- when


class Shown:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def show(self, lines: Callable[[int], str]) -> None:
        self.lines.append(lines(200))

    def clear(self) -> None:
        raise AssertionError("not its own")


def test_at_most_five_times_a_second_and_only_this_request() -> None:
    fake: Any = FakeLLM.__new__(FakeLLM)
    fake.speculation = replace(SPECULATION)  # of requests before
    now, row = 100.0, Shown()
    counters = Counters(fake, row, lambda: now)
    for _ in range(100):
        now += 1 / 16
        fake.speculation = replace(fake.speculation, num_misses=fake.speculation.num_misses + 1)
        counters.note(2)
    assert len(row.lines) == 25  # every fourth, for 6.25 s
    assert row.lines[-1] == "32.0 tokens/s | hits 0, leaf hits 0, misses 100"


# ---------------------------------------------------------------- what a terminal shows


class Terminal(io.StringIO):
    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self.screen = screen

    def write(self, text: str) -> int:
        self.screen.feed(text)
        return len(text)

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Of 6 rows, and with a line at every piece of text."""
    screen = Screen(6, 20)
    monkeypatch.setattr(_counters, "_size", lambda: os.terminal_size((screen.columns, screen.rows)))
    monkeypatch.setattr(_counters, "EVERY_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    return screen


WORDS = ["one\n", "two", " three\n", "a row of its own, and", " more\n", "four\n", "five"]
TEXT = ["one", "two three", "a row of its own, an", "d more", "four", "five", ""]


def write(screen: Screen, *, silent: bool = False, before: str = "") -> list[list[str]]:
    """What the terminal showed before each word, with standard output and error on it."""
    fake = type("Fake", (FakeLLM,), {"made": [], "lanes": LOST})
    fake.answer = staticmethod(lambda _: WORDS)  # type: ignore[attr-defined]
    views: list[list[str]] = []
    fake.on_chunk = staticmethod(lambda _: views.append(screen.text()))  # type: ignore[attr-defined]
    llm: Any = fake(config=Config())  # type: ignore[call-arg]
    with redirect_stdout(Terminal(screen)), redirect_stderr(Terminal(screen)):
        click.echo(before, nl=False)
        stream(llm, [1], SamplingParams(), silent=silent, live=True)
    return views


@pytest.mark.skipif(os.name != "posix", reason="scrolling margins are not used there")
@pytest.mark.parametrize("before", [0, 3, 5, 6, 30])
def test_the_text_is_whole_and_the_line_is_below_it_and_then_gone(terminal: Screen, before: int) -> None:
    rows = [f"earlier {number}" for number in range(before)]
    views = write(terminal, before="".join(f"{row}\n" for row in rows))
    for view in views[2:]:
        assert "tok/s" in view[-1]
        assert not any("tok/s" in row for row in view[:-1])
    shown = [*terminal.gone, *terminal.text()]
    expected = [*rows, *TEXT]
    assert shown[: len(expected)] == expected
    assert not any(shown[len(expected) :])
    assert terminal.margins == (0, terminal.rows - 1)


def test_the_line_stands_alone_where_no_text_is_written(terminal: Screen) -> None:
    views = write(terminal, silent=True, before="$ paceline\n")
    for view in views[2:]:
        assert view[0] == "$ paceline"
        assert "tok/s" in view[1]
        assert not any(view[2:])
    assert terminal.text() == ["$ paceline", "", "", "", "", ""]
    assert (terminal.row, terminal.column) == (1, 0)


def test_a_resized_terminal_gets_new_margins() -> None:
    written: list[str] = []
    size = os.terminal_size((40, 10))
    row = LastRow(written.append, lambda: size)
    row.show(lambda width: f"{width}")
    row.show(lambda width: f"{width}")
    size = os.terminal_size((30, 8))
    row.show(lambda width: f"{width}")
    row.clear()
    row.clear()
    assert ["\x1b[1;9r" in text for text in written] == [True, False, False, False]
    assert ["\x1b[1;7r" in text for text in written] == [False, False, True, False]
    assert "\x1b[r" in written[-1]


def test_a_terminal_of_two_rows_is_left_alone() -> None:
    written: list[str] = []
    row = LastRow(written.append, lambda: os.terminal_size((40, 2)))
    row.show(str)
    row.clear()
    assert written == []


def test_the_row_of_the_cursor_is_erased() -> None:
    screen = Screen(2, 20)
    row = CurrentRow(screen.feed, lambda: os.terminal_size((20, 2)))
    row.show(lambda _: "a long line")
    row.show(lambda _: "short")
    assert screen.text() == ["short", ""]
    row.clear()
    assert screen.text() == ["", ""]


@pytest.mark.parametrize("arguments", [["-q"], ["--quiet", "--json"]])
def test_quiet_leaves_the_text_alone(
    arguments: list[str], run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_counters, "_row", lambda **_: pytest.fail("no row is wanted"))
    result = run("generate", "Hello", *arguments)
    assert result.exit_code == 0
    assert result.stderr == ""


def test_without_a_terminal_nothing_is_shown(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_counters, "EVERY_S", 0.0)
    assert "\x1b" not in run("generate", "Hello").stderr


def test_a_dumb_terminal_is_left_alone(terminal: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    write(terminal)
    assert "tok/s" not in "".join([*terminal.gone, *terminal.text()])


# ---------------------------------------------------------------- the report


def test_the_report_of_draft_and_target_at_the_same_time(
    run: Callable[..., Result], engine: type[FakeLLM]
) -> None:
    engine.spoken, engine.lanes = SPECULATION, LANES
    assert run("generate", "Hello").stderr.splitlines()[1:] == [
        "hits 13, leaf hits 12, misses 1; nodes 440 drafted, 39 verified, 14 accepted; target gap 0.6 ms; "
        "draft idle 56%"
    ]
    engine.lanes = LOST
    assert run("generate", "Hello").stderr.splitlines()[2:] == ["drafter lost: was ended by signal 9"]
    engine.lanes = replace(LOST, placement="serial")
    assert run("generate", "Hello").stderr.splitlines()[1:] == ["drafter lost: was ended by signal 9"]


def test_without_a_drafter_the_report_has_one_line(run: Callable[..., Result], engine: type[FakeLLM]) -> None:
    engine.lanes = LANES
    assert run("generate", "Hello", "--draft", "none").stderr.count("\n") == 1
