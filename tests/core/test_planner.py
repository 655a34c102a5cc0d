"""How much to guess and verify: costs as measured, acceptance as it was."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.planner import Acceptance, PassCost, Planner


def cost_of(base: float, slope: float, sizes: range = range(1, 17)) -> PassCost:
    cost = PassCost()
    for size in sizes:
        cost.learn(size, base + slope * size)
    return cost


def test_sizes_that_were_seen_are_remembered_and_others_lie_on_their_line() -> None:
    cost = cost_of(10.0, 0.5)
    assert cost.of(4) == pytest.approx(12.0)
    assert cost.of(40) == pytest.approx(30.0)


def test_one_size_alone_says_that_more_tokens_cost_a_little_more() -> None:
    cost = PassCost()
    assert not cost.known
    cost.learn(1, 0.1)
    assert cost.known
    assert cost.of(1) < cost.of(8) < 1.5 * cost.of(1)


def test_a_disturbed_pass_moves_the_estimate_little_and_none_moves_it_below_a_pass_over_one() -> None:
    cost = cost_of(10.0, 0.0)
    cost.learn(4, 10_000.0)
    assert cost.of(4) <= 12.0
    cost.learn(3, 0.0)
    cost.learn(0, 5.0)
    cost.learn(100_000, 1.0)
    assert cost.of(3) == pytest.approx(10.0, rel=0.05)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 80), st.floats(0.001, 100.0)), min_size=1, max_size=60))
def test_more_tokens_never_cost_less(passes: list[tuple[int, float]]) -> None:
    cost = PassCost()
    for tokens, seconds in passes:
        cost.learn(tokens, seconds)
    costs = [cost.of(tokens) for tokens in range(1, 300)]
    assert costs == sorted(costs)
    assert cost.of(0) == costs[0] > 0.0
    assert [cost.between(least, least + 40) for least in (1, 30, 70)] == [
        costs[least - 1 : least + 40] for least in (1, 30, 70)
    ]


def test_a_size_that_was_lucky_looks_no_cheaper_than_the_sizes_beside_it() -> None:
    cost = PassCost()
    for size in (8, 16, 32):
        for _ in range(5):
            cost.learn(size, 10.0 + size)
    cost.learn(17, 20.0)
    assert 0.5 < cost.of(20) - cost.of(16) < 6.0
    assert cost.of(17) - cost.of(16) > 0.1


def test_one_disturbed_size_makes_no_other_dear_for_ever() -> None:
    cost = PassCost()
    cost.learn(2, 1000.0)
    for _ in range(20):
        for size in (1, 4, 8, 16):
            cost.learn(size, 10.0 + size)
    assert cost.of(2) <= cost.of(4) == pytest.approx(14.0)
    assert cost.of(16) == pytest.approx(26.0)


def test_between_two_sizes_that_were_seen_the_cost_is_between_theirs() -> None:
    cost = PassCost()
    for size, seconds in ((1, 10.0), (8, 20.0), (64, 22.0)):
        cost.learn(size, seconds)
    assert all(10.0 <= cost.of(size) <= 20.0 for size in range(1, 9))
    assert all(20.0 <= cost.of(size) <= 22.0 for size in range(8, 65))


def test_a_longer_context_is_priced_and_little_variation_of_it_is_no_reason_for_wild_prices() -> None:
    cost = PassCost()
    for context in range(1000, 5000, 40):
        for size in (1, 4, 16):
            cost.learn(size, 10.0 + size + 0.001 * context, context)
    cost.learn(4, 14.0 + 1.0, 1000)
    assert cost.of(16) == pytest.approx(27.0, rel=0.1)
    cost = PassCost()
    for step in range(100):
        cost.learn(16, 20.0 + 0.01 * step, 4000 + step)  # slower by and by, and longer
    for context in (250, 100_000):
        cost.learn(1, 9.0, context)
        assert 10.0 <= cost.of(16) <= 42.0


def test_before_anything_was_measured_all_is_allowed() -> None:
    assert Planner().counts([[-0.1, -9.0], []]) == [2, 0]


def test_acceptance_counts_only_what_was_reached() -> None:
    accepted = Acceptance(hits=0.0, trials=0.0)
    accepted.count(verified=5, accepted=2)
    assert accepted.rate == pytest.approx((0.95 * (0.95 + 1)) / (0.95 * (0.95 + 1) + 1))
    accepted = Acceptance(hits=0.0, trials=0.0)
    accepted.count(verified=3, accepted=3)
    assert accepted.rate == 1.0


def test_what_pays_is_kept_over_all_requests() -> None:
    sure = [level * math.log(0.95) for level in range(1, 5)]
    poor = [level * math.log(0.1) for level in range(1, 5)]
    assert Planner(cost_of(10.0, 3.0, range(1, 33))).counts([sure, poor]) == [4, 0]
    assert Planner(cost_of(10.0, 0.0, range(1, 33))).counts([sure, poor]) == [4, 4]
