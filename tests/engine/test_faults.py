"""Faults stay where they are: in their request, in their guesses, in their log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from paceline import LLM, AsyncLLM, ConfigError, EngineError, RequestError, SamplingParams
from paceline.core.drafting import DrafterNeeds
from paceline.core.work import DraftItem, Event, Proposal, RunTarget, Work
from paceline.engine.executor import LocalExecutor
from paceline.engine.replay import replay
from tests.cases.drafters import RuleDrafter, Script, oracle
from tests.cases.lab import Lab, random_prompt
from tests.tiny import ENGINE, write_random

BROKEN = 7
FEW = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("faults") / "model")


@pytest.fixture(scope="module")
def lab(model: Path) -> Lab:
    return Lab(model)


def test_what_a_guess_leads_to_after_the_end_is_not_looked_at(lab: Lab) -> None:
    """The request stops at a token after which every token is masked: a pass that checks guesses beyond the
    stop must not turn the stop into an error."""
    prompt = random_prompt(1, 12)
    output = lab.baseline(prompt, SamplingParams(max_tokens=12)).token_ids
    stop = next(token for at, token in enumerate(output) if at >= 3 and token not in output[:at])
    params = SamplingParams(
        max_tokens=12, stop_token_ids=[stop], bad_words=[[stop, token] for token in range(lab.vocab)]
    )
    script = Script()
    script.learn([*prompt, *output])
    llm = LLM(lab.model, draft=RuleDrafter(oracle(script)), num_speculative_tokens=8, **ENGINE)
    (found,) = llm.generate(prompt, params)
    assert found.finish_reason == "stop", found.error
    assert found.token_ids == output[: output.index(stop) + 1]


def test_tokens_before_an_error_are_kept(lab: Lab) -> None:
    """Where no token can be chosen, what was written up to there stands, however it was committed."""
    prompt = random_prompt(2, 12)
    output = lab.baseline(prompt, SamplingParams(max_tokens=12)).token_ids
    dead_end = next(token for at, token in enumerate(output) if at >= 3 and token not in output[:at])
    params = SamplingParams(max_tokens=12, bad_words=[[dead_end, token] for token in range(lab.vocab)])
    ends = []
    for k in (0, 1, 8):
        llm = LLM(lab.model, draft="ngram", num_speculative_tokens=k, **ENGINE)
        (found,) = llm.generate(prompt, params)
        assert found.finish_reason == "error"
        assert "masked" in (found.error or "")
        ends.append(found.token_ids)
    assert ends[0] == ends[1] == ends[2] == output[: output.index(dead_end) + 1]


def test_a_broken_request_leaves_nothing_in_the_prefix_cache(tmp_path: Path) -> None:
    broken = write_random(tmp_path / "broken", broken_token=BROKEN)
    prompts = [[4, 5, 6, BROKEN, 9], [4, 5, 6, 10, 11]]
    with LLM(broken, draft="none", **ENGINE) as fresh:
        (expected,) = fresh.generate([prompts[1]], FEW)
    with LLM(broken, draft="none", **ENGINE) as llm:
        (failed,) = llm.generate([prompts[0]], FEW)
        assert "not finite" in (failed.error or "")
        (later,) = llm.generate([prompts[1]], FEW)
    assert later.error is None
    assert later.token_ids == expected.token_ids


class Failing:
    """Stands before an executor's work and raises at its nth target pass."""

    def __init__(self, run: Callable[[Work], Event | None], at: int) -> None:
        self.run, self.at = run, at

    def __call__(self, work: Work) -> Event | None:
        if isinstance(work, RunTarget):
            self.at -= 1
            if self.at == 0:
                raise MemoryError("no memory for this pass")
        return self.run(work)


def test_a_failed_step_is_an_engine_error_and_the_next_request_is_served(model: Path, lab: Lab) -> None:
    engine = AsyncLLM(model, draft="none", **ENGINE)
    inner = engine.llm.engine
    executor = cast(LocalExecutor, inner._executor)
    executor._run = Failing(executor._run, at=3)  # type: ignore[method-assign]
    prompt = random_prompt(3, 8)

    async def scenario() -> list[int]:
        with pytest.raises(EngineError, match="no memory for this pass"):
            await engine.generate(prompt, FEW)
        (output,) = await engine.generate(prompt, FEW)
        return output.token_ids

    assert asyncio.run(scenario()) == lab.baseline(prompt, FEW).token_ids
    engine.close()


