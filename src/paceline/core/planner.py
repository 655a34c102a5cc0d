"""How much to guess and to verify, from measured costs and what was accepted so far: the expected tokens per
second of a step are largest where one more guess adds no more than it costs (TurboSpec, arXiv 2406.14066)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, inf
from operator import mul

import numpy as np

_MEMORY = 0.1
"""Weight of the newest measurement."""
_REMEMBERED = 10
_CLOSE = 1.125
_CONTEXT_MEMORY = 0.99
_RIDGE = 1e-4
_MOVED = 0.25
"""Share of the context by which it changes before costs are fitted anew."""
_TOKEN_SHARE = 0.04
"""What one more token adds to a pass over one, until measured: it is bound by reading the weights."""
_MOST_TOKENS = 4096
_REFIT = 16
"""Passes between two fits. A fit takes tens of microseconds, which so many steps share. What it does not know
of meanwhile is little: a size's estimate moves by a tenth of the difference per pass."""


class PassCost:
    """Seconds of a target pass by the number of tokens in it, learnt while it runs.

    Sizes that were seen are remembered one by one. Those within an eighth of each other count as one, in
    the mean: else a size that was lucky once would look free beside its neighbours, and be chosen for that.
    In between costs are interpolated, since they have steps where the kernels have; beyond the largest they
    lie on a line through all. Never falling in the number of tokens: what looks dearer than a larger pass
    counts as that one, since passes are disturbed, which makes them longer, and never quicker than they can
    be.

    What the tokens before them add, those of all texts in the pass, is the slope of a plane through all
    passes; costs are those beside as many as there were last. Since little is known of it while it hardly
    varies, it at most halves or doubles what was seen.
    """

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}
        self._contexts: dict[int, float] = {}
        self._counts: dict[int, int] = {}  # how often it was seen, as far as that is remembered
        self._context = 0.0
        self._fitted_at = 0.0
        self._rows: list[tuple[float, ...]] = []  # since the last fit: 1, tokens, context, seconds
        self._normal = np.zeros((3, 4))  # of all before: products with each other and with the seconds
        self._line = (0.0, 0.0)
        self._costs: list[float] = []  # by the number of tokens, up to the largest seen; empty = to be fitted
        self._learnt = 0

    @property
    def known(self) -> bool:
        return bool(self._seen)

    def learn(self, tokens: int, seconds: float, context: int = 0) -> None:
        """context: tokens that those of the pass look back on, all in all."""
        if not 0 < tokens <= _MOST_TOKENS or seconds <= 0.0:
            return
        before, self._context = self._seen.get(tokens), float(context)
        if before is None:
            self._seen[tokens], self._contexts[tokens], self._counts[tokens] = seconds, self._context, 1
        else:
            self._counts[tokens] = min(self._counts[tokens] + 1, _REMEMBERED)
            # A pass that was disturbed from outside says nothing about its size.
            seconds = min(seconds, 2.0 * before)
            self._seen[tokens] = before + _MEMORY * (seconds - before)
            self._contexts[tokens] += _MEMORY * (context - self._contexts[tokens])
        self._rows.append((1.0, float(tokens), self._context, seconds))
        self._learnt += 1
        moved = abs(context - self._fitted_at) > _MOVED * self._fitted_at
        if before is None or moved or self._learnt % _REFIT == 0:
            self._costs = []

    def _beside(self) -> dict[int, float]:
        """Seconds by size, beside the newest context."""
        each = self._context_slope()
        beside: dict[int, float] = {}
        for size, seconds in self._seen.items():
            now = seconds + each * (self._context - self._contexts[size])
            beside[size] = min(max(now, 0.5 * seconds), 2.0 * seconds)
        return beside

    def _context_slope(self) -> float:
        """Seconds that one more token to look back on adds, at least 0."""
        rows, self._rows = np.array(self._rows), []
        if len(rows):
            self._normal = _CONTEXT_MEMORY ** len(rows) * self._normal + rows[:, :3].T @ rows
        normal = self._normal[:, :3] + np.diag(_RIDGE * self._normal[:, :3].diagonal() + 1e-12)
        return max(float(np.linalg.solve(normal, self._normal[:, 3])[2]), 0.0)

    def of(self, tokens: int) -> float:
        """Once there is something `known`. No tokens count as one."""
        costs = self._costs or self._fit()
        if tokens < len(costs):
            return costs[tokens]
        base, slope = self._line
        return max(base + slope * tokens, costs[-1])

    def between(self, fewest: int, most: int) -> list[float]:
        """`of` every number from `fewest` to `most`."""
        costs = self._costs or self._fit()
        if most < len(costs):
            return costs[fewest : most + 1]
        return [self.of(tokens) for tokens in range(fewest, most + 1)]

    def _fit(self) -> list[float]:
        seen, self._fitted_at = self._beside(), self._context
        self._line = self._line_through(seen)
        knots, base, slope = self._knots(seen), *self._line
        largest = max(seen)
        sizes = np.arange(1, largest + 1)
        costs = np.interp(sizes, [size for size, _ in knots], [seconds for _, seconds in knots])
        first, seconds = knots[0]
        costs[sizes < first] = np.minimum(base + slope * sizes[sizes < first], seconds)
        self._costs = np.maximum.accumulate(np.concatenate((costs[:1], costs))).tolist()
        return self._costs

    def _line_through(self, seen: dict[int, float]) -> tuple[float, float]:
        """Base and slope, neither below 0; of one size alone a slope that is assumed."""
        weights = [self._counts[size] for size in seen]
        total = sum(weights)
        mean_size = sum(map(mul, weights, seen)) / total
        mean_cost = sum(map(mul, weights, seen.values())) / total
        spread = sum(weight * (size - mean_size) ** 2 for weight, size in zip(weights, seen, strict=True))
        slope = min(seen[size] / (1.0 + _TOKEN_SHARE * size) for size in seen) * _TOKEN_SHARE
        if spread:
            products = (
                weight * (size - mean_size) * (seconds - mean_cost)
                for weight, (size, seconds) in zip(weights, seen.items(), strict=True)
            )
            slope = sum(products) / spread
        slope = max(slope, 0.0)
        return max(mean_cost - slope * mean_size, 0.0), slope

    def _knots(self, seen: dict[int, float]) -> list[tuple[float, float]]:
        """Sizes and seconds, both rising: means over sizes close together, none dearer than the next."""
        groups: list[list[int]] = []
        for size in sorted(seen):
            if groups and size <= groups[-1][0] * _CLOSE:
                groups[-1].append(size)
            else:
                groups.append([size])
        knots: list[tuple[float, float]] = []
        least = inf
        for group in reversed(groups):
            total = sum(self._counts[size] for size in group)
            mean_size = sum(self._counts[size] * size for size in group) / total
            least = min(least, sum(self._counts[size] * seen[size] for size in group) / total)
            knots.append((mean_size, least))
        return knots[::-1]


