"""What a target chooses and a drafter proposes after any text, from a recorded trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from paceline.errors import ConfigError

_NOWHERE = 61
"""Rank of a token that the drafter does not propose at all; above every recorded one."""
_STRIDE = 7919
_MASK = 2**64 - 1


class Moment(msgspec.Struct, frozen=True):
    """One decoded token. rank: place of the target's token among the drafter's candidates, None = not among
    them.  scores: the candidates' log-probabilities, best first."""

    rank: int | None
    scores: tuple[float, ...]


class World:
    """Answers for every prefix, also off the text that the target writes.

    How hard a position is comes from the trace, in its order. Which ids stand for the candidates there is a
    hash of position and last token, so that different branches go on differently; a branch that the target
    would not take is as hard to follow as the one that it takes.
    """

    def __init__(self, moments: Sequence[Moment], vocab_size: int) -> None:
        if not moments:
            raise ConfigError("the trace holds no tokens: record it again.")
        if vocab_size % _STRIDE == 0 or vocab_size <= _NOWHERE:
            raise ConfigError(f"a paced vocabulary cannot have {vocab_size} tokens: choose another size.")
        self._moments = moments
        self._vocab_size = vocab_size

    def target_token(self, position: int, last: int) -> int:
        """The token at `position`, when `last` is the one before it."""
        rank = self._moments[position % len(self._moments)].rank
        return self._token(position, last, _NOWHERE if rank is None else rank)

    def candidates(self, position: int, last: int, count: int) -> tuple[list[int], list[float]]:
        """The drafter's `count` best for `position`, and their log-probabilities."""
        scores = self._moments[position % len(self._moments)].scores[:count]
        return [self._token(position, last, rank) for rank in range(len(scores))], list(scores)

    def _token(self, position: int, last: int, rank: int) -> int:
        mixed = (position * 0x9E3779B97F4A7C15 + last * 0xBF58476D1CE4E5B9) & _MASK
        mixed ^= mixed >> 31
        return ((mixed >> 8) + rank * _STRIDE) % self._vocab_size


def read_trace(path: Path) -> list[Moment]:
    """One JSON object with `rank` and `scores` per line. Raises ConfigError naming the line."""
    moments = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}.") from None
    for number, line in enumerate(lines, 1):
        try:
            moments.append(msgspec.json.decode(line, type=Moment))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}:{number}: not a line of a trace ({error}); record it again.") from None
    return moments
