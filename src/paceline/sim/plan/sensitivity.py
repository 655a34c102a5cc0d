"""By how much an assumption must be wrong before another choice is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Literal

from paceline.sim.plan.candidates import Candidate
from paceline.sim.plan.search import Clock, Found, assumed
from paceline.sim.plan.world import AS_GIVEN, Assumptions, Effort, World

Axis = Literal["acceptance", "verify", "draft", "load"]
AXES: tuple[Axis, ...] = ("acceptance", "verify", "draft", "load")
NEAR: dict[Axis, tuple[float, float]] = {
    "acceptance": (0.9, 1.1),
    "verify": (0.9, 1.1),
    "draft": (0.9, 1.1),
    "load": (0.5, 2.0),
}
_FAR = (0.5, 2.0)
_EXACT = 0.01


@dataclass(frozen=True, slots=True)
class Flip:
    """What becomes of the decision if one assumption is off by `factor`. holds: nothing is better then.
    to: what is, there or from `point` on; None = nothing was found.  ratio: how many times better than the
    recommended at `factor`.  point: the factor at which it takes over; None = not found, or not looked for.
    """

    axis: Axis
    factor: float
    holds: bool
    to: Candidate | None = None
    ratio: float = 1.0
    point: float | None = None


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """flips: two for each assumption, downwards and upwards.  cut_short: whether the time ran out."""

    flips: tuple[Flip, ...]
    cut_short: bool = False


def sensitivity(
    world: World,
    found: Found,
    *,
    effort: Effort,
    runs: int = 2,
    seconds: float | None = None,
    most: int = 5,
    progress: Callable[[float, str], None] | None = None,
) -> Sensitivity:
    """Tries the best `most` of what was found, one of each kind first and plain decoding among them, at
    every assumption made a little wrong; where another one wins, looks for the point."""
    return _Probe(
        world, found, contenders(found, most), effort, runs, Clock().within(seconds), progress
    ).run()


def contenders(found: Found, most: int) -> list[Candidate]:
    """The recommended one first."""
    ranked = [each.candidate for each in found.ranked]
    kinds: dict[tuple[str, ...], Candidate] = {}
    for each in ranked:
        kinds.setdefault(each.drafters, each)
    second = found.runner_up
    chosen = [ranked[0], found.plain.candidate, *([second.candidate] if second is not None else [])]
    distinct: dict[Candidate, Candidate] = {}
    for each in (*chosen, *kinds.values(), *ranked):
        # What differs in the size of passes alone is no other choice.
        distinct.setdefault(replace(each, chunk=0), each)
    return list(distinct.values())[:most]


class _Probe:
    def __init__(
        self,
        world: World,
        found: Found,
        candidates: Sequence[Candidate],
        effort: Effort,
        runs: int,
        clock: Clock,
        progress: Callable[[float, str], None] | None,
    ) -> None:
        self._world = world
        self._found = {each.candidate: each.score for each in found.ranked}
        self._usual: dict[Candidate, float] = {}
        self._candidates = candidates
        self._effort = effort
        self._runs = runs
        self._clock = clock
        self._progress = progress

    def run(self) -> Sensitivity:
        found: list[Flip] = []
        try:
            usual = assumed(self._world, self._candidates, AS_GIVEN, self._effort, self._runs, self._clock)
            self._usual = {each.candidate: each.score for each in usual}
            for axis in AXES:
                for factor in NEAR[axis]:
                    self._tell(len(found) / (2 * 2 * len(AXES)), f"{axis} x {factor:g}")
                    found.append(self._at(axis, factor))
            for at, flip in enumerate(found):
                self._tell((len(found) + at) / (2 * len(found)), f"where {flip.axis} decides")
                found[at] = self._pinned(flip)
        except TimeoutError:
            return Sensitivity(tuple(found), cut_short=True)
        return Sensitivity(tuple(found))

    def _tell(self, share: float, what: str) -> None:
        if self._progress is not None:
            self._progress(share, what)

    def _at(self, axis: Axis, factor: float) -> Flip:
        scores = self._scores(axis, factor, self._candidates)
        first, others = self._candidates[0], self._candidates[1:]
        best = max(others, key=lambda each: scores[each], default=first)
        gap = scores[best] - scores[first]
        return Flip(axis, factor, True) if gap <= 0.0 else Flip(axis, factor, False, best, exp(gap))

    def _pinned(self, flip: Flip) -> Flip:
        """With the point between what was given, where the recommended one wins, and where it does not: at
        the factor itself, or as far off as an assumption may well be."""
        inner, outer, to = 1.0, flip.factor, flip.to
        if flip.holds:
            far = _FAR[0] if flip.factor < 1.0 else _FAR[1]
            if abs(log(far)) <= abs(log(flip.factor)) + 1e-9:
                return flip
            inner, outer, to = flip.factor, far, self._at(flip.axis, far).to
        if to is None:
            return flip
        first = self._candidates[0]
        while abs(log(outer / inner)) > _EXACT:
            middle = exp((log(inner) + log(outer)) / 2)
            scores = self._scores(flip.axis, middle, (first, to))
            inner, outer = (inner, middle) if scores[to] > scores[first] else (middle, outer)
        return replace(flip, to=to, point=outer)

    def _scores(self, axis: Axis, factor: float, candidates: Sequence[Candidate]) -> dict[Candidate, float]:
        """What the assumption changes, by few samples, on top of what many say without it."""
        changed = {axis: factor}
        scored = assumed(
            self._world, candidates, Assumptions(**changed), self._effort, self._runs, self._clock
        )
        return {
            each.candidate: self._found[each.candidate] + each.score - self._usual[each.candidate]
            for each in scored
        }
