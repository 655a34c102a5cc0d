"""Ctrl-C at any moment: it is raised, and the engine is as usable as before."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.engine.engine import Engine
from tests.cases.lab import random_prompt
from tests.tiny import ENGINE, write_random

PARAMS = SamplingParams(max_tokens=24, temperature=0.0)
PROMPT = random_prompt(3, 12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("interrupted") / "model")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    with LLM(model, draft="none", **ENGINE) as llm:
        return llm.generate(PROMPT, PARAMS)[0].token_ids


def finish(engine: Engine, limit_s: float = 30.0) -> tuple[list[int], int]:
    """The tokens of the request that runs, and how often Ctrl-C came through."""
    tokens: list[int] = []
    interrupts, end = 0, time.perf_counter() + limit_s
    while time.perf_counter() < end:
        try:
            for _, chunk in engine.step():
                tokens.extend(chunk.token_ids)
                if chunk.output is not None:
                    assert chunk.output.error is None
                    return tokens, interrupts
        except KeyboardInterrupt:
            interrupts += 1
    raise AssertionError("the engine stalled")


@pytest.mark.parametrize("placement", ["serial", "disaggregated"])
@pytest.mark.parametrize("moment", ["core", "log", "executor"])
def test_an_event_is_dealt_with_to_its_end(
    placement: str, moment: str, model: Path, expected: list[int], tmp_path: Path
) -> None:
    options: dict[str, Any] = {**ENGINE, "placement": placement, "record": tmp_path / "log"}
    with LLM(model, draft="ngram", **options) as llm:
        engine = llm.engine
        assert engine._log is not None
        owner, name = {
            "core": (engine.core, "handle"),
            "log": (engine._log, "append"),
            "executor": (engine._executor, "submit"),
        }[moment]
        real, calls = getattr(owner, name), []

        def interrupted(*arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) in (3, 4, 7):
                os.kill(os.getpid(), signal.SIGINT)
            return real(*arguments)

        setattr(owner, name, interrupted)
        params = llm.intake.params(PARAMS)
        engine.add("a", 0, PROMPT, params)
        tokens, interrupts = finish(engine)
        assert tokens == expected
        assert interrupts >= 1


def test_a_pass_of_this_thread_is_ended_with_its_requests(model: Path, expected: list[int]) -> None:
    with LLM(model, draft="none", **ENGINE) as llm:
        executor: Any = llm.engine._executor
        real, calls = executor._target.run, []

        def run(work: Any) -> Any:
            calls.append(work)
            if len(calls) == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return real(work)

        executor._target.run = run
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPT, PARAMS)
        assert len(calls) == 3
        assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected


def test_a_request_arrives_whole_or_not_at_all(model: Path, expected: list[int]) -> None:
    with LLM(model, draft="none", **ENGINE) as llm:
        real = llm.engine.core.handle

        def handle(*arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            return real(*arguments)

        llm.engine.core.handle = handle  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            llm.engine.add("a", 0, PROMPT, llm.intake.params(PARAMS))
        llm.engine.core.handle = real  # type: ignore[method-assign]
        assert finish(llm.engine)[0] == expected
