"""Prompt lookup: what followed the last time the text ended like this."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.core.drafting import DrafterNeeds
from paceline.core.token_tree import TokenTree
from paceline.core.work import Announcement
from paceline.drafters.base import PerRequestDrafter
from paceline.errors import ConfigError


class NgramDrafter(PerRequestDrafter["IndexedText"]):
    """Longest suffix of `min_match .. max_match` tokens that occurred before, earliest occurrence, and the
    tokens that followed it there: the semantics of vLLM's `ngram` method, from an index that grows with
    the text instead of a scan per step."""

    def __init__(self, min_match: int = 2, max_match: int = 4) -> None:
        if not 1 <= min_match <= max_match:
            raise ConfigError(
                f"n-gram lengths {min_match} to {max_match}: the smaller must be at least 1 and at most "
                "the larger."
            )
        super().__init__()
        self.needs = DrafterNeeds("ngram")
        self._lengths = (min_match, max_match)

    def begin(self, announcement: Announcement) -> IndexedText:  # noqa: ARG002 - the text says it all
        return IndexedText(*self._lengths)

    def take_in(self, state: IndexedText, tokens: Sequence[int]) -> None:
        state.extend(tokens)

    def guess(self, state: IndexedText, max_nodes: int, max_depth: int) -> TokenTree:
        return TokenTree.chain(state.continuation(min(max_nodes, max_depth)))


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
        for length in self._lengths:
            if length <= len(self._tokens):
                end = self._first_end.get(tuple(self._tokens[len(self._tokens) - length :]))
                if end is not None:
                    return self._tokens[end : end + count]
        return []
