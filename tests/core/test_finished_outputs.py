"""What drafters that learn are told of the end of a request: its output up to the stop, if it ended well."""

from __future__ import annotations

import pytest

from paceline.core.draft_lane import DraftPolicy
from paceline.core.drafting import DrafterNeeds, FixedLength
from paceline.core.engine_core import CoreConfig, EngineCore, Limits
from paceline.core.params import SamplingParams
from paceline.core.work import (
    FinishedOutput,
    Release,
    RequestAborted,
    RequestArrived,
    RunTarget,
    StepDone,
    Verdict,
    Work,
)
from paceline.errors import RequestError

LIMITS = Limits(max_num_seqs=4, max_batch_tokens=64, num_slots=128, context_length=64)


def core(*, learns: bool = True) -> EngineCore:
    needs = DrafterNeeds("learner", learns_outputs=learns)
    policy = DraftPolicy((needs,), FixedLength(0))
    return EngineCore(CoreConfig(LIMITS, 50, (49,), prefix_cache=False, drafting=policy))


def begun(core: EngineCore, params: SamplingParams) -> RunTarget:
    work = core.handle(RequestArrived("r", (1, 2, 3), params.resolved()), 0.0)
    return next(each for each in work if isinstance(each, RunTarget))


def told(work: list[Work]) -> list[FinishedOutput]:
    return [output for each in work if isinstance(each, Release) for output in each.finished]


def test_tokens_after_the_stop_are_not_told() -> None:
    engine = core()
    run = begun(engine, SamplingParams(max_tokens=9, tenant="t"))
    work = engine.handle(StepDone(run.step, (Verdict("r", (), (7, 8, 49, 11, 12)),)), 1.0)
    assert told(work) == [FinishedOutput((7, 8, 49), "t")]


def test_a_stop_string_ends_it_too() -> None:
    engine = core()
    run = begun(engine, SamplingParams(max_tokens=9, stop="x"))
    work = engine.handle(StepDone(run.step, (Verdict("r", (), (7, 8, 9), stop_at=2),)), 1.0)
    assert told(work) == [FinishedOutput((7, 8))]


def test_a_limit_is_a_good_end() -> None:
    engine = core()
    run = begun(engine, SamplingParams(max_tokens=2))
    work = engine.handle(StepDone(run.step, (Verdict("r", (), (7, 8, 9)),)), 1.0)
    assert told(work) == [FinishedOutput((7, 8))]


def test_what_failed_or_was_aborted_is_not_learnt_from() -> None:
    engine = core()
    run = begun(engine, SamplingParams(max_tokens=9))
    work = engine.handle(StepDone(run.step, (Verdict("r", (), (7, 8), error="not finite"),)), 1.0)
    assert any(isinstance(each, Release) for each in work)
    assert told(work) == []
    engine = core()
    run = begun(engine, SamplingParams(max_tokens=9))
    engine.handle(StepDone(run.step, (Verdict("r", (), (7, 8)),)), 1.0)
    work = engine.handle(RequestAborted("r"), 2.0)
    work += engine.handle(StepDone(2, (Verdict("r", (), (9,)),)), 2.0)
    assert any(isinstance(each, Release) for each in work)
    assert told(work) == []


def test_nothing_is_told_where_nobody_learns() -> None:
    engine = core(learns=False)
    run = begun(engine, SamplingParams(max_tokens=2))
    work = engine.handle(StepDone(run.step, (Verdict("r", (), (7, 8)),)), 1.0)
    assert any(isinstance(each, Release) for each in work)
    assert told(work) == []


@pytest.mark.parametrize("tenant", [3, None, "x" * 300, "\ud800"], ids=ascii)
def test_a_tenant_is_a_short_text(tenant: object) -> None:
    with pytest.raises(RequestError, match="tenant is"):
        SamplingParams(tenant=tenant)  # type: ignore[arg-type]
