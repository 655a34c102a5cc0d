"""Guesses from a request's own text, added where a drafter's tree ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log

from paceline.core.text_index import IndexedText


class LookupOdds:
    """How often a token found by lookup was the target's, per length of the match: counted over all requests,
    from a first guess that fades."""

    _FIRST_TRIALS = 8.0

    def __init__(self) -> None:
        self._trials: dict[int, float] = {}
        self._hits: dict[int, float] = {}

    def log_probability(self, matched: int) -> float:
        trials, hits = self._trials.get(matched, 0.0), self._hits.get(matched, 0.0)
        first = 1.0 - 1.0 / (matched + 1)
        return log((hits + first * self._FIRST_TRIALS) / (trials + self._FIRST_TRIALS))

    def count(self, matched: int, *, hit: bool) -> None:
        self._trials[matched] = self._trials.get(matched, 0.0) + 1.0
        self._hits[matched] = self._hits.get(matched, 0.0) + hit


@dataclass(slots=True)
class Found:
    """`tokens` after `path` (below the root), by a match of `matched` tokens."""

    path: list[int]
    tokens: list[int]
    matched: int


@dataclass(slots=True)
class Lookup:
    """One request's text, and what was last found in it and not judged yet."""

    text: IndexedText
    open: list[Found] = field(default_factory=list)

    def read(self, tokens: Sequence[int]) -> None:
        """Takes in what of `tokens`, the whole text so far, is new."""
        if len(self.text) < len(tokens):
            self.text.extend(tokens[len(self.text) :])

    def find(self, path: list[int], count: int) -> Found | None:
        tokens, matched = self.text.continuation_after(path, count)
        if not tokens:
            return None
        self.open.append(Found(path, tokens, matched))
        return self.open[-1]

    def judge(self, committed: Sequence[int], odds: LookupOdds) -> None:
        """Only what was reached is counted: after a token that is not the target's nothing is known."""
        for found in self.open:
            if list(committed[: len(found.path)]) != found.path:
                continue
            for token, true in zip(found.tokens, committed[len(found.path) :], strict=False):
                odds.count(found.matched, hit=token == true)
                if token != true:
                    break
        self.open.clear()
