"""What is measured fits the scheduler's bounds, the model and the time."""

from __future__ import annotations

import pytest

from paceline.profiling.plan import CHUNK, QUICK, Plan


@pytest.mark.parametrize("plan", [Plan(), QUICK])
def test_no_pass_is_larger_than_the_engine_runs(plan: Plan) -> None:
    assert all(cell.new_tokens <= CHUNK for cell in plan.passes())
    assert all(cell.requests <= plan.most_requests for cell in [*plan.passes(), *plan.drafts()])
    assert all(cell.context + cell.each <= plan.context_length for cell in plan.passes())
    assert len(set(plan.passes())) == len(plan.passes())


@pytest.mark.parametrize("plan", [Plan(), QUICK])
def test_both_sides_of_the_kernels_step_are_measured(plan: Plan) -> None:
    sizes = {cell.new_tokens for cell in plan.passes() if cell.requests == 1}
    assert {1, 12, 13} <= sizes


def test_a_slow_model_reads_less() -> None:
    fast, slow = Plan().within(1e6, 8192), Plan().within(50.0, 8192)
    assert fast == Plan()
    assert slow.most_requests * slow.contexts[-1] <= 0.3 * slow.budget_s * 50.0
    crawling = Plan().within(1e-3, 8192)
    assert crawling.batches == (1,)
    assert crawling.passes()
    assert crawling.drafts()


def test_a_short_context_bounds_the_texts() -> None:
    plan = Plan().within(1e6, 1000)
    assert plan.context_length <= 1000
    assert plan.contexts[-1] < Plan().contexts[-1]
