"""What a question to a drafter takes, and at what pace a step should pay: measured, while decoding."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paceline.core.planner import PassCost

_MEMORY = 0.98
_DISTURBED = 3.0
"""A question that takes so many times what was expected was disturbed from outside."""
_REFITS = (1, 2, 3, 4, 6, 8, 12, 16)
_REFIT = 16
_RIDGE = 1e-4
_NEWEST = 0.15
_USUAL = 0.01


class DraftCost:
    """Seconds of a question = a constant, and so much per level of the deepest chain, per request, per guess
    asked for and per token of the texts that the drafter has not read: least squares, none below 0.

    What cannot be told apart from the questions that were asked counts mostly as per level.
    """

    def __init__(self) -> None:
        self.count = 0
        self.total_s = 0.0
        self.fixed = self.per_request = self.per_level = self.per_guess = self.per_token = 0.0
        self._rows: list[tuple[float, ...]] = []  # what was asked since the last fit, and its seconds
        self._normal = np.zeros((5, 6))  # of all before: products with each other and with the seconds

    @property
    def known(self) -> bool:
        """Whether more than the first few questions were measured, which take longer than later ones."""
        return self.count >= 3

    def of(self, requests: int, levels: int, guesses: int, unread: int) -> float:
        return (
            self.fixed
            + self.per_level * levels
            + self.per_request * requests
            + self.per_guess * guesses
            + self.per_token * unread
        )

    def count_question(self, seconds: float) -> None:
        if seconds > 0.0:
            self.count += 1
            self.total_s += seconds

    def learn(self, requests: int, levels: int, guesses: int, unread: int, seconds: float) -> None:
        if seconds <= 0.0:
            return
        self.count_question(seconds)
        memory = _MEMORY
        if self.count > 1:
            expected = self.of(requests, levels, guesses, unread)
            if self.known:
                seconds = min(seconds, _DISTURBED * expected)
            if seconds < 0.5 * expected:
                memory = (
                    0.3  # no question is answered sooner than it can be: what was seen before was disturbed
                )
        self._rows.append((levels, 1.0, requests, guesses, unread, seconds))
        if self.count in _REFITS or self.count % _REFIT == 0 or memory < _MEMORY:
            self._take_in(memory)
            self._fit()

    def _take_in(self, memory: float) -> None:
        """memory: what counts of all that was seen before the newest row; each other one has the usual."""
        rows, self._rows = np.array(self._rows), []
        weights = memory * _MEMORY ** np.arange(len(rows) - 1.0, -1.0, -1.0) / _MEMORY
        weights[-1] = 1.0
        self._normal *= memory * _MEMORY ** (len(rows) - 1)
        self._normal += (rows[:, :5] * weights[:, None]).T @ rows

    def _fit(self) -> None:
        """Least squares, without what would be below 0; a little is taken off what is undetermined."""
        normal, seen = self._normal[:, :5].copy(), self._normal[:, 5]
        normal += np.diag(_RIDGE * normal.diagonal() + 1e-12)
        found, left = np.zeros(5), np.arange(5)
        while left.size:
            values = np.linalg.solve(normal[np.ix_(left, left)], seen[left])
            if (values >= 0.0).all():
                found[left] = values
                break
            left = left[values > 0.0]
        self.per_level, self.fixed, self.per_request, self.per_guess, self.per_token = found.tolist()


class Pace:
    """What a token is worth: the seconds after which the request's next ones would bring it anyway.

    All tokens of a request have to come, those of slow places by slow steps. So one more is worth most where
    steps bring few: a request's share of a step, over the tokens that a step brought, in the mean over its
    last few steps.
    """

    def __init__(self) -> None:
        self._stretch: float | None = (
            None  # a step's seconds, all between two passes included, per plain pass
        )
        self._usual = 0.7
        self._steps: dict[str, float] = {}  # per token
        self._ended: float | None = None

    def on_step(self, plain_s: float, now: float) -> None:
        """A pass over requests none of which reads its prompt is over. plain_s: of one over their roots
        alone, 0 = not known."""
        if self._ended is not None and now > self._ended and plain_s > 0.0:
            stretch = (now - self._ended) / plain_s
            if self._stretch is not None:
                stretch = self._stretch + _NEWEST * (min(stretch, _DISTURBED * self._stretch) - self._stretch)
            self._stretch = stretch
        self._ended = now

    def on_other(self, now: float | None) -> None:
        """Another pass is over, or, None, nothing goes on."""
        self._ended = now

    def on_tokens(self, request_id: str, count: int) -> None:
        before, steps = self._steps.get(request_id, self._usual), 1.0 / max(count, 1)
        self._steps[request_id] = before + _NEWEST * (steps - before)
        self._usual += _USUAL * (steps - self._usual)

    def forget(self, request_id: str) -> None:
        self._steps.pop(request_id, None)

    def worth(self, request_id: str, requests: int, plain_s: float) -> float:
        """Of a token of one of so many requests, in seconds."""
        return (self._stretch or 1.0) * plain_s / requests * self._steps.get(request_id, self._usual)


@dataclass(slots=True)
class Costs:
    """target: of passes by their tokens.  drafts: of questions, for each drafter."""

    target: PassCost
    drafts: list[DraftCost]
    pace: Pace = field(default_factory=Pace)
