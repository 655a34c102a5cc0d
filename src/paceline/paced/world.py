"""What a target chooses and a drafter proposes after any text, from recorded runs of real models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from paceline.errors import ConfigError

_NOWHERE = 61
"""Rank of a token that the drafter does not propose at all; above every recorded one."""
_STRIDE = 7919
_MASK = 2**64 - 1


class Recording(msgspec.Struct, frozen=True):
    """One run. output: the target's tokens after `prompt`.  candidates, scores: for each of them, what the
    drafter proposed in its place, best first, with log-probabilities."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    candidates: tuple[tuple[int, ...], ...]
    scores: tuple[tuple[float, ...], ...]

    def ranks(self) -> list[int | None]:
        """The place of the target's token among the candidates; None = it is not among them."""
        return [
            ids.index(token) if token in ids else None
            for token, ids in zip(self.output, self.candidates, strict=True)
        ]


class Text:
    """Answers for one request's text and everything that branches off it.

    On the recorded text they are the recorded ones. Elsewhere ids are a hash of position and last token, so
    that different branches go on differently; how hard a branch is to follow is recorded too: as hard as the
    text at the same position.
    """

    def __init__(self, recording: Recording, vocab_size: int) -> None:
        self._known = (*recording.prompt, *recording.output)
        self._first = len(recording.prompt)
        self._recording = recording
        self._ranks = recording.ranks()
        self._vocab_size = vocab_size

    def target_token(self, position: int, last: int) -> int:
        """The token at `position`, when `last` is the one before it."""
        if position < len(self._known) and self._known[position - 1] == last:
            return self._known[position]
        rank = self._ranks[self._moment(position)]
        return self._token(position, last, _NOWHERE if rank is None else rank)

    def candidates(self, position: int, last: int, count: int) -> tuple[list[int], list[float]]:
        """The drafter's `count` best for `position`, and their log-probabilities."""
        moment = self._moment(position)
        scores = list(self._recording.scores[moment][:count])
        if self._first <= position < len(self._known) and self._known[position - 1] == last:
            return list(self._recording.candidates[moment][:count]), scores
        return [self._token(position, last, rank) for rank in range(len(scores))], scores

    def _moment(self, position: int) -> int:
        return (position - self._first) % len(self._ranks)

    def _token(self, position: int, last: int, rank: int) -> int:
        mixed = (position * 0x9E3779B97F4A7C15 + last * 0xBF58476D1CE4E5B9) & _MASK
        mixed ^= mixed >> 31
        return ((mixed >> 8) + rank * _STRIDE) % self._vocab_size


class World:
    """All recorded texts; a request is known by its prompt."""

    def __init__(self, recordings: Iterable[Recording], vocab_size: int) -> None:
        if vocab_size % _STRIDE == 0 or vocab_size <= _NOWHERE:
            raise ConfigError(f"a paced vocabulary cannot have {vocab_size} tokens: choose another size.")
        self._texts = {each.prompt: Text(each, vocab_size) for each in recordings}

    def text(self, prompt: Sequence[int]) -> Text:
        """Raises ConfigError for a prompt that was not recorded."""
        try:
            return self._texts[tuple(prompt)]
        except KeyError:
            raise ConfigError("paced groups answer recorded prompts only: this one was not.") from None


def read_recordings(path: Path) -> list[Recording]:
    """One JSON object per line. Raises ConfigError naming the line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}.") from None
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(msgspec.json.decode(line, type=Recording))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(f"{path}:{number}: not a line of a trace ({error}); record it again.") from None
    if not any(each.output for each in found):
        raise ConfigError(f"{path} holds no tokens: record it again.")
    return found
