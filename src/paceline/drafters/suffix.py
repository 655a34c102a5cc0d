"""Suffix decoding (arXiv 2411.04975): what followed the context at hand, in this text or in past outputs."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.config import SpeculationConfig
from paceline.config import SuffixCache as Sharing
from paceline.core.drafting import DrafterNeeds
from paceline.core.suffix_cache import SuffixCache
from paceline.core.suffix_draft import SuffixRule, best_draft
from paceline.core.suffix_index import Context, SuffixIndex
from paceline.core.token_tree import ROOT, TokenTree
from paceline.core.work import Announcement, DraftItem, DraftNodes, FinishedOutput, Proposal
from paceline.drafters.base import PerRequestDrafter
from paceline.drafters.suffix_file import SuffixFile
from paceline.errors import ConfigError

logger = logging.getLogger(__name__)

_FIRST_TOKENS = 512
_BUCKETS = (2**8, 2**17)
_READ_PER_STEP = 2048
"""Tokens' worth of work, of each text and of the cache, so that no step waits long for what is to be read."""


@dataclass(slots=True)
class SuffixState:
    """tenant: by which the cache knows whose request it is; None = it learns from no other.
    streamed: nodes sent so far without having been asked for."""

    text: SuffixIndex
    tenant: str | None
    tail: list[int] = field(default_factory=list)
    streamed: int = 0


class SuffixDrafter(PerRequestDrafter[SuffixState]):
    """Per request an index of its own prompt and output; one over outputs of the past, if they may be learnt
    from: those of its tenant or, where they are shared, all. The best draft of both is offered."""

    def __init__(
        self,
        rule: SuffixRule | None = None,
        depth: int = 24,
        sharing: Sharing = "off",
        cache: SuffixCache | None = None,
        file: SuffixFile | None = None,
    ) -> None:
        """cache: needed unless `sharing` is off.  file: where it is kept at the end."""
        super().__init__()
        self._rule = rule or SuffixRule()
        self._depth = depth
        self._sharing = sharing
        self._cache = cache if sharing != "off" else None
        self._file = file
        self._untold: dict[str, DraftItem] = {}
        self.needs = DrafterNeeds("suffix", learns_outputs=self._cache is not None)

    def grow(self, items: Sequence[DraftItem]) -> list[Proposal]:
        if self._cache is not None:
            self._cache.catch_up(_READ_PER_STEP)
        return super().grow(items)

    def advance(self, items: Sequence[DraftItem]) -> None:
        super().advance(items)
        self._untold |= {item.request_id: item for item in items if min(item.max_nodes, item.max_depth) > 0}

    def work_ahead(self) -> list[DraftNodes] | None:
        """The draft after what was last told of each request, once; where there is none, that too is said."""
        if not self._untold:
            return None
        if self._cache is not None:
            self._cache.catch_up(_READ_PER_STEP)
        items, self._untold = self._untold.values(), {}
        return [self._nodes(item) for item in items]

    def _nodes(self, item: DraftItem) -> DraftNodes:
        state, known = self._states[item.request_id], item.start + len(item.tokens)
        tree = self.guess(state, item.max_nodes, item.max_depth)
        first, state.streamed = state.streamed, state.streamed + len(tree)
        parents = tuple(first + parent if parent != ROOT else -known for parent in tree.parents)
        return DraftNodes(
            item.request_id, item.generation, known, first, tuple(tree.tokens), parents, tuple(tree.scores)
        )

    def release(self, request_ids: Iterable[str]) -> None:
        gone = list(request_ids)
        super().release(gone)
        for request_id in gone:
            self._untold.pop(request_id, None)

    def begin(self, announcement: Announcement) -> SuffixState:
        expected = announcement.num_prompt + (announcement.params.max_tokens or announcement.num_prompt)
        least, most = _BUCKETS
        buckets = 1 << (min(max(expected, least), most) - 1).bit_length()
        text = SuffixIndex(_FIRST_TOKENS, self._depth, buckets, growing=True)
        text.begin()
        return SuffixState(text, self._tenant(announcement.params.tenant))

    def take_in(self, state: SuffixState, tokens: Sequence[int]) -> None:
        state.text.write(tokens)
        state.text.catch_up(_READ_PER_STEP)
        state.tail = [*state.tail, *tokens[-self._depth :]][-self._depth :]

    def guess(self, state: SuffixState, max_nodes: int, max_depth: int) -> TokenTree:
        if min(max_nodes, max_depth) <= 0:
            return TokenTree()
        sources = [(state.text, 0)]
        if self._cache is not None and state.tenant is not None:
            owner = self._cache.owner(state.tenant)
            if owner is not None:
                sources.append((self._cache.index, owner))
        context = Context.of(state.tail, self._depth)
        return best_draft(sources, context, self._rule, max_nodes, max_depth).tree()

    def learn(self, outputs: Sequence[FinishedOutput]) -> None:
        for output in outputs:
            tenant = self._tenant(output.tenant)
            if self._cache is not None and tenant is not None:
                self._cache.add(output.tokens, tenant)

    def close(self) -> None:
        if self._file is None or self._cache is None:
            return
        try:
            self._file.write(self._cache)
        except OSError as error:
            reason = error.strerror or error
            logger.warning("outputs of this run are not kept, %s: %s", self._file.path, reason)
        except ConfigError as error:  # another has replaced it meanwhile
            logger.warning("outputs of this run are not kept: %s", error)

    def _tenant(self, name: str) -> str | None:
        """Names are never kept, only what tells them apart."""
        if self._sharing == "shared":
            return ""
        if self._sharing == "off" or not name:
            return None
        return hashlib.sha256(name.encode()).hexdigest()


def configured(
    options: SpeculationConfig, vocabulary: Callable[[], str] = str, vocab_size: int = 0
) -> SuffixDrafter:
    """vocabulary, vocab_size: of the target, for a file of past outputs. Raises ConfigError if that cannot be
    used."""
    rule = SuffixRule(
        options.suffix_factor, options.suffix_offset, options.suffix_min_token_prob, options.suffix_tree
    )
    depth, sharing = options.suffix_max_depth, options.suffix_cache
    if sharing == "off":
        return SuffixDrafter(rule, depth)
    cache = SuffixCache(depth, options.suffix_max_cached_requests, options.suffix_max_memory * 2**20)
    file = None
    if options.suffix_cache_file:
        file = SuffixFile(Path(options.suffix_cache_file), sharing, vocabulary(), vocab_size)
        file.read(cache)
    return SuffixDrafter(rule, depth, sharing, cache, file)
