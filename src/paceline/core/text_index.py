"""A text that knows what followed its own n-grams."""

from __future__ import annotations

from collections.abc import Iterable


class IndexedText:
    """Tokens with, for every n-gram length, where each n-gram first ended, and last, if asked."""

    def __init__(self, min_match: int, max_match: int, *, latest: bool = False) -> None:
        self._lengths = range(max_match, min_match - 1, -1)
        self._tokens: list[int] = []
        self._first_end: dict[tuple[int, ...], int] = {}
        self._last_end: dict[tuple[int, ...], int] | None = {} if latest else None

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, new: Iterable[int]) -> None:
        tokens, first_end, last_end = self._tokens, self._first_end, self._last_end
        longest, shortest = self._lengths.start, self._lengths.stop + 1
        tail = tuple(tokens[-longest:])
        for token in new:
            # Indexed only once something follows, so that the suffix never finds itself.
            end, here = len(tokens), len(tail)
            for start in range(here - shortest + 1):
                if first_end.setdefault(tail[start:], end) != end:
                    break  # its own suffixes ended there too, or before
            if last_end is not None:
                for start in range(here - shortest + 1):
                    last_end[tail[start:]] = end
            tokens.append(token)
            tail = (*tail, token)[-longest:]

    def continuation(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the longest known suffix; empty if none is known."""
        return self.continuation_after([], count)[0]

    def continuation_after(self, tail: list[int], count: int) -> tuple[list[int], int]:
        """The same for the text followed by `tail`, which is not taken in; and how many tokens matched."""
        longest = self._lengths.start
        suffix = (*self._tokens[-longest:], *tail)[-longest:]
        for length in self._lengths:
            if length <= len(suffix):
                end = self._first_end.get(suffix[len(suffix) - length :])
                if end is not None:
                    return self._tokens[end : end + count], length
        return [], 0

    def continuations(self, count: int, most: int) -> list[tuple[list[int], int]]:
        """What followed at up to `most` places, each with the tokens matched there: the longest match first,
        of each length the earliest place and then, if it is known, the latest."""
        suffix = tuple(self._tokens[-self._lengths.start :])
        places: dict[int, int] = {}
        for length in self._lengths:
            if length <= len(suffix):
                gram = suffix[len(suffix) - length :]
                for ends in (self._first_end, self._last_end or {}):
                    if (end := ends.get(gram)) is not None and len(places) < most:
                        places.setdefault(end, length)
        return [(self._tokens[end : end + count], length) for end, length in places.items()]
