"""How much to guess and to verify, from measured costs and what was accepted so far: the expected tokens per
second of a step are largest where one more guess adds no more than it costs (TurboSpec, arXiv 2406.14066)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp, inf

_MEMORY = 0.1
"""Weight of the newest measurement."""
_CONTEXT_MEMORY = 0.99
_TOKEN_SHARE = 0.04
"""What one more token adds to a pass over one, until measured: it is bound by reading the weights."""
_MOST_TOKENS = 4096
_REFIT = 16
"""Passes between two fits. A fit takes tens of microseconds, which so many steps share. What it does not know
of meanwhile is little: a size's estimate moves by a tenth of the difference per pass."""


class PassCost:
    """Seconds of a target pass by the number of tokens in it, learnt while it runs.

    Sizes that were seen are remembered one by one, since costs have steps where the kernels have; others lie
    on a line through them. Never falling in the number of tokens: what looks dearer than a larger pass counts
    as that one, since passes are disturbed, which makes them longer, and never quicker than they can be.

    What the tokens before them add, those of all texts in the pass, is learnt from passes of one size; costs
    are those beside as many as there were last.
    """

    def __init__(self) -> None:
        self._seen: dict[int, float] = {}
        self._contexts: dict[int, float] = {}
        self._context = 0.0
        self._apart = 1e-9  # squares of contexts about their size's mean, and products with the seconds
        self._together = 0.0
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
            self._seen[tokens], self._contexts[tokens] = seconds, self._context
        else:
            # A pass that was disturbed from outside says nothing about its size.
            seconds = min(seconds, 2.0 * before)
            longer, looked = seconds - before, context - self._contexts[tokens]
            self._apart = _CONTEXT_MEMORY * self._apart + looked * looked
            self._together = _CONTEXT_MEMORY * self._together + looked * longer
            self._seen[tokens] = before + _MEMORY * longer
            self._contexts[tokens] += _MEMORY * looked
        self._learnt += 1
        if before is None or self._learnt % _REFIT == 0:
            self._costs = []

    def _beside(self) -> dict[int, float]:
        """Seconds by size, beside the newest context."""
        each = max(self._together / self._apart, 0.0)
        return {
            size: max(seconds + each * (self._context - self._contexts[size]), 0.1 * seconds)
            for size, seconds in self._seen.items()
        }

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
        seen = self._beside()
        sizes = list(seen)
        mean_size = sum(sizes) / len(sizes)
        mean_cost = sum(seen.values()) / len(sizes)
        spread = sum((size - mean_size) ** 2 for size in sizes)
        least = min(seen[size] / (1.0 + _TOKEN_SHARE * size) for size in sizes) * _TOKEN_SHARE
        slope = least
        if spread:
            slope = sum((size - mean_size) * (seen[size] - mean_cost) for size in sizes) / spread
        slope = max(slope, 0.0)
        base = max(mean_cost - slope * mean_size, 0.0)
        self._line = (base, slope)
        self._costs = self._table(seen)
        return self._costs

    def _table(self, seen: dict[int, float]) -> list[float]:
        """Of each size what was seen, but no more than of a larger one; in between the line, within that."""
        base, slope = self._line
        largest = max(seen)
        costs, least = [0.0] * (largest + 1), inf
        for size in range(largest, 0, -1):
            at = seen.get(size)
            least = least if at is None else min(least, at)
            costs[size] = least if at is not None else min(least, base + slope * size)
        costs[0] = costs[1]
        return list(accumulate(costs, max))


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
