"""Finds the best way to decode by simulation: short simulations of everything first, longer and repeated
ones of what is left (successive halving, arXiv 1502.07943).

All candidates of a round are tried on the same requests, so that what sets two of them apart is not the
draw. The result is the same for the same seed, unless the time ran out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import exp, log, sqrt
from time import perf_counter

from paceline.errors import ConfigError, PacelineError
from paceline.sim.plan.candidates import Candidate, Space, with_chunks
from paceline.sim.plan.world import AS_GIVEN, Assumptions, Effort, World

_NOTHING = 1e-12
"""Stands for a rate of nothing: a candidate that serves no request within the limits."""
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, two-sided 95 %, by degrees of freedom from 1."""


@dataclass(frozen=True, slots=True)
class Round:
    """runs: samples of the workload.  keep: how many go on to the next round, at least."""

    effort: Effort
    runs: int
    keep: int


ROUNDS = (
    Round(Effort(32, 4, 1.5, (400, 16)), 1, 12),
    Round(Effort(96, 8, 2.0, (1500, 48)), 2, 4),
    Round(Effort(256, 16, 3.0, (5000, 96)), 8, 4),
)


@dataclass(slots=True)
class Scored:
    """values: by the objective, one for each sample of the workload."""

    candidate: Candidate
    values: list[float]
    fewer_is_better: bool = False

    @property
    def value(self) -> float:
        """Their geometric mean."""
        if max(self.values) in (0.0, float("inf")):
            return max(self.values)
        return exp(sum(log(max(each, _NOTHING)) for each in self.values) / len(self.values))

    @property
    def scores(self) -> list[float]:
        """Logarithms, the more the better."""
        sign = -1.0 if self.fewer_is_better else 1.0
        return [sign * log(min(max(each, _NOTHING), 1 / _NOTHING)) for each in self.values]

    @property
    def score(self) -> float:
        return sum(self.scores) / len(self.scores)


@dataclass(frozen=True, slots=True)
class Lead:
    """Of one candidate before another. ratio: how many times better, by the objective.  within_noise: whether
    the samples of the workload differ so much that it may be none (a paired t test, 95 %)."""

    ratio: float
    low: float
    high: float

    @property
    def within_noise(self) -> bool:
        return self.low <= 1.0 <= self.high


def lead(first: Scored, second: Scored) -> Lead:
    gaps = [a - b for a, b in zip(first.scores, second.scores, strict=False)]
    mean = sum(gaps) / len(gaps)
    if len(gaps) < 2:
        return Lead(exp(mean), 0.0, float("inf"))
    spread = sqrt(sum((gap - mean) ** 2 for gap in gaps) / (len(gaps) - 1) / len(gaps))
    half = _T_95[min(len(gaps) - 1, len(_T_95)) - 1] * spread
    return Lead(exp(mean), exp(mean - half), exp(mean + half))


class _OutOfTime(Exception):
    pass


@dataclass(slots=True)
class Clock:
    """end: by `perf_counter`, None = never."""

    end: float | None = None
    simulations: int = 0

    def tick(self) -> None:
        if self.end is not None and perf_counter() > self.end:
            raise _OutOfTime

    def within(self, seconds: float | None) -> Clock:
        return Clock(None if seconds is None else min(self.end or float("inf"), perf_counter() + seconds))


@dataclass(frozen=True, slots=True)
class Found:
    """ranked: the best first, of those that were tried at length.  plain: the best without speculation.
    tried, of: how many were tried at all.  cut_short: whether the time ran out."""

    ranked: tuple[Scored, ...]
    plain: Scored
    tried: int
    of: int
    cut_short: bool
    rounds: int
    simulations: int = 0
    seconds: float = 0.0
    failed: tuple[str, ...] = field(default=())

    @property
    def best(self) -> Scored:
        return self.ranked[0]

    @property
    def runner_up(self) -> Scored | None:
        """The best one that differs in more than the size of passes."""
        best = self.best.candidate
        return next((each for each in self.ranked if replace(each.candidate, chunk=best.chunk) != best), None)


Progress = Callable[[float, str], None]


