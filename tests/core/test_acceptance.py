"""The acceptance model learns what a drafter's confidence is worth."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from math import exp, inf, log, log1p

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.acceptance import AcceptanceModel

Truth = Callable[[float, int, int], float]
Outcome = tuple[float, int, int, bool]

CONFIDENCES = [-8.0, -5.0, -3.0, -2.0, -1.5, -1.0, -0.7, -0.4, -0.2, -0.1, -0.05, -0.01]


def sigmoid(odds: float) -> float:
    return 1 / (1 + exp(-odds))


def log_odds(confidence: float) -> float:
    return confidence - log1p(-exp(confidence))


SOURCES: dict[str, Truth] = {
    "honest": lambda confidence, _, __: exp(confidence),
    "overconfident": lambda confidence, _, __: sigmoid(0.5 * log_odds(confidence) - 1.0),
    "too modest": lambda confidence, _, __: sigmoid(1.5 * log_odds(confidence) + 1.0),
    "worse with depth": lambda confidence, _, depth: sigmoid(log_odds(confidence) - 0.4 * (depth - 1)),
    "only ranks count": lambda _, rank, __: (0.7, 0.15, 0.1, 0.02)[rank],
}


def outcomes(truth: Truth, count: int, seed: int) -> list[Outcome]:
    rng = random.Random(seed)
    drawn = []
    for _ in range(count):
        confidence, rank, depth = rng.choice(CONFIDENCES), rng.randrange(4), rng.randrange(1, 6)
        drawn.append((confidence, rank, depth, rng.random() < truth(confidence, rank, depth)))
    return drawn


def log_loss(model: AcceptanceModel, drawn: list[Outcome]) -> float:
    total = 0.0
    for confidence, rank, depth, accepted in drawn:
        chance = exp(model.log_probability(confidence, rank, depth))
        total -= log(chance if accepted else 1 - chance)
    return total / len(drawn)


def teach(model: AcceptanceModel, drawn: list[Outcome]) -> AcceptanceModel:
    for confidence, rank, depth, accepted in drawn:
        model.learn(confidence, rank, depth, accepted=accepted)
    return model


def test_it_begins_with_what_the_drafter_says() -> None:
    for confidence in CONFIDENCES:
        assert AcceptanceModel().log_probability(confidence, 0, 1) == pytest.approx(confidence, rel=1e-6)


@pytest.mark.parametrize("source", SOURCES)
def test_it_approaches_the_truth_of_a_source(source: str) -> None:
    truth = SOURCES[source]
    model, held_out = AcceptanceModel(), outcomes(truth, 4000, seed=1)
    losses = [log_loss(model, held_out)]
    for seed in range(2, 6):
        teach(model, outcomes(truth, 5000, seed))
        losses.append(log_loss(model, held_out))
    best = -sum(
        log(truth(c, r, d) if accepted else 1 - truth(c, r, d)) for c, r, d, accepted in held_out
    ) / len(held_out)
    if source == "honest":
        assert losses[-1] < losses[0] + 0.01, "what was right is not unlearnt"
    else:
        assert losses[1] < losses[0]
        assert losses[-1] - best < 0.15 * (losses[0] - best)
    assert losses[-1] - best < 0.02
    errors = [
        abs(exp(model.log_probability(c, r, d)) - truth(c, r, d))
        for c in CONFIDENCES
        for r in range(4)
        for d in range(1, 6)
    ]
    assert sum(errors) / len(errors) < 0.05


def test_a_few_verdicts_already_help() -> None:
    """An order that is better only after thousands of tokens would come too late for a request."""
    truth = SOURCES["overconfident"]
    held_out = outcomes(truth, 4000, seed=1)
    taught = teach(AcceptanceModel(), outcomes(truth, 100, seed=2))
    assert log_loss(taught, held_out) < 0.8 * log_loss(AcceptanceModel(), held_out)


ANY_CONFIDENCE = st.floats(-1e30, 0.0) | st.sampled_from([0.0, -0.0, -inf, -5e-324, -1e-5, -1e-6])
ANY_OUTCOME = st.tuples(ANY_CONFIDENCE, st.integers(0, 40), st.integers(1, 500), st.booleans())


@settings(max_examples=100, deadline=None)
@given(st.lists(ANY_OUTCOME, max_size=60), st.integers(0, 40), st.integers(1, 500))
def test_whatever_it_learnt_more_confidence_is_never_less_probable(
    history: list[Outcome], rank: int, depth: int
) -> None:
    model = teach(AcceptanceModel(), history)
    ladder = [-inf, -1e30, -700.0, *CONFIDENCES, -1e-4, -1e-5, -1e-6, -5e-324, 0.0]
    found = [model.log_probability(confidence, rank, depth) for confidence in ladder]
    assert all(below <= above for below, above in pairwise(found))
    assert all(-20 < each <= 0 for each in found)


def test_a_source_that_is_upside_down_does_not_turn_the_order() -> None:
    """A drafter's own order is kept even where all that was seen speaks against it."""
    model = AcceptanceModel()
    for _ in range(2000):
        model.learn(-0.01, 0, 1, accepted=False)
        model.learn(-6.0, 0, 1, accepted=True)
    assert model.log_probability(-0.01, 0, 1) >= model.log_probability(-6.0, 0, 1)
