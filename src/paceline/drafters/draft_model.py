"""A small causal LM with the target's vocabulary as drafter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from paceline.core.drafting import DrafterNeeds
from paceline.core.params import SamplingParams
from paceline.core.prefix_cache import CacheNode, PrefixCache
from paceline.core.sampling import Unsampleable
from paceline.core.slots import SlotPool
from paceline.core.token_tree import ROOT
from paceline.core.work import DraftItem, Proposal
from paceline.execution.forward_batch import Segment
from paceline.execution.model_runner import ModelRunner
from paceline.execution.sampler import Row, SampledRows


@dataclass(slots=True)
class DraftSequence:
    """tokens: what the target committed.  held: tokens whose KV is in `slots`, a prefix of `tokens` possibly
    followed by guesses of the last round: guesses that were accepted are never computed again."""

    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    row: int = -1  # only while it holds KV
    held: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    cache_node: CacheNode | None = None
    num_cached_slots: int = 0
    last_use: int = 0
    # Whether the text holds an id the draft model lacks, such as a padding row of a wider target.
    foreign: bool = False


class DraftModelDrafter:
    """Guesses a chain with the target's own rule and noise: the drafter ranks tokens by its processed
    logits / temperature + the Gumbel noise the target will use (arXiv 2408.07978).

    Its KV follows the rules of the target's: one token per slot, ids only, a radix cache of its own.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        target_vocab_size: int,
        eos_token_ids: Sequence[int],
        num_slots: int,
        max_batch_tokens: int,
    ) -> None:
        self.needs = DrafterNeeds(
            "draft_model", context_length=runner.tables.rows.shape[1], ingests_prompts=True
        )
        self._runner = runner
        self._vocab = min(runner.vocab_size, target_vocab_size)
        self._eos = tuple(eos_token_ids)
        self._pool = SlotPool(num_slots)
        self._cache = PrefixCache(self._pool)
        self._rows = list(range(len(runner.tables.rows)))
        self._max_batch_tokens = max_batch_tokens
        self._sequences: dict[str, DraftSequence] = {}
        self._clock = 0

    # ------------------------------------------------------------ the drafter's protocol

    def grow(self, items: Sequence[DraftItem]) -> list[Proposal]:
        self._clock += 1
        ready: list[tuple[DraftSequence, int]] = []
        proposals: dict[str, Proposal] = {}
        # All are taken in first: what takes part in this call is not idle, and keeps its KV.
        for item, sequence in [(item, self._take_in(item)) for item in items]:
            problem = self._prepare(sequence, item.max_depth)
            if problem:
                proposals[item.request_id] = Proposal(item.request_id, len(sequence.tokens), error=problem)
            else:
                ready.append((sequence, item.max_depth))
                proposals[item.request_id] = Proposal(item.request_id, len(sequence.tokens))
        chains = iter(self._guess(ready))
        for sequence, _ in ready:
            self._share_prompt(sequence)
        return [
            proposal if proposal.error else _as_chain(proposal, next(chains))
            for proposal in proposals.values()
        ]

    def advance(self, items: Sequence[DraftItem]) -> None:
        self._clock += 1
        sequences = [self._take_in(item) for item in items]
        ready = [sequence for sequence in sequences if self._prepare(sequence, 0) is None]
        if ready:
            self._catch_up(ready, wanted=False)
        for sequence in ready:
            self._share_prompt(sequence)

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            sequence = self._sequences.pop(request_id, None)
            if sequence is not None:
                self._drop_kv(sequence)

    # ------------------------------------------------------------ tokens and slots

    def _take_in(self, item: DraftItem) -> DraftSequence:
        if item.announcement is not None:
            told = item.announcement
            self._sequences[item.request_id] = DraftSequence([], told.num_prompt, told.params)
        sequence = self._sequences[item.request_id]
        sequence.tokens.extend(item.tokens)
        sequence.foreign = sequence.foreign or any(token >= self._vocab for token in item.tokens)
        sequence.last_use = self._clock
        return sequence

    def _prepare(self, sequence: DraftSequence, depth: int) -> str | None:
        """Drops what was not accepted and finds slots for what is to come; says why it cannot."""
        if sequence.foreign:
            return "the text holds a token that the draft model does not know"
        if sequence.cache_node is None:
            if not self._rows:
                self._drop_kv(min(self._idle(), key=lambda other: other.last_use))
            sequence.row = self._rows.pop()
            # The last token is always computed anew: its logits are wanted.
            node, slots = self._cache.match(sequence.tokens[:-1])
            sequence.cache_node, sequence.slots = node, slots
            sequence.held, sequence.num_cached_slots = sequence.tokens[: len(slots)], len(slots)
            self._runner.tables.write(sequence.row, 0, slots)
        keep = min(_common_prefix(sequence.held, sequence.tokens), len(sequence.tokens) - 1)
        self._pool.release(sequence.slots[keep:])
        del sequence.held[keep:], sequence.slots[keep:]
        count = len(sequence.tokens) + max(depth - 1, 0) - keep
        slots_or_none = self._allocate(count)
        if slots_or_none is None:
            return "the draft model's KV cache is full"
        self._runner.tables.write(sequence.row, keep, slots_or_none)
        sequence.slots.extend(slots_or_none)
        return None

    def _allocate(self, count: int) -> list[int] | None:
        """Evicts cached prefixes first, then the KV of the request that was idle longest."""
        while (slots := self._take(count)) is None:
            idle = self._idle()
            if not idle:
                return None
            self._drop_kv(min(idle, key=lambda other: other.last_use))
        return slots

    def _idle(self) -> list[DraftSequence]:
        """Those that hold KV and take no part in the current call (a preempted request's, say)."""
        return [
            other
            for other in self._sequences.values()
            if other.cache_node is not None and other.last_use < self._clock
        ]

    def _take(self, count: int) -> list[int] | None:
        if count > self._pool.num_free:
            self._cache.evict(count - self._pool.num_free)
        return self._pool.allocate(count)

    def _share_prompt(self, sequence: DraftSequence) -> None:
        """Hands a prompt that is computed to the cache, for others to use while this request runs; without
        its last token, which `_prepare` may compute anew."""
        length = sequence.num_prompt - 1
        if not sequence.num_cached_slots < length <= _common_prefix(sequence.held, sequence.tokens):
            return
        assert sequence.cache_node is not None
        sequence.cache_node, sequence.slots[:length], sequence.num_cached_slots = self._cache.insert(
            sequence.tokens[:length], sequence.slots[:length], sequence.cache_node, sequence.num_cached_slots
        )
        self._runner.tables.write(sequence.row, 0, sequence.slots[:length])

    def _drop_kv(self, sequence: DraftSequence) -> None:
        if sequence.cache_node is None:
            return
        keep = _common_prefix(sequence.held, sequence.tokens)
        node, slots, owned = sequence.cache_node, sequence.slots, sequence.num_cached_slots
        if keep > owned:
            node, slots[:keep], owned = self._cache.insert(sequence.tokens[:keep], slots[:keep], node, owned)
        self._cache.unlock(node)
        self._pool.release(slots[owned:])
        self._rows.append(sequence.row)
        sequence.row, sequence.held, sequence.slots = -1, [], []
        sequence.cache_node, sequence.num_cached_slots = None, 0

    # ------------------------------------------------------------ passes

    def _guess(self, ready: Sequence[tuple[DraftSequence, int]]) -> list[list[int]]:
        """One chain per (sequence, length), grown together: a pass per depth over all that go on."""
        chains: list[list[int]] = [[] for _ in ready]
        if not ready:
            return chains
        active = list(range(len(ready)))
        logits = self._catch_up([sequence for sequence, _ in ready])
        while active:
            sequences = [ready[index][0] for index in active]
            tokens = self._choose(logits, sequences, [chains[index] for index in active])
            for index, token in zip(active, tokens, strict=True):
                if token is not None:
                    chains[index].append(token)
            active = [
                index
                for index, token in zip(active, tokens, strict=True)
                if token is not None and len(chains[index]) < ready[index][1]
            ]
            if active:
                logits = self._run([(ready[index][0], chains[index][-1:]) for index in active])
        return chains

    def _choose(
        self, logits: Tensor, sequences: Sequence[DraftSequence], chains: Sequence[list[int]]
    ) -> list[int | None]:
        """The next token of each chain; None where no token can be chosen."""
        rows = [
            Row(sequence.params, len(sequence.tokens) + len(chain))
            for sequence, chain in zip(sequences, chains, strict=True)
        ]
        chosen = SampledRows(logits[:, : self._vocab].contiguous(), rows, self._eos)
        tokens: list[int | None] = []
        for index, (sequence, chain) in enumerate(zip(sequences, chains, strict=True)):
            prefix = partial(_joined, sequence.tokens, chain)
            try:
                tokens.append(chosen.token(index, prefix, sequence.num_prompt))
            except Unsampleable:
                tokens.append(None)
        return tokens

    def _catch_up(self, sequences: Sequence[DraftSequence], *, wanted: bool = True) -> Tensor:
        """Computes every known token that is missing; logits of each sequence's last token, in order.

        All last tokens go through one pass, since the logits of a pass live only until the next.
        """
        budget = self._max_batch_tokens
        while sum(len(sequence.tokens) - len(sequence.held) for sequence in sequences) > budget:
            parts, room = [], budget
            for sequence in sequences:
                missing = sequence.tokens[len(sequence.held) : -1][:room]
                if missing:
                    parts.append((sequence, missing))
                    room -= len(missing)
            self._run(parts, wanted=False)
        rest = [(sequence, sequence.tokens[len(sequence.held) :]) for sequence in sequences]
        return self._run(rest, wanted=wanted)

    def _run(self, parts: Sequence[tuple[DraftSequence, list[int]]], *, wanted: bool = True) -> Tensor:
        segments = [Segment(sequence.row, len(sequence.held), tokens, wanted) for sequence, tokens in parts]
        for sequence, tokens in parts:
            sequence.held.extend(tokens)
        return self._runner.forward(segments)


def _as_chain(proposal: Proposal, guesses: list[int]) -> Proposal:
    return replace(proposal, tokens=tuple(guesses), parents=tuple(range(ROOT, len(guesses) - 1)))


def _joined(tokens: list[int], guesses: list[int]) -> list[int]:
    return [*tokens, *guesses]


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(at for at in range(length) if one[at] != other[at])
