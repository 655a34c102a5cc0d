"""How far a drafter's guesses would be right, and how much of that the guesses there are would not be."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from paceline.core.ensemble import Merged
from paceline.core.recent import Late, LateSlopes
from paceline.core.token_tree import ROOT

_DEPTHS = 24
_MEMORY = 0.99
_TRUST = 4.0
"""Outcomes that what is assumed counts for."""
_ALONE, _BESIDE, _INSTEAD = 0.6, 0.8, 0.6
"""What is assumed of a drafter, see `Survival`; rather too much, so that it is tried."""
_LATE = 0.5
"""What is assumed at first of the worth of `core.recent`."""


class Rate:
    """Share of right ones of the newest hundred or so, and what is assumed before."""

    __slots__ = ("hits", "trials")

    def __init__(self) -> None:
        self.hits = self.trials = 0.0

    def count(self, *, right: bool) -> None:
        self.hits = _MEMORY * self.hits + right
        self.trials = _MEMORY * self.trials + 1.0

    def fade(self) -> None:
        """What was seen is old."""
        self.hits *= 0.5
        self.trials *= 0.5

    def value(self, assumed: float) -> float:
        """assumed: counts for a few outcomes, always."""
        return (self.hits + _TRUST * assumed) / (self.trials + _TRUST)


class Survival:
    """Of one drafter, at a place that its guesses reached. alone: right, by depth, where no other drafter has
    a guess; beside: where another has and is right; instead: where another has and is wrong. Only uncensored
    outcomes count: places on the committed path that are no deeper than it was asked for."""

    def __init__(self) -> None:
        self._alone = [Rate() for _ in range(_DEPTHS)]
        self._anywhere, self._beside, self._instead = Rate(), Rate(), Rate()
        self._late = LateSlopes(_LATE)

    def gains(self, covered: Sequence[float], most: int, least: float, late: Late) -> list[float]:
        """By depth, the probability that the committed token is the drafter's and nobody else's; up to `most`
        deep and not below `least`. covered: the same of those who answered before, whose guesses there are.

        late: how the drafter did on the request of late (`core.recent`).
        """
        factors = exp(self._late.odds(late, 1)), exp(self._late.odds(late, 2))
        gains, before, theirs = [], 1.0, len(covered)
        both, alone = (1.0, 0.0) if covered else (0.0, 1.0)
        anywhere = _TRUST * self._anywhere.value(_ALONE)
        beside, instead = self._beside.value(_BESIDE), self._instead.value(_INSTEAD)
        for depth, rate in enumerate(self._alone[:most]):
            factor = factors[depth > 0]
            own = (rate.hits + anywhere) / (rate.trials + _TRUST)
            own = own * factor / (1.0 - own + own * factor)
            if depth < theirs and both > 0.0:
                share = covered[depth] / before if before > covered[depth] else 1.0
                alone = alone * own + both * (1.0 - share) * _shifted(instead, factor)
                both *= share * _shifted(beside, factor)
                before = covered[depth]
            else:
                alone, both = (alone + both) * own, 0.0
            if alone < least and both < least:
                break
            gains.append(alone)
        return gains

    def fade(self) -> None:
        """What was seen is old: what comes counts for more."""
        for rate in (*self._alone, self._anywhere, self._beside, self._instead):
            rate.fade()

    def learn(self, merged: Merged, drafter: int, earlier: int, tokens: Sequence[int], late: Late) -> None:
        """earlier: one bit for each who answered before.  tokens: committed below the root, as deep as was
        asked for at most."""
        tree, proposers, bit = merged.tree, merged.proposers, 1 << drafter
        above, learns = ROOT, any(late)
        for depth, token in enumerate(tokens[:_DEPTHS]):
            below = tree.child(above, token)
            there = proposers[below] if below is not None else 0
            right = there & bit != 0
            if there & earlier:
                rate, assumed = self._beside, _BESIDE
            elif any(proposers[node] & earlier for node in tree.children(above)):
                rate, assumed = self._instead, _INSTEAD
            else:
                rate, assumed = self._alone[depth], self._anywhere.value(_ALONE)
                self._anywhere.count(right=right)
            if learns:
                chance = _shifted(rate.value(assumed), exp(self._late.odds(late, depth + 1)))
                self._late.update(late, depth + 1, right - chance)
            rate.count(right=right)
            if below is None or not right:
                return
            above = below


def _shifted(rate: float, factor: float) -> float:
    """The probability whose odds are `factor` times those of `rate`."""
    return rate * factor / (1.0 - rate + rate * factor)
