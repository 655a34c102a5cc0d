"""The search finds what a closed form says is best, in time, and the same again for the same seed."""

from __future__ import annotations

import random
from dataclasses import replace
from time import perf_counter

import pytest

from paceline.errors import ConfigError, PacelineError
from paceline.sim.metrics import Slo
from paceline.sim.plan.candidates import Candidate, DrafterOption, Placed, Space, candidates
from paceline.sim.plan.search import Found, Scored, lead, search
from paceline.sim.plan.world import Effort, Objective, World
from tests.sim.plan.plans import PLAIN, ROUNDS, Made, chain


def found(made: Made, world: World | None = None) -> Found:
    return search(world or made.world(), made.space, made.candidates, rounds=ROUNDS)


def test_the_simulated_rate_is_the_closed_form() -> None:
    """One request: the prompt's pass, and then steps that each bring four tokens."""
    made = Made(10e-3, {"head": 2e-3}, {"head": 3}, token_s=1e-4)
    value = made.world().value(chain("head", 3), 0, Effort(1, 1, 1.0, (1, 1)))
    seconds = 10e-3 + 8 * 1e-4 + (made.output - 1) / 4 * made.step_s("head", 3)
    assert value == pytest.approx(made.output / seconds)


@pytest.mark.parametrize("seed", range(8))
def test_the_best_way_in_closed_form_is_found(seed: int) -> None:
    chance = random.Random(seed)
    names = ["slow", "quick", "weak"]
    made = Made(
        10e-3,
        {name: 10e-3 * chance.choice((0.05, 0.2, 0.5, 0.9, 1.2)) for name in names},
        {name: chance.randrange(0, 10) for name in names},
        token_s=chance.choice((0.0, 2e-4, 2e-3)),
    )
    name, length = made.best()
    result = found(made)
    best = result.best.candidate
    said = made.rate(best.drafters[0], best.length or 0) if best.drafters else made.rate(name, 0)
    assert said == pytest.approx(made.rate(name, length), rel=0.02)
    assert best.plain == (length == 0)
    assert result.plain.candidate.plain


def test_a_large_batch_is_decided_by_what_tokens_cost() -> None:
    """Of six guesses three are right: worth it until the tokens of the batch cost as much as the pass."""
    made = Made(10e-3, {"head": 0.0}, {"head": 3}, token_s=1e-3, lengths=(6,), output=401)
    assert (made.best(4)[1], made.best(20)[1]) == (6, 0)
    small = found(made, made.world(4))
    large = found(made, made.world(20))
    assert small.best.candidate == chain("head", 6)
    assert large.best.candidate == PLAIN
    assert lead(small.best, small.plain).ratio == pytest.approx(
        made.rate("head", 6, 4) / made.rate("head", 0, 4), rel=0.06
    )


def test_the_same_seed_gives_the_same_answer() -> None:
    made = Made(10e-3, {"a": 1e-3, "b": 2e-3}, {"a": 2, "b": 4}, token_s=1e-4, lengths=(2, 4))
    once, again = found(made), found(made)
    assert [(each.candidate, each.values) for each in once.ranked] == [
        (each.candidate, each.values) for each in again.ranked
    ]
    open_ = [found(made, made.world(rate=5.0, seed=seed)).best.values for seed in (1, 1, 2)]
    assert open_[0] == open_[1] != open_[2]


def test_the_time_is_kept_and_it_is_said_that_it_ran_out() -> None:
    made = Made(10e-3, {"a": 1e-3, "b": 2e-3}, {"a": 2, "b": 4}, output=2001)
    long = tuple(replace(each, effort=Effort(10**5, 10**4, 2.0, (1, 1))) for each in ROUNDS[1:])
    started = perf_counter()
    result = search(made.world(), made.space, made.candidates, rounds=(ROUNDS[0], *long), seconds=4.0)
    assert perf_counter() - started < 6.0
    assert result.cut_short
    assert result.rounds == 1
    assert result.tried <= result.of


