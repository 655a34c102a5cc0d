"""How each drafter did on a request of late: texts differ, and places in one text do."""

from __future__ import annotations

from collections.abc import Sequence
from math import log1p

_NEWEST = 0.25
_USUAL = 0.01
_FADE = 0.9
"""What is left per step in which a drafter had nothing to be judged."""
_STEP = 0.15
"""Of the correction, per unit of error: three first guesses of 90 % in a row that were wrong make it 86 %."""
_KEPT = 0.98

Late = tuple[float, float]
"""Of one request and drafter. First: the logarithm of how many guesses in a row were right, averaged over the
last few answers, less what is usual for the drafter. Second: whether the first guess of the step before was
right, 1 or 0, less how often it is; 0 where there was none. Both are 0 where all is as usual."""
AS_USUAL: Late = (0.0, 0.0)


class Recent:
    def __init__(self, num_drafters: int) -> None:
        self._length = [1.0] * num_drafters
        self._right = [0.7] * num_drafters
        self._found: dict[str, list[Late]] = {}
        self._corrections: dict[str, list[float]] = {}
        self._no_corrections = [0.0] * num_drafters
        self._none = [AS_USUAL] * num_drafters

    def of(self, request_id: str) -> Sequence[Late]:
        """Of each drafter."""
        return self._found.get(request_id, self._none)

    def correction(self, request_id: str, drafter: int) -> float:
        """Log-odds by which the request's text is easier for the drafter than others are, at this place."""
        return self._corrections.get(request_id, self._no_corrections)[drafter]

    def correct(self, request_id: str, drafter: int, error: float) -> None:
        """error: the outcome of a guess (1 = accepted) less the probability that was given to it."""
        found = self._corrections.get(request_id)
        if found is None:
            found = self._corrections[request_id] = list(self._no_corrections)
        found[drafter] = _KEPT * (found[drafter] + _STEP * error)

    def count(self, request_id: str, accepted: Sequence[int | None]) -> None:
        """accepted: guesses in a row that were right in this step, of each drafter; None = it had none."""
        found = self._found.get(request_id)
        if found is None:
            found = self._found[request_id] = list(self._none)
        for drafter, count in enumerate(accepted):
            late = found[drafter][0]
            if count is None:
                found[drafter] = (_FADE * late, 0.0)
                continue
            longer, right = log1p(count) - self._length[drafter], (count > 0) - self._right[drafter]
            found[drafter] = (late + _NEWEST * (longer - late), right)
            self._length[drafter] += _USUAL * longer
            self._right[drafter] += _USUAL * right

    def forget(self, request_id: str) -> None:
        self._found.pop(request_id, None)
        self._corrections.pop(request_id, None)


class LateSlopes:
    """What that is worth in log-odds, for a first guess and for those after it, learnt online."""

    __slots__ = ("_rate", "_seen", "_slopes")

    def __init__(self, first: float, rate: float = 0.1) -> None:
        self._rate = rate
        self._slopes = [first, 0.0, first, 0.0]
        self._seen = [1.0] * 4

    def odds(self, late: Late, depth: int) -> float:
        """depth: 1 = a first guess."""
        if depth == 1:
            return self._slopes[0] * late[0] + self._slopes[1] * late[1]
        return self._slopes[2] * late[0] + self._slopes[3] * late[1]

    def update(self, late: Late, depth: int, error: float) -> None:
        at = 0 if depth == 1 else 2
        for each in late:
            if each:
                slope = error * each
                self._seen[at] += slope * slope
                self._slopes[at] += self._rate * slope / self._seen[at] ** 0.5
            at += 1
