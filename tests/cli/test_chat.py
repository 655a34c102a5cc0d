"""`paceline chat`, with an engine that needs no model."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import Result

from paceline.cli._interrupt import deferred_interrupt

from .fake import FakeLLM

Run = Callable[..., Result]
Engine = type[FakeLLM]
ANSWER = "Draft early, verify once."


def prompts(engine: Engine) -> list[list[tuple[str, str]]]:
    return [prompt for prompt, _ in engine.made[0].asked]


def test_each_turn_sees_the_ones_before(run: Run, engine: Engine) -> None:
    result = run("chat", input="one\n\ntwo\n")
    assert result.exit_code == 0
    assert result.stdout == f"{ANSWER}\n{ANSWER}\n"
    assert result.stderr == ""
    assert prompts(engine) == [
        [("user", "one")],
        [("user", "one"), ("assistant", ANSWER), ("user", "two")],
    ]
    assert engine.made[0].closed


def test_exit_leaves(run: Run, engine: Engine) -> None:
    assert run("chat", input="one\n/exit\ntwo\n").exit_code == 0
    assert len(prompts(engine)) == 1


def test_clear_forgets_the_turns_and_keeps_the_system_message(run: Run, engine: Engine) -> None:
    run("chat", "--system", "Be brief.", input="one\n/clear\ntwo\n")
    assert prompts(engine)[1] == [("system", "Be brief."), ("user", "two")]


def test_system_sets_and_removes_the_system_message(run: Run, engine: Engine) -> None:
    run("chat", input="/system Be kind.\none\n/system\n/clear\ntwo\n")
    assert prompts(engine) == [[("system", "Be kind."), ("user", "one")], [("user", "two")]]


def test_unknown_commands_are_not_sent_but_paths_are(run: Run, engine: Engine) -> None:
    result = run("chat", input="/exti\n/usr/bin/env is what?\n")
    assert result.stderr.startswith("there is no /exti: /system TEXT")
    assert prompts(engine) == [[("user", "/usr/bin/env is what?")]]


def test_stats(run: Run) -> None:
    result = run("chat", "--stats", input="one\n")
    assert result.stderr == (
        "5 tokens, 10.0 tokens/s, first after 0.25 s, mean acceptance length 2.50 (ngram)\n"
    )


def test_a_trace_of_the_conversation(run: Run, engine: Engine, tmp_path: Path) -> None:
    run("chat", "--trace", str(tmp_path / "trace.json"), input="one\n")
    assert engine.made[0].trace == tmp_path / "trace.json"


def test_a_refused_message_leaves_no_trace(run: Run, engine: Engine) -> None:
    calls = []

    def refuse_the_first(_: int) -> None:
        engine.fail_in_request = "too long: shorten it." if not calls else None
        calls.append(1)

    engine.on_chunk = staticmethod(refuse_the_first)
    engine.answer = staticmethod(lambda _: ["x"])
    result = run("chat", input="one\ntwo\n")
    assert result.exit_code == 0
    assert result.stderr == "error: too long: shorten it.\n"
    assert prompts(engine)[1] == [("user", "two")]


def test_ctrl_c_stops_the_answer_and_not_the_program(run: Run, engine: Engine) -> None:
    def interrupt(place: int) -> None:
        if place == 1 and len(engine.made[0].asked) == 1:
            signal.raise_signal(signal.SIGINT)

    engine.on_chunk = staticmethod(interrupt)
    result = run("chat", input="one\ntwo\n")
    assert result.exit_code == 0
    assert result.stdout == f"Draft early,\n{ANSWER}\n"
    assert result.stderr == "(stopped)\n"
    assert engine.made[0].aborted == 1
    assert prompts(engine)[1] == [("user", "one"), ("assistant", "Draft early,"), ("user", "two")]


def test_a_second_ctrl_c_ends_the_program(run: Run, engine: Engine) -> None:
    def interrupt(place: int) -> None:
        if place == 1:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    engine.on_chunk = staticmethod(interrupt)
    assert run("chat", input="one\ntwo\n").exit_code == 130


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and so may whatever runs these tests."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("default_sigint")
def test_the_former_handler_comes_back() -> None:
    with deferred_interrupt() as interrupted:
        assert not interrupted()
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_errors_of_the_start(run: Run) -> None:
    result = run("chat", "--temperature", "-1")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: temperature is -1: it must be at least 0")


def test_print_config(run: Run, engine: Engine) -> None:
    assert 'draft = "none"' in run("chat", "--print-config", "--draft", "none").stdout
    assert engine.made == []
