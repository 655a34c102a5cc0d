"""Prompt lookup: what followed the last time the text ended like this."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import SpeculationConfig
from paceline.core.drafting import DrafterNeeds
from paceline.core.lookup import Found, Lookup, LookupOdds
from paceline.core.text_index import IndexedText
from paceline.core.token_tree import ROOT, TokenTree
from paceline.core.work import Announcement
from paceline.drafters.base import PerRequestDrafter
from paceline.errors import ConfigError


class NgramDrafter(PerRequestDrafter[Lookup]):
    """Longest suffix of `min_match .. max_match` tokens that occurred before, earliest occurrence, and the
    tokens that followed it there: the semantics of vLLM's `ngram` method, from an index that grows with
    the text instead of a scan per step.

    Every guess has as score how often a match of its length has been right so far, starting from
    m / (m + 1) for a match of m tokens.

    branches: places to draw from, 1 = that one alone. Of more, shorter matches and latest occurrences too,
    the best nodes are offered.
    """

    def __init__(self, min_match: int = 2, max_match: int = 4, branches: int = 1) -> None:
        if not 1 <= min_match <= max_match:
            raise ConfigError(
                f"n-gram lengths {min_match} to {max_match}: the smaller must be at least 1 and at most "
                "the larger."
            )
        if branches < 1:
            raise ConfigError(f"{branches} branches of n-gram lookup: give at least 1.")
        super().__init__()
        self.needs = DrafterNeeds("ngram")
        self._lengths = (min_match, max_match)
        self._branches = branches
        self._odds = LookupOdds()

    def begin(self, announcement: Announcement) -> Lookup:  # noqa: ARG002 - the text says it all
        return Lookup(IndexedText(*self._lengths, latest=self._branches > 1))

    def take_in(self, state: Lookup, tokens: Sequence[int]) -> None:
        if state.open:
            state.judge(tokens, self._odds)
        state.text.extend(tokens)

    def guess(self, state: Lookup, max_nodes: int, max_depth: int) -> TokenTree:
        count = min(max_nodes, max_depth)
        if self._branches == 1:
            found = state.find([], count)
            if found is None:
                return TokenTree()
            score = self._odds.log_probability(found.matched)
            return TokenTree.chain(found.tokens, [score] * len(found.tokens))
        tree = TokenTree()
        for tokens, matched in state.text.continuations(count, self._branches):
            state.open.append(Found([], tokens, matched))
            tree.graft(ROOT, [], tokens, self._odds.log_probability(matched), self._branches * count)
        return tree.select(max_nodes, max_depth)


def configured(options: SpeculationConfig) -> NgramDrafter:
    return NgramDrafter(options.prompt_lookup_min, options.prompt_lookup_max, options.prompt_lookup_branches)