def test_a_closed_engine_says_so(model: Path) -> None:
    engine = AsyncLLM(model, draft="none", **ENGINE)

    async def scenario() -> None:
        stream = engine.stream(random_prompt(4, 8), SamplingParams(max_tokens=100))
        await anext(stream)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineError, match="make a new AsyncLLM"):
            async for _ in stream:
                pass
        with pytest.raises(EngineError, match="make a new AsyncLLM"):
            await engine.generate(random_prompt(4, 8), FEW)

    asyncio.run(scenario())


def test_a_log_that_cannot_be_written_ends_alone(
    model: Path, lab: Lab, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(model, draft="none", record=tmp_path / "log.jsonl", **ENGINE) as llm:
        log = llm.engine._log
        assert log is not None

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        log.append = full  # type: ignore[method-assign]
        prompt = random_prompt(5, 8)
        assert llm.generate(prompt, FEW)[0].token_ids == lab.baseline(prompt, FEW).token_ids
    assert "No space left on device" in caplog.text


def test_numbers_beyond_64_bits_are_refused() -> None:
    with pytest.raises(RequestError, match="64 bits"):
        SamplingParams(max_tokens=10**30)


@pytest.mark.parametrize(
    "odd",
    [
        {"tokens": (np.int64(5),), "parents": (np.int32(-1),), "scores": (np.float32(-0.5),)},
        {"tokens": np.array([5]), "parents": np.array([-1])},
        {"tokens": (5,), "parents": (-1,), "scores": (-(10**400),)},
        {"tokens": (5,), "parents": (-1,), "scores": (float("-inf"),)},
        {"tokens": (5.0,), "parents": (-1,)},
        {"tokens": (None,), "parents": (-1,)},
        {"tokens": (5,), "parents": (None,)},
        {"request_id": [1]},
        {"num_tokens": np.array([1, 2])},
        {"error": 5},
    ],
    ids=str,
)
def test_odd_proposals_cost_their_guesses_and_the_log_replays(
    model: Path, lab: Lab, tmp_path: Path, odd: dict[str, Any]
) -> None:
    class Odd:
        needs = DrafterNeeds("odd")

        def grow(self, items: Sequence[DraftItem]) -> list[Proposal]:
            known = {item.request_id: item.start + len(item.tokens) for item in items}
            return [Proposal(**{"request_id": name, "num_tokens": at, **odd}) for name, at in known.items()]

        def advance(self, items: Sequence[DraftItem]) -> None: ...

        def release(self, request_ids: Iterable[str]) -> None: ...

    prompt, log = random_prompt(6, 8), tmp_path / "log.jsonl"
    with LLM(model, draft=Odd(), num_speculative_tokens=2, record=log, **ENGINE) as llm:
        assert llm.generate(prompt, FEW)[0].token_ids == lab.baseline(prompt, FEW).token_ids
    assert replay(log) > 3


@pytest.mark.parametrize("draft", [object(), 5, b"ngram", [], False, RuleDrafter])
def test_what_is_no_drafter_is_refused(model: Path, draft: Any) -> None:
    with pytest.raises(ConfigError, match="draft is"):
        LLM(model, draft=draft, **ENGINE)


@pytest.mark.parametrize("bad", [None, 5, [1.5], [10**5000], {1: 2}, b"hello", [[1]], [True, None]])
def test_a_prompt_of_the_wrong_kind_fails_alone(model: Path, lab: Lab, bad: Any) -> None:
    with LLM(model, draft="ngram", **ENGINE) as llm:
        good = random_prompt(7, 8)
        outputs = llm.generate([good, bad, good], FEW)
        assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
        assert outputs[0].token_ids == lab.baseline(good, FEW).token_ids
        with pytest.raises(RequestError):
            llm.stream(bad, FEW)
        with pytest.raises(RequestError):
            llm.generate([good], [None])  # type: ignore[list-item]
        assert llm.engine.core.idle


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": 10**400},
        {"max_tokens": 10**5000},
        {"top_k": -(10**5000)},
        {"logit_bias": {"9" * 5000: 1}},
        {"logit_bias": {1: None}},
        {"min_tokens": None},
        {"n": None},
        {"n": 2**62},
        {"presence_penalty": None},
        {"ignore_eos": "no"},
        {"stop": "\ud800"},
    ],
    ids=lambda bad: next(iter(bad)),
)
def test_extreme_parameters_are_request_errors(bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        SamplingParams(**bad)