def search(
    world: World,
    space: Space,
    given: Sequence[Candidate],
    *,
    rounds: Sequence[Round] = ROUNDS,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> Found:
    """given: plain decoding among them, which is always tried to the end. progress: told the share done.

    Raises ConfigError where there is nothing to choose from, PacelineError where the time is too short for
    anything.
    """
    if not any(each.plain for each in given):
        raise ConfigError("there is no plain decoding to compare with: give it as a candidate.")
    return _Search(world, space, rounds, Clock().within(seconds), progress).run(given)


class _Search:
    def __init__(
        self, world: World, space: Space, rounds: Sequence[Round], clock: Clock, progress: Progress | None
    ) -> None:
        self._world = world
        self._space = space
        self._rounds = rounds
        self._clock = clock
        self._progress = progress
        self._failed: dict[str, None] = {}
        self._started = perf_counter()

    def run(self, given: Sequence[Candidate]) -> Found:
        entered = _mixed(given)
        known, tried = set(given), set[Candidate]()
        ranked: list[Scored] = []
        cut_short, done = False, 0
        for number, round_ in enumerate(self._rounds):
            scored, complete = self._round(number, round_, entered)
            known.update(entered)
            tried.update(each.candidate for each in scored)
            useful = any(each.candidate.plain for each in scored) and len(scored) > 1
            if complete or (useful and number == 0) or (useful and len(scored) > len(entered) // 2):
                ranked, done = sorted(scored, key=lambda each: -each.score), number + 1
            if not complete:
                cut_short = True
                break
            if number + 1 < len(self._rounds):
                entered = self._kept(ranked, round_.keep, number)
        if not ranked:
            self._refuse()
        plain = next(each for each in ranked if each.candidate.plain)
        return Found(
            tuple(ranked),
            plain,
            len(tried),
            len(known),
            cut_short,
            done,
            self._clock.simulations,
            perf_counter() - self._started,
            tuple(self._failed),
        )

    def _refuse(self) -> None:
        reason = f" The first fault: {next(iter(self._failed))}" if self._failed else ""
        raise PacelineError(
            f"in {perf_counter() - self._started:.0f} s not even plain decoding and one other way were "
            f"simulated: raise --budget-seconds, or lower the load.{reason}"
        )

    def _round(self, number: int, round_: Round, entered: Sequence[Candidate]) -> tuple[list[Scored], bool]:
        found: list[Scored] = []
        for at, candidate in enumerate(entered):
            if self._progress is not None:
                share = (number + at / len(entered)) / len(self._rounds)
                self._progress(share, f"round {number + 1} of {len(self._rounds)}")
            try:
                values = [self._value(candidate, run, round_.effort) for run in range(round_.runs)]
            except _OutOfTime:
                return found, False
            except ConfigError as error:
                self._failed.setdefault(f"{candidate}: {error}")
                continue
            found.append(Scored(candidate, values, self._world.objective.fewer_is_better))
        return found, True

    def _value(self, candidate: Candidate, run: int, effort: Effort) -> float:
        self._clock.tick()
        self._clock.simulations += 1
        return self._world.value(candidate, run, effort, AS_GIVEN, self._clock.tick)

    def _kept(self, ranked: list[Scored], keep: int, number: int) -> list[Candidate]:
        """The best ones, and the best of every other kind, so that a short trial ends no kind for good."""
        best = [each.candidate for each in ranked]
        kept = best[:keep]
        for kind in dict.fromkeys(map(_kind, best)):
            first = next(each for each in best if _kind(each) == kind)
            late = number + 1 >= len(self._rounds) - 1
            if first not in kept and (first.plain or not late):
                kept.append(first)
        if number == 0:
            kept = list(dict.fromkeys(with_chunks(self._space, kept)))
        return kept


def _kind(candidate: Candidate) -> tuple[object, ...]:
    placed = candidate.placed
    return candidate.drafters, placed.apart, placed.shares is not None


def _mixed(given: Sequence[Candidate]) -> list[Candidate]:
    """One of each kind in turn, so that time that runs out does so for all kinds alike."""
    kinds: dict[tuple[object, ...], list[Candidate]] = {}
    for each in given:
        kinds.setdefault(_kind(each), []).append(each)
    longest = max(map(len, kinds.values()))
    return [kind[at] for at in range(longest) for kind in kinds.values() if at < len(kind)]


def assumed(
    world: World,
    candidates: Sequence[Candidate],
    assumptions: Assumptions,
    effort: Effort,
    runs: int,
    clock: Clock,
) -> list[Scored]:
    """In the order given, in a world that differs from what was given. Raises `TimeoutError`."""
    found = []
    for each in candidates:
        values = []
        for run in range(runs):
            try:
                clock.tick()
                clock.simulations += 1
                values.append(world.value(each, run, effort, assumptions, clock.tick))
            except _OutOfTime:
                raise TimeoutError from None
        found.append(Scored(each, values, world.objective.fewer_is_better))
    return found