def test_too_little_time_for_anything_is_an_error() -> None:
    made = Made(10e-3, {"a": 1e-3}, {"a": 2})
    with pytest.raises(PacelineError, match="raise --budget-seconds"):
        search(made.world(), made.space, made.candidates, rounds=ROUNDS, seconds=1e-6)


def test_plain_decoding_must_be_among_what_is_tried() -> None:
    made = Made(10e-3, {"a": 1e-3}, {"a": 2})
    with pytest.raises(ConfigError, match="no plain decoding"):
        search(made.world(), made.space, [chain("a", 1)], rounds=ROUNDS)


def test_replicas_share_the_load_and_add_up() -> None:
    made = Made(10e-3, {"a": 1e-3}, {"a": 3}, token_s=1e-4, output=401)
    one, two = Candidate(placed=Placed(1)), Candidate(placed=Placed(1, replicas=2))
    effort = Effort(1, 1, 2.0, (1000, 50))
    alone, both = (made.world(16).value(each, 0, effort) for each in (one, two))
    assert both / alone == pytest.approx(2 * (10e-3 + 16e-4) / (10e-3 + 8e-4) / 2, rel=0.02)
    # Replicas that nobody is left for do nothing.
    assert made.world(1).value(two, 0, effort) == pytest.approx(made.world(1).value(one, 0, effort))


@pytest.mark.parametrize("goal", ["p50", "p95", "goodput"])
def test_other_aims(goal: str) -> None:
    made = Made(10e-3, {"a": 2e-3}, {"a": 3})
    slo = Slo("one second", e2e_s=1.0) if goal == "goodput" else None
    world = replace(made.world(rate=0.5), objective=Objective(goal, slo=slo))  # type: ignore[arg-type]
    result = found(made, world)
    assert result.best.candidate == chain("a", 3)  # plain takes 1.2 s each
    ahead = lead(result.best, result.plain)
    assert ahead.ratio > 1.5
    assert not ahead.within_noise


def test_a_lead_is_noise_where_samples_disagree() -> None:
    def scored(*values: float) -> Scored:
        return Scored(PLAIN, list(values))

    clear = lead(scored(11.0, 22.0, 33.1), scored(10.0, 20.0, 30.0))
    assert not clear.within_noise
    assert clear.ratio == pytest.approx(1.101, abs=0.001)
    assert lead(scored(11.0, 18.0, 33.0), scored(10.0, 20.0, 30.0)).within_noise
    assert lead(scored(11.0), scored(10.0)).within_noise
    assert lead(scored(5.0, 5.0), scored(5.0, 5.0)).within_noise


def test_what_is_tried() -> None:
    drafters = [
        DrafterOption("ngram", "lookup"),
        DrafterOption("head", "head", trees=True),
        DrafterOption("small", "model"),
    ]
    alone, pair = (
        [Placed(2), Placed(4)],
        [Placed(4, 2), Placed(2, 2, apart=True), Placed(4, 4, shares=(0.5, 0.5))],
    )
    ways = candidates(Space(lengths=(3, None)), drafters, alone, pair)
    assert [each.plain for each in ways[:3]] == [True, True, False]
    assert len(set(ways)) == len(ways)
    by_drafters = {
        names: {(each.mode, each.placed) for each in ways if each.drafters == names}
        for names in {each.drafters for each in ways}
    }
    assert set(by_drafters) == {
        (), ("ngram",), ("head",), ("small",), ("ngram", "head"), ("ngram", "small"), ("head", "small")
    }  # fmt: skip
    assert ("serial-tree", Placed(2)) in by_drafters["head",]
    assert all(mode != "serial-tree" for mode, _ in by_drafters["ngram",])
    assert by_drafters["small",] == {
        ("serial-chain", pair[0]), ("overlapped", pair[1]), ("swiftspec", pair[1]), ("overlapped", pair[2])
    }  # fmt: skip
    serial = candidates(Space(overlapped=False, disaggregated=False), drafters, alone, pair)
    assert {each.mode for each in serial} == {"autoregressive", "serial-chain", "serial-tree"}
    for each in ways:
        each.config(4)
