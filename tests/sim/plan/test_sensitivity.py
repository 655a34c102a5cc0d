"""Decisions flip where a closed form says so."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from paceline.sim.acceptance import DrafterTrace, RequestTrace
from paceline.sim.plan.altered import altered_traces, conditional_acceptance
from paceline.sim.plan.candidates import Candidate
from paceline.sim.plan.machines import Measured
from paceline.sim.plan.search import Found, Scored, search
from paceline.sim.plan.sensitivity import Flip, Sensitivity, contenders, sensitivity
from paceline.sim.plan.world import AS_GIVEN, Assumptions, Effort, Objective, Workload, World
from tests.sim.lab import COSTS, record
from tests.sim.plan.plans import PLAIN, ROUNDS, Made, chain

EFFORT = Effort(8, 3, 2.0, (2000, 40))


def probed(made: Made, concurrency: int = 1) -> tuple[Candidate, Sensitivity]:
    world = made.world(concurrency)
    found = search(world, made.space, made.candidates, rounds=ROUNDS)
    return found.best.candidate, sensitivity(world, found, effort=EFFORT, runs=1)


def flip(sensitive: Sensitivity, axis: str, factor: float) -> Flip:
    return next(each for each in sensitive.flips if (each.axis, each.factor) == (axis, factor))


def test_a_drafter_that_costs_as_much_as_the_target_gains_nothing() -> None:
    """Every guess is right, so that k guesses bring k + 1 tokens for a pass and k questions: all or none of
    them, and none once a question takes as long as a pass."""
    made = Made(10e-3, {"head": 10e-3 / 1.06}, {"head": 5}, lengths=(2, 5))
    best, sensitive = probed(made)
    assert best == chain("head", 5)
    dearer = flip(sensitive, "draft", 1.1)
    assert not dearer.holds
    assert dearer.to == PLAIN
    assert dearer.point == pytest.approx(1.06, rel=0.012)
    cheaper = flip(sensitive, "verify", 0.9)
    assert (cheaper.to, cheaper.holds) == (PLAIN, False)
    assert cheaper.point == pytest.approx(1 / 1.06, rel=0.012)
    assert flip(sensitive, "draft", 0.9).holds
    assert flip(sensitive, "verify", 1.1).holds
    assert flip(sensitive, "draft", 0.9).point is None
    assert not sensitive.cut_short
    assert len(sensitive.flips) == 8


def test_a_decision_that_holds_nearby_says_how_far() -> None:
    made = Made(10e-3, {"head": 10e-3 / 1.5}, {"head": 5}, lengths=(5,))
    _, sensitive = probed(made)
    held = flip(sensitive, "draft", 1.1)
    assert held.holds
    assert held.to == PLAIN
    assert held.point == pytest.approx(1.5, rel=0.012)


def test_the_load_at_which_guesses_stop_paying() -> None:
    """Of six guesses three are right: until the batch's tokens take as long as the pass, at 16 x 1.5."""
    made = Made(24e-3, {"head": 0.0}, {"head": 3}, token_s=1e-3, lengths=(6,), output=401)
    best, sensitive = probed(made, 16)
    assert best == chain("head", 6)
    more = flip(sensitive, "load", 2.0)
    assert (more.holds, more.to) == (False, PLAIN)
    assert more.point == pytest.approx(1.5, abs=0.13)
    assert flip(sensitive, "load", 0.5).holds


def test_too_little_time_is_said() -> None:
    made = Made(10e-3, {"head": 1e-3}, {"head": 5}, lengths=(5,))
    world = made.world()
    found = search(world, made.space, made.candidates, rounds=ROUNDS)
    cut = sensitivity(world, found, effort=EFFORT, seconds=1e-6)
    assert (cut.flips, cut.cut_short) == ((), True)


# ---------------------------------------------------------------- acceptance


def geometric(share: float, count: int = 60, output: int = 400) -> list[RequestTrace]:
    chance = random.Random(7)
    found = []
    for number in range(count):
        right = [chance.random() < share for _ in range(output)]
        run, accepted = 0, []
        for good in reversed(right):
            run = run + 1 if good else 0
            accepted.append(run + 1)
        trace = DrafterTrace(tuple(reversed(accepted)))
        found.append(RequestTrace(f"t{number}", (1, 2), tuple(range(output)), {"head": trace}))
    return found


@pytest.mark.parametrize("factor", [0.5, 0.9, 0.97, 1.03, 1.1, 1.25])
def test_every_guess_is_as_much_likelier_as_asked_for(factor: float) -> None:
    traces = geometric(0.7)
    changed = conditional_acceptance(altered_traces(traces, factor), "head")
    assert changed / conditional_acceptance(traces, "head") == pytest.approx(factor, rel=0.015)


def test_acceptance_rises_with_its_factor_at_every_place() -> None:
    traces = geometric(0.7, count=5)
    before = [1] * 400 * 5
    for factor in (0.5, 0.8, 1.0, 1.1, 1.4, 2.0):
        now = [length for each in altered_traces(traces, factor) for length in each.drafters["head"].accepted]
        assert all(old <= new for old, new in zip(before, now, strict=True))
        before = now
    assert all(
        at + length - 1 <= 400 for each in altered_traces(traces, 9.0)
        for at, length in enumerate(each.drafters["head"].accepted)
    )  # fmt: skip


@pytest.mark.parametrize("names", [("ngram",), ("suffix",), ("ngram", "head")])
def test_drafters_that_guess_for_real_are_altered_too(names: tuple[str, ...]) -> None:
    records = tuple(
        replace(record(number, 200, 200), drafters={"head": record(number, 200, 200).drafters["head"]})
        for number in range(6)
    )
    world = World(Workload(records, concurrency=1), Measured(COSTS), Objective())
    candidate = Candidate(names, "serial-chain", 3)
    worse, given, better = (
        world.value(candidate, 0, EFFORT, Assumptions(acceptance=factor)) for factor in (0.6, 1.0, 1.5)
    )
    assert worse < given < better
    assert world.value(candidate, 0, EFFORT, AS_GIVEN) == given


def test_who_may_take_over() -> None:
    """The recommended one first, plain decoding, and none that differs in the size of passes alone."""
    ways = [chain("a", 3), replace(chain("a", 3), chunk=512), chain("a", 5), chain("b", 2), PLAIN]
    ranked = tuple(Scored(each, [9.0 - at]) for at, each in enumerate(ways))
    found = Found(ranked, ranked[-1], 5, 5, cut_short=False, rounds=3)
    assert contenders(found, 9) == [ways[0], PLAIN, ways[2], ways[3]]
    assert contenders(found, 2) == [ways[0], PLAIN]
