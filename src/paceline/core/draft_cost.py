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
    steps bring few: a request's share of its last few steps, over the tokens that they brought. It is never
    worth more than it would take without guesses: else steps that guesses in vain make long would be a
    reason for more of them.
    """

    def __init__(self) -> None:
        self._usual = (1.0, 1.4)  # of a step: its seconds per those of a plain pass, and a request's tokens
        self._steps: dict[str, tuple[float, float]] = {}
        self._stretch = 1.0  # of the newest step
        self.drafting_s = 0.0
        """What guessing took in the newest step, as far as is known: drafters, and the policy's own work."""
        self._gap_s: float | None = None  # of a step, what neither its pass nor drafters take
        self._plain_gap_s: float | None = None  # the same where no drafter was asked
        self._drafted_s = 0.0
        self._ended: float | None = None

    def on_answer(self, seconds: float) -> None:
        """A drafter took so long."""
        self._drafted_s += seconds

    def on_step(self, plain_s: float, pass_s: float, now: float) -> None:
        """A pass of `pass_s` over requests none of which reads its prompt is over. plain_s: of one over their
        roots alone, 0 = not known. Its tokens are told next."""
        if self._ended is not None and now > self._ended and plain_s > 0.0:
            gap_s = max(now - self._ended - pass_s - self._drafted_s, 0.0)
            if self._drafted_s:
                self._gap_s = gap_s = _nearer(self._gap_s, gap_s)
                plain_gap_s = gap_s if self._plain_gap_s is None else self._plain_gap_s
                self.drafting_s = self._drafted_s + max(gap_s - plain_gap_s, 0.0)
            else:
                self._plain_gap_s = gap_s = _nearer(self._plain_gap_s, gap_s)
                self.drafting_s = 0.0
            self._stretch = (pass_s + self._drafted_s + gap_s) / plain_s
        self._ended, self._drafted_s = now, 0.0

    def on_other(self, now: float | None) -> None:
        """Another pass is over, or, None, nothing goes on."""
        self._ended, self._drafted_s = now, 0.0

    def on_tokens(self, request_id: str, count: int) -> None:
        newest = self._stretch, float(count)
        self._steps[request_id] = _moved(self._steps.get(request_id, self._usual), newest, _NEWEST)
        self._usual = _moved(self._usual, newest, _USUAL)

    def forget(self, request_id: str) -> None:
        self._steps.pop(request_id, None)

    def worth(self, request_id: str, requests: int, plain_s: float) -> float:
        """Of a token of one of so many requests, in seconds."""
        stretch, tokens = self._steps.get(request_id, self._usual)
        gap_s = self._plain_gap_s if self._plain_gap_s is not None else self._gap_s or 0.0
        return min(stretch / tokens * plain_s, plain_s + gap_s) / requests


def _nearer(before: float | None, seconds: float) -> float:
    """The mean of late, moved; what was disturbed from outside moves it little."""
    return seconds if before is None else before + _NEWEST * (min(seconds, _DISTURBED * before) - before)


def _moved(mean: tuple[float, float], newest: tuple[float, float], weight: float) -> tuple[float, float]:
    return mean[0] + weight * (newest[0] - mean[0]), mean[1] + weight * (newest[1] - mean[1])


@dataclass(slots=True)
class Costs:
    """target: of passes by their tokens.  drafts: of questions, for each drafter."""

    target: PassCost
    drafts: list[DraftCost]
    pace: Pace = field(default_factory=Pace)
