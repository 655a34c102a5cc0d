"""Guesses of several drafters in one tree: what they are worth is learnt from what the target chose."""

from __future__ import annotations

import random
from math import exp, inf, log

import pytest

from paceline.core.acceptance import Reliability
from paceline.core.ensemble import Ensemble, Merged
from paceline.core.recent import LateSlopes, Recent
from paceline.core.token_tree import ROOT

RIGHT, WRONG = 1, 2


def chain(tokens: list[int], score: float = 0.0) -> tuple[list[int], range, list[float]]:
    return tokens, range(-1, len(tokens) - 1), [score] * len(tokens)


def test_equal_guesses_are_one_node_and_others_branches() -> None:
    ensemble, merged = Ensemble(2), Merged()
    ensemble.take(merged, "r", 0, chain([5, 6, 7], -0.5), -inf)
    ensemble.take(merged, "r", 1, chain([5, 8], -0.5), -inf)
    tree = merged.tree
    assert (tree.tokens, tree.parents) == ([5, 6, 7, 8], [ROOT, 0, 1, 0])
    assert merged.proposers == [3, 1, 1, 2]
    for node, above in enumerate(tree.parents):
        assert tree.values[node] == pytest.approx(tree.scores[node] + tree.value(above))
    assert len(merged.covered()) == 3
    assert merged.covered()[1] == pytest.approx(exp(tree.values[1]) + exp(tree.values[3]))


def test_who_repeats_itself_does_not_agree_with_itself() -> None:
    ensemble, merged = Ensemble(2), Merged()
    ensemble.take(merged, "r", 0, ([5, 5, 6], [-1, -1, 1], [-0.5] * 3), -inf)
    assert merged.proposers == [1, 1]
    assert merged.tree.scores[0] == pytest.approx(-0.5)


def test_what_is_hardly_reached_gets_no_node_and_its_depth_is_told() -> None:
    ensemble, merged = Ensemble(1), Merged()
    cut = ensemble.take(merged, "r", 0, chain([5] * 9, log(0.5)), log(0.2))
    assert (len(merged.tree), cut) == (2, 3)
    assert ensemble.take(Merged(), "r", 0, chain([5, 6], log(0.9)), log(0.2)) is None


def test_calibration_converges_to_what_each_drafter_is_worth() -> None:
    """Of drafters of known acceptance, whatever they say of themselves: too sure, and saying nothing."""
    rng, ensemble = random.Random(1), Ensemble(2)
    worth, said = (0.8, 0.4), (log(0.99), 0.0)
    for step in range(3000):
        for drafter in (0, 1):  # in a step of its own each, so that they never meet
            merged = Merged()
            ensemble.take(merged, f"r{step % 4}", drafter, chain([RIGHT] * 3, said[drafter]), -inf)
            right = next((at for at in range(3) if rng.random() > worth[drafter]), 3)
            ensemble.judge(merged, f"r{step % 4}", [RIGHT] * right + [WRONG])
        if step == 500:
            ensemble.reliability = [Reliability(), Reliability()]
    for drafter in (0, 1):
        merged = Merged()
        ensemble.take(merged, "new", drafter, chain([RIGHT] * 3, said[drafter]), -inf)
        assert [exp(score) for score in merged.tree.scores] == pytest.approx([worth[drafter]] * 3, abs=0.1)
        error = ensemble.reliability[drafter].error
        assert error is not None
        assert error < 0.05


def test_agreement_and_contradiction_are_information() -> None:
    """Two drafters that are each right in 60 % of the cases: where they agree, nearly always."""
    rng, ensemble = random.Random(2), Ensemble(2)
    for step in range(3000):
        merged, easy = Merged(), rng.random() < 0.5
        for drafter in (0, 1):
            token = RIGHT if easy or rng.random() < 0.2 else 10 + drafter + 2 * rng.randrange(20)
            ensemble.take(merged, f"r{step % 5}", drafter, chain([token]), -inf)
        ensemble.judge(merged, f"r{step % 5}", [RIGHT])
    together, apart = Merged(), Merged()
    for drafter in (0, 1):
        ensemble.take(together, "new", drafter, chain([RIGHT]), -inf)
        ensemble.take(apart, "new", drafter, chain([3 + drafter]), -inf)
    assert exp(together.tree.scores[0]) > 0.9
    assert all(exp(score) < 0.35 for score in apart.tree.scores)


def test_only_guesses_below_what_was_committed_are_judged() -> None:
    ensemble, merged = Ensemble(1), Merged()
    ensemble.take(merged, "r", 0, ([5, 6, 7, 8], [-1, 0, 1, -1], [-0.5] * 4), -inf)
    ensemble.judge(merged, "r", [5, 9])
    assert sum(ensemble.reliability[0].counts) == 3, (
        "5 and its sibling 8, then 6; 7 hangs below what was wrong"
    )


def test_of_many_requests_some_are_judged_each_in_its_turn() -> None:
    ensemble = Ensemble(1)
    for _ in range(4):
        ensemble.begin_step(64)
        for at in range(64):
            merged = Merged()
            ensemble.take(merged, f"r{at}", 0, chain([5], -0.5), -inf)
            ensemble.judge(merged, f"r{at}", [5])
    assert sum(ensemble.reliability[0].counts) == 4 * 16


def test_reliability_counts_by_tenths() -> None:
    said = Reliability()
    assert said.error is None
    for at in range(10):
        said.count(0.85, accepted=at < 8)
        said.count(0.2, accepted=at < 2)
    said.count(1.0, accepted=True)
    assert said.tenths == (
        (10, pytest.approx(0.2), 0.2),
        (10, pytest.approx(0.85), 0.8),
        (1, 1.0, 1.0),
    )
    assert said.error == pytest.approx(0.5 / 21)


def test_what_was_of_late_tells_requests_apart() -> None:
    recent = Recent(2)
    for _ in range(10):
        recent.count("good", [6, None])
        recent.count("poor", [0, None])
    assert recent.of("good")[0][0] > 0.3 > -0.3 > recent.of("poor")[0][0]
    assert recent.of("good")[0][1] > 0.0 > recent.of("poor")[0][1]
    assert recent.of("good")[1] == recent.of("new")[0] == (0.0, 0.0)
    recent.forget("good")
    assert recent.of("good")[0] == (0.0, 0.0)


def test_the_worth_of_what_was_of_late_is_learnt() -> None:
    rng, slopes = random.Random(3), LateSlopes(0.0)
    for _ in range(4000):
        late = (rng.uniform(-1, 1), rng.choice([-0.7, 0.3]))
        truth = 1 / (1 + exp(-2.0 * late[0]))
        chance = 1 / (1 + exp(-slopes.odds(late, 1)))
        slopes.update(late, 1, (rng.random() < truth) - chance)
    assert slopes.odds((1.0, 0.0), 1) == pytest.approx(2.0, abs=0.5)
    assert abs(slopes.odds((0.0, 1.0), 1)) < 0.5
    assert slopes.odds((1.0, 1.0), 2) == 0.0, "later guesses have slopes of their own"
