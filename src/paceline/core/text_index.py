"""A text that knows what followed its own n-grams."""

from __future__ import annotations

from collections.abc import Iterable


class IndexedText:
    """Tokens with, for every n-gram length, where each n-gram first ended."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._lengths = range(max_match, min_match - 1, -1)
        self._tokens: list[int] = []
        self._first_end: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, new: Iterable[int]) -> None:
        tokens, first_end = self._tokens, self._first_end
        for token in new:
            # Indexed only once something follows, so that the suffix never finds itself.
            end = len(tokens)
            for length in self._lengths:
                if length <= end:
                    first_end.setdefault(tuple(tokens[end - length :]), end)
            tokens.append(token)

    def continuation(self, count: int) -> list[int]:
        """Up to `count` tokens that followed the longest known suffix; empty if none is known."""
        return self.continuation_after([], count)[0]

    def continuation_after(self, tail: list[int], count: int) -> tuple[list[int], int]:
        """The same for the text followed by `tail`, which is not taken in; and how many tokens matched."""
        longest = self._lengths.start
        suffix = [*self._tokens[max(0, len(self._tokens) - longest) :], *tail][-longest:]
        for length in self._lengths:
            if length <= len(suffix):
                end = self._first_end.get(tuple(suffix[len(suffix) - length :]))
                if end is not None:
                    return self._tokens[end : end + count], length
        return [], 0
