"""Bounds, worked out by hand, and in the order that they must have."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.sim.acceptance import read_traces
from paceline.sim.bounds import Bound, bounds
from paceline.sim.costs.forms import LinearDraft, LinearPass
from paceline.sim.costs.model import CostModel
from paceline.sim.costs.published import published as published_costs

from .data import needs_traces, published, request

COSTS = CostModel(
    target=LinearPass(fixed_s=1.0, per_token_s=0.01),
    drafts={"ngram": LinearDraft(fixed_s=0.001), "eagle": LinearDraft(fixed_s=0.1, per_level_s=0.05)},
    step_overhead_s=0.02,
)
# Nothing repeats, so that lookup finds nothing; the head is right 2, 0, 1 ... guesses deep.
TRACE = request("a", [1, 2, 3], [4, 5, 6, 7, 8, 9], eagle=[1, 3, 1, 1, 2, 1])


def found(*traces: object, costs: CostModel = COSTS, **options: object) -> dict[str, Bound]:
    return {each.name: each for each in bounds(list(traces), costs, **options)}  # type: ignore[arg-type]


def test_by_hand() -> None:
    by_name = found(TRACE, prefill=False, lengths=(1,))
    rate = {name: each.tokens_per_s for name, each in by_name.items()}
    step = 1.0 + 0.02
    assert rate["autoregressive"] == pytest.approx(5 / (5 * (step + 0.01)))
    # After 1, 3, 4: 2 + 1 + 2 tokens by steps of one guess.
    assert rate["fixed: eagle, k=1"] == pytest.approx(5 / (3 * (step + 0.02 + 0.15)))
    assert rate["no miss: eagle, k=1"] == pytest.approx(5 / (3 * (step + 0.02)))
    assert rate["fixed: ngram, k=1"] == pytest.approx(5 / (5 * (step + 0.01 + 0.001)))
    # After 1, 4: 3 + 2 tokens; 2 and 1 guesses.
    oracle = 2 * step + 0.01 * 5 + 2 * 0.1 + 3 * 0.05
    assert rate["oracle length: eagle"] == pytest.approx(5 / oracle)
    assert rate["oracle length: ngram"] == pytest.approx(rate["autoregressive"])
    assert rate["oracle combination, winner charged"] == pytest.approx(5 / oracle)
    assert rate["oracle combination, as published"] == pytest.approx(5 / (2 * step + 0.05 + 2 * 0.001))
    assert rate["oracle combination, all drafters run"] == pytest.approx(5 / (oracle + 2 * 0.001))
    assert rate["free drafting"] == pytest.approx(5 / (2 * step + 0.05))
    assert rate["target alone"] == pytest.approx(5 / (step + 0.05))
    for each in by_name.values():
        assert each.speedup == pytest.approx(each.tokens_per_s / rate["autoregressive"])
        assert each.reached(each.tokens_per_s / 2) == pytest.approx(0.5)


def test_a_batch_and_its_prompts() -> None:
    bound = found(TRACE, batch=4)["autoregressive"]
    assert bound.tokens_per_s == pytest.approx(4 * 6 / (1.02 + 0.01 * 12 + 5 * (1.02 + 0.04)))
    assert bound.speedup == 1.0


def test_records_of_another_text_are_not_combined() -> None:
    other = request("b", [1], [2, 3, 4, 5], eagle=[1, 2])
    without = request("c", [1], [2, 3])
    by_name = found(TRACE, other, without)
    assert by_name["autoregressive"].requests == 3
    assert by_name["fixed: eagle, k=3"].requests == 2
    assert by_name["free drafting"].requests == 1
    assert "free drafting" not in found(other)


def test_single_tokens() -> None:
    one = request("a", [1, 2], [3], eagle=[1])
    assert {round(each.speedup, 9) for each in found(one).values()} == {1.0}
    with pytest.raises(ConfigError, match="no token to decode"):
        found(one, prefill=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drafters": ["suffix"]}, "no request has a record of drafter 'suffix': there are ngram, eagle"),
        ({"batch": 0}, "batch 0, .*: give whole numbers from 1"),
        ({"lengths": (0,)}, r"lengths \(0,\): give whole numbers from 1"),
    ],
)
def test_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        found(TRACE, **options)


def test_drafters_without_costs_are_left_out_unless_asked_for() -> None:
    alone = CostModel(target=COSTS.target, drafts={})
    assert list(found(TRACE, costs=alone)) == ["autoregressive", "target alone"]
    with pytest.raises(ConfigError, match="eagle"):
        found(TRACE, costs=alone, drafters=["eagle"])


@needs_traces
@pytest.mark.parametrize("batch", [1, 64])
def test_order_on_published_traces(batch: int) -> None:
    requests = [each for each in read_traces(published("gsm8k")).requests[:120] if each.aligned("eagle")]
    costs = published_costs("llama3.1-8b@h100-calibrated")
    rate = {each.name: each.tokens_per_s for each in bounds(requests, costs, batch)}
    order = [
        "autoregressive",
        "fixed: eagle, k=3",
        "oracle length: eagle",
        "oracle combination, winner charged",
        "oracle combination, as published",
        "free drafting",
        "target alone",
    ]
    assert [rate[name] for name in order] == sorted(rate[name] for name in order)
    assert rate["oracle combination, all drafters run"] < rate["oracle combination, winner charged"]
    assert rate["fixed: eagle, k=3"] < rate["no miss: eagle, k=3"]
