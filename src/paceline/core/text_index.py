"""A text that knows what followed its own n-grams."""

from __future__ import annotations

from collections.abc import Iterable

_BITS = 32
"""Of one token in an n-gram's key: ids are below 2^31, and one is added, so that all keys differ."""


class IndexedText:
    """Tokens with, for every n-gram length, where each n-gram first ended, and last, if asked.

    An n-gram is keyed by one whole number, its last token lowest: a shorter suffix is what a mask leaves.
    """

    def __init__(self, min_match: int, max_match: int, *, latest: bool = False) -> None:
        self._lengths = range(max_match, min_match - 1, -1)
        self._masks = [(1 << _BITS * length) - 1 for length in self._lengths]
        self._tokens: list[int] = []
        self._suffix = 0
        self._first_end: dict[int, int] = {}
        self._last_end: dict[int, int] | None = {} if latest else None

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, new: Iterable[int]) -> None:
        tokens, first_end, last_end, suffix = self._tokens, self._first_end, self._last_end, self._suffix
        masks, cut = self._masks, self._masks[0]
        for token in new:
            # Indexed only once something follows, so that the suffix never finds itself.
            end = len(tokens)
            known = masks if end >= self._lengths.start else self._masks_within(end)
            for mask in known:
                if first_end.setdefault(suffix & mask, end) != end:
                    break  # its own suffixes ended there too, or before
            if last_end is not None:
                for mask in known:
                    last_end[suffix & mask] = end
            tokens.append(token)
            suffix = (suffix << _BITS | token + 1) & cut
        self._suffix = suffix

    def _masks_within(self, count: int) -> list[int]:
        """Of the lengths that a text of so many tokens has, the longest first."""
        return self._masks[max(0, self._lengths.start - count) :]

    def continuation(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the longest known suffix; empty if none is known."""
        return self.continuation_after([], count)[0]

    def continuation_after(self, tail: list[int], count: int) -> tuple[list[int], int]:
        """The same for the text followed by `tail`, which is not taken in; and how many tokens matched."""
        suffix = self._suffix
        for token in tail:
            suffix = (suffix << _BITS | token + 1) & self._masks[0]
        for mask in self._masks_within(len(self._tokens) + len(tail)):
            end = self._first_end.get(suffix & mask)
            if end is not None:
                return self._tokens[end : end + count], mask.bit_length() // _BITS
        return [], 0

    def continuations(self, count: int, most: int) -> list[tuple[list[int], int]]:
        """What followed at up to `most` places, each with the tokens matched there: the longest match first,
        of each length the earliest place and then, if it is known, the latest."""
        places: dict[int, int] = {}
        for mask in self._masks_within(len(self._tokens)):
            for ends in (self._first_end, self._last_end or {}):
                end = ends.get(self._suffix & mask)
                if end is not None and len(places) < most:
                    places.setdefault(end, mask.bit_length() // _BITS)
        return [(self._tokens[end : end + count], length) for end, length in places.items()]
