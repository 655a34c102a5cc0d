"""Prompt lookup: what followed the last time the text ended like this."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.drafting import DrafterNeeds
from paceline.core.text_index import IndexedText
from paceline.core.token_tree import TokenTree
from paceline.core.work import Announcement
from paceline.drafters.base import PerRequestDrafter
from paceline.drafters.registry import Materials
from paceline.errors import ConfigError


class NgramDrafter(PerRequestDrafter[IndexedText]):
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


def made(materials: Materials) -> NgramDrafter:
    return NgramDrafter(materials.speculation.prompt_lookup_min, materials.speculation.prompt_lookup_max)
