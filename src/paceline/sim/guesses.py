"""What a drafter would offer at every place of a recorded answer, and how much of it is right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.text_index import IndexedText
from paceline.sim.acceptance import RequestTrace

NGRAM = "ngram"
HEADS = ("eagle", "eagle3")
"""Names under which EAGLE-3 is recorded; the published files say "eagle"."""

MOST = 20
"""Guesses per step of which is known whether they are right: the depth of the published records."""

_SHORTEST, _LONGEST = 3, 7
"""Tokens of an n-gram, as measured in the study."""


@dataclass(frozen=True, slots=True)
class Guesses:
    """By tokens generated, from 0. offered: the longest chain there is, at most `MOST`. right: of it."""

    offered: tuple[int, ...]
    right: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.right)


def ngram_guesses(
    request: RequestTrace, shortest: int = _SHORTEST, longest: int = _LONGEST, most: int = MOST
) -> Guesses:
    """Exact, from the tokens alone: what followed the longest n-gram at the end of the text, at its earliest
    place. After the last token of the answer nothing is known to be right."""
    text = IndexedText(shortest, longest)
    text.extend(request.prompt)
    offered, right = [], []
    for at, token in enumerate(request.output):
        guesses = text.continuation(most)
        offered.append(len(guesses))
        right.append(_common(guesses, request.output[at : at + most]))
        text.extend((token,))
    return Guesses(tuple(offered), tuple(right))


def recorded_guesses(request: RequestTrace, name: str) -> Guesses:
    """A drafter that always has as many guesses as it is asked for, up to the depth of its record."""
    accepted = request.drafters[name].accepted
    depth = max(MOST, max(accepted, default=1) - 1)
    return Guesses((depth,) * len(accepted), tuple(length - 1 for length in accepted))


def head_of(request: RequestTrace) -> str | None:
    """The head that the request has a record of."""
    return next((name for name in HEADS if name in request.drafters), None)


def _common(draft: Iterable[int], truth: Iterable[int]) -> int:
    count = 0
    for guess, token in zip(draft, truth, strict=False):
        if guess != token:
            break
        count += 1
    return count
