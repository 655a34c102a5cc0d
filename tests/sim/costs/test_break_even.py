"""The break-even, against numbers computed by hand."""

from __future__ import annotations

from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.sim.costs.break_even import break_even, break_even_table, expected_tokens, speed_up
from paceline.sim.costs.forms import LinearDraft, LinearPass
from paceline.sim.costs.model import CostModel
from paceline.sim.costs.published import published

TARGET = LinearPass(fixed_s=10.0, per_token_s=1.0, per_kv_token_s=0.01)
COSTS = CostModel(TARGET, {"free": LinearDraft(), "slow": LinearDraft(per_level_s=3.0)}, step_overhead_s=1.0)


def test_one_guess() -> None:
    # Plain: 1 + 10 + 1 + 0.01 * 100 = 13. With a guess of the free drafter 14, so E = 1 + a = 14 / 13.
    assert break_even(COSTS, "free", 1, 100, 1).acceptance == pytest.approx(1 / 13)
    # The slow one: 17 / 13.
    assert break_even(COSTS, "slow", 1, 100, 1).acceptance == pytest.approx(4 / 13)


def test_two_guesses_of_four_requests() -> None:
    # Plain: 1 + 10 + 4 + 0.01 * 400 = 19; 4 * 2 guesses and two levels: 19 + 8 + 6 = 33.
    # So 1 + a + a^2 = 33 / 19.
    expected = (sqrt(1 + 4 * (33 / 19 - 1)) - 1) / 2
    assert break_even(COSTS, "slow", 4, 100, 2).acceptance == pytest.approx(expected)


def test_reading_what_was_accepted_counts() -> None:
    # Plain 12; with one guess 13 and 2 per token that the step before brought, whole tokens: 13 + 2 * 2 = 17.
    costs = CostModel(LinearPass(fixed_s=10.0, per_token_s=1.0), {"d": LinearDraft(per_unread_s=2.0)}, 1.0)
    assert break_even(costs, "d", 1, 0, 1).acceptance == pytest.approx(5 / 12)


def test_a_drafter_that_never_pays() -> None:
    costs = CostModel(TARGET, {"hopeless": LinearDraft(fixed_s=100.0)})
    assert break_even(costs, "hopeless", 1, 0, 3).acceptance is None


def test_a_drafter_that_always_pays() -> None:
    costs = CostModel(LinearPass(fixed_s=1.0), {"free": LinearDraft()})
    assert break_even(costs, "free", 1, 0, 3).acceptance == 0.0


@given(st.integers(1, 32), st.integers(0, 2000), st.integers(1, 8))
def test_speculation_pays_above_and_loses_below(requests: int, context: int, guesses: int) -> None:
    costs = published("llama3.1-8b@h100")
    found = break_even(costs, "eagle3", requests, context, guesses).acceptance
    assert found is not None
    assert speed_up(costs, "eagle3", requests, context, guesses, min(found + 1e-6, 1.0)) >= 1.0
    assert speed_up(costs, "eagle3", requests, context, guesses, max(found - 1e-6, 0.0)) <= 1.0


def test_expected_tokens_are_the_geometric_sum() -> None:
    assert expected_tokens(0.5, 3) == pytest.approx((1 - 0.5**4) / (1 - 0.5))
    assert expected_tokens(1.0, 3) == 4.0
    assert expected_tokens(0.0, 3) == 1.0


def test_a_table_has_every_combination_and_each_drafter_once() -> None:
    table = break_even_table(published("llama3.1-8b@h100"), requests=(1, 8), contexts=(100,), guesses=(1, 3))
    assert [(each.drafter, each.requests, each.guesses) for each in table] == [
        (drafter, requests, guesses)
        for drafter in ("ngram", "eagle")
        for requests in (1, 8)
        for guesses in (1, 3)
    ]
    # Fitted at three guesses, where its paper measured gains at every batch size.
    assert all(each.acceptance is not None and each.acceptance < 0.5 for each in table)


def test_costs_of_a_drafter_that_are_not_known() -> None:
    with pytest.raises(ConfigError, match="nothing of a drafter 'eagle3': they have free, slow"):
        break_even(COSTS, "eagle3", 1, 0, 1)
