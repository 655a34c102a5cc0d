"""Candidates from a small causal LM with the target's vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import Tensor

from paceline.core import sampling
from paceline.core.drafting import DrafterNeeds
from paceline.core.growth import DraftTree
from paceline.core.kv_ledger import KVLedger
from paceline.core.sampling import Unsampleable
from paceline.core.token_tree import ROOT
from paceline.drafters.base import Drafter
from paceline.drafters.registry import Materials
from paceline.drafters.tree_drafter import Candidates, DraftSequence, Leaf
from paceline.execution.forward_batch import Segment
from paceline.execution.model_runner import ModelRunner
from paceline.kernels import ops


class DraftModel:
    """Ranks next tokens by the target's own rule and noise: processed logits / temperature + the Gumbel noise
    that the target will use (arXiv 2408.07978).

    Its KV follows the rules of the target's: one token per slot, ids only, a radix cache of its own. A node
    keeps its slot as long as it lives, so that nothing is computed twice: neither when guesses are accepted
    nor when the tree is re-rooted.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        target_vocab_size: int,
        eos_token_ids: Sequence[int],
        num_slots: int,
        chunk_tokens: int,
    ) -> None:
        """chunk_tokens: most tokens of one pass."""
        self.needs = DrafterNeeds(
            "draft_model", context_length=runner.tables.rows.shape[1], ingests_prompts=True
        )
        self._runner = runner
        self._vocab = min(runner.vocab_size, target_vocab_size)
        self._eos = tuple(eos_token_ids)
        self._ledger = KVLedger(num_slots)
        self._rows = list(range(len(runner.tables.rows)))
        self._chunk_tokens = chunk_tokens
        self._holding: dict[str, DraftSequence] = {}  # those with a row and slots

    # ------------------------------------------------------------ the model's protocol

    def problem(self, sequence: DraftSequence) -> str | None:
        if sequence.foreign:
            return "the text holds a token that the draft model does not know"
        assert self.needs.context_length is not None
        if len(sequence.tokens) > self.needs.context_length:
            return "the text is longer than the draft model's context"
        return None

    def moved(self, sequence: DraftSequence, accepted: Sequence[int], place: dict[int, int]) -> None:
        held = sequence.num_held
        sequence.foreign = sequence.foreign or any(token >= self._vocab for token in sequence.tokens[held:])
        if sequence.cache_node is None:
            return
        slots = [sequence.node_slots.pop(node) for node in accepted]
        self._append(sequence, slots)
        sequence.num_held += len(slots)
        dead = [slot for node, slot in sequence.node_slots.items() if node not in place]
        sequence.node_slots = {
            place[node]: slot for node, slot in sequence.node_slots.items() if node in place
        }
        self._ledger.pool.release(dead)

    def advance(self, sequences: Sequence[DraftSequence]) -> bool:
        """All read what one pass holds; a sequence that finds no room drafts without, later."""
        segments, room = [], self._chunk_tokens
        for sequence in sequences:
            self._open(sequence, sequences)
            missing = sequence.tokens[sequence.num_held : -1][:room]
            if not missing or not self._take_known(sequence, len(missing), sequences):
                continue
            segments.append(Segment(sequence.row, sequence.num_held, missing, False))
            sequence.num_held += len(missing)
            room -= len(missing)
        if segments:
            self._runner.forward(segments)
        for sequence in sequences:
            self._share_prompt(sequence)
        return bool(segments)

    def expand(self, leaves: Sequence[Leaf]) -> list[Candidates | None]:
        parts = {
            id(sequence): (sequence, list(group))
            for sequence, group in groupby(
                sorted(leaves, key=lambda leaf: leaf.sequence.request_id), key=lambda leaf: leaf.sequence
            )
        }
        busy = [sequence for sequence, _ in parts.values()]
        segments, rows, room = [], [], self._chunk_tokens
        for sequence, group in parts.values():
            segment, taken = self._segment(sequence, [leaf.node for leaf in group], busy, room)
            if taken:
                segments.append(segment)
                room -= len(segment.tokens) + len(segment.tree_tokens)
                rows += [leaf for leaf in group if leaf.node in taken]
        found = self._candidates(self._runner.forward(segments), rows) if segments else []
        by_leaf = {(id(leaf.sequence), leaf.node): each for leaf, each in zip(rows, found, strict=True)}
        for sequence in busy:
            self._share_prompt(sequence)
        return [by_leaf.get((id(leaf.sequence), leaf.node)) for leaf in leaves]

    def forget(self, sequence: DraftSequence) -> None:
        self._drop_kv(sequence)

    # ------------------------------------------------------------ slots

    def _open(self, sequence: DraftSequence, busy: Sequence[DraftSequence]) -> None:
        if sequence.cache_node is not None:
            return
        if not self._rows:
            self._drop_kv(next(self._idle(busy)))
        sequence.row = self._rows.pop()
        # The last token is always computed anew: its logits are wanted.
        self._ledger.open(sequence, sequence.tokens[:-1])
        sequence.num_held = len(sequence.slots)
        self._runner.tables.write(sequence.row, 0, sequence.slots)
        self._holding[sequence.request_id] = sequence

    def _take_known(self, sequence: DraftSequence, count: int, busy: Sequence[DraftSequence]) -> bool:
        slots = self._take(count, busy)
        self._append(sequence, slots or [])
        return slots is not None

    def _append(self, sequence: DraftSequence, slots: list[int]) -> None:
        self._runner.tables.write(sequence.row, len(sequence.slots), slots)
        sequence.slots.extend(slots)

    def _take(self, count: int, busy: Sequence[DraftSequence]) -> list[int] | None:
        """Evicts cached prefixes first, then the KV of the request that was idle longest."""
        while (slots := self._ledger.take(count)) is None:
            idle = next(self._idle(busy), None)
            if idle is None:
                return None
            self._drop_kv(idle)
        return slots

    def _idle(self, busy: Sequence[DraftSequence]) -> Iterator[DraftSequence]:
        """Those that hold KV and take no part in the current pass, the longest idle first."""
        names = {sequence.request_id for sequence in busy}
        idle = [each for name, each in self._holding.items() if name not in names]
        return iter(sorted(idle, key=lambda each: each.last_use))

    def _share_prompt(self, sequence: DraftSequence) -> None:
        """Hands a prompt that is computed to the cache, for others to use while this request runs."""
        if sequence.num_cached_slots < sequence.num_prompt <= sequence.num_held:
            self._ledger.share(sequence, sequence.tokens, sequence.num_prompt)
            self._runner.tables.write(sequence.row, 0, sequence.slots[: sequence.num_prompt])

    def _drop_kv(self, sequence: DraftSequence) -> None:
        """Without its KV a tree cannot grow on: it starts anew, below the next root. Below this one it would
        only take the KV back from who needs it now, and so on without end."""
        if sequence.cache_node is None:
            return
        self._ledger.pool.release(sequence.node_slots.values())
        self._ledger.close(sequence, sequence.tokens, sequence.num_held)
        self._rows.append(sequence.row)
        sequence.row, sequence.num_held, sequence.node_slots = -1, 0, {}
        sequence.draft, sequence.numbers = DraftTree(closed={ROOT}), []
        del self._holding[sequence.request_id]

    # ------------------------------------------------------------ passes

    def _segment(
        self, sequence: DraftSequence, nodes: Sequence[int], busy: Sequence[DraftSequence], room: int
    ) -> tuple[Segment, set[int]]:
        """The part of a pass that computes `nodes` as far as slots are to be had and the pass has room for
        tokens, and those nodes. A root whose text was lost to others comes with all of that text."""
        self._open(sequence, busy)
        start, known = sequence.num_held, sequence.tokens[sequence.num_held :]
        taken: set[int] = set()
        if nodes[0] == ROOT:
            if len(known) <= room and self._take_known(sequence, len(known), busy):
                sequence.num_held += len(known)
                taken.add(ROOT)
            return Segment(sequence.row, start, known, True), taken
        tree = sequence.draft.tree
        tokens, paths = [], []
        for node in nodes[:room]:
            slots = self._take(1, busy)
            if slots is None:
                break
            sequence.node_slots[node] = slots[0]
            taken.add(node)
            tokens.append(tree.tokens[node])
            paths.append([sequence.node_slots[other] for other in tree.path(node)])
        return Segment(sequence.row, start, (), True, tokens, paths), taken

    def _candidates(self, logits: Tensor, leaves: Sequence[Leaf]) -> list[Candidates]:
        """Of each leaf from its row of `logits`."""
        logits = logits[:, : self._vocab]
        plain = [at for at, leaf in enumerate(leaves) if leaf.sequence.params.plain]
        found: dict[int, Candidates] = {}
        if plain:
            rows = logits if len(plain) == len(leaves) else logits[plain]
            found = dict(zip(plain, _plain_candidates(rows, [leaves[at] for at in plain]), strict=True))
        return [
            found[at] if at in found else self._processed_candidates(logits[at], leaf)
            for at, leaf in enumerate(leaves)
        ]

    def _processed_candidates(self, logits: Tensor, leaf: Leaf) -> Candidates:
        sequence = leaf.sequence
        prefix = [*sequence.tokens, *sequence.path_tokens(leaf.node)]
        row: sampling.Logits = logits.float().cpu().numpy()
        try:
            return Candidates(
                *sampling.candidates(row, sequence.params, prefix, sequence.num_prompt, self._eos, leaf.count)
            )
        except Unsampleable:
            return Candidates()


def _plain_candidates(logits: Tensor, leaves: Sequence[Leaf]) -> list[Candidates]:
    params = [leaf.sequence.params for leaf in leaves]
    tokens, scores = ops.top_candidates(
        logits,
        [0.0 if each.greedy else each.temperature or 0.0 for each in params],
        [each.seed or 0 for each in params],
        [len(leaf.sequence.tokens) + leaf.sequence.draft.tree.depth(leaf.node) for leaf in leaves],
        max(leaf.count for leaf in leaves),
    )
    found = []
    for leaf, ids, values in zip(leaves, tokens.tolist(), scores.tolist(), strict=True):
        count = min(leaf.count, sum(token >= 0 for token in ids))
        found.append(Candidates(ids[:count], values[:count]))
    return found


def made(materials: Materials) -> Drafter:
    assert materials.runner is not None
    limits = materials.limits
    model = DraftModel(
        materials.runner(min(limits.context_length, materials.context_length)),
        target_vocab_size=materials.target_vocab_size,
        eos_token_ids=materials.eos_token_ids,
        num_slots=limits.num_slots,
        chunk_tokens=limits.max_batch_tokens,
    )
    return materials.tree(model)