@dataclass(slots=True)
class Acceptance:
    """How often one request's next guess is the target's token, recent ones counting most."""

    hits: float = 3.0
    trials: float = 4.0

    @property
    def rate(self) -> float:
        return self.hits / self.trials

    def count(self, verified: int, accepted: int) -> None:
        for at in range(min(verified, accepted + 1)):
            self.hits = 0.95 * self.hits + (at < accepted)
            self.trials = 0.95 * self.trials + 1.0


@dataclass(slots=True)
class Planner:
    target: PassCost = field(default_factory=PassCost)

    def counts(self, offers: Sequence[Sequence[float]]) -> list[int]:
        """How many of each request's guesses are worth verifying, all requests sharing one pass. offers: of
        every request that takes part, its guesses' log-probabilities of being reached, the best first."""
        if not self.target.known:
            return [len(values) for values in offers]
        ranked = sorted((-value, place) for place, values in enumerate(offers) for value in values)
        roots, expected, at_best = len(offers), float(len(offers)), 0
        costs = self.target.between(roots, roots + len(ranked))
        best_rate = expected / costs[0]
        for count, (surprise, _) in enumerate(ranked, 1):
            expected += exp(-surprise)
            rate = expected / costs[count]
            if rate > best_rate:
                best_rate, at_best = rate, count
        kept = [0] * roots
        for _, place in ranked[:at_best]:
            kept[place] += 1
        return kept
