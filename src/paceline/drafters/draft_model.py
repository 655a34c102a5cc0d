"""Candidates from a small causal LM with the target's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from paceline.core.drafting import DrafterNeeds
from paceline.core.token_tree import ROOT
from paceline.drafters.base import Drafter
from paceline.drafters.materials import Materials
from paceline.drafters.ranking import Ranking
from paceline.drafters.slot_keeper import SlotKeeper
from paceline.drafters.tree_drafter import Candidates, DraftSequence, Leaf
from paceline.execution.forward_batch import Segment
from paceline.execution.model_runner import ModelRunner


class DraftModel(SlotKeeper):
    """A node keeps its slot as long as it lives, so that nothing is computed twice: neither when guesses are
    accepted nor when the tree is re-rooted."""

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
        super().__init__(runner.tables, num_slots)
        self.needs = DrafterNeeds(
            "draft_model", context_length=runner.tables.rows.shape[1], ingests_prompts=True
        )
        self._runner = runner
        self._vocab = min(runner.vocab_size, target_vocab_size)
        self._ranking = Ranking(self._vocab, eos_token_ids)
        self._chunk_tokens = chunk_tokens

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
            self._begin(sequence, sequences)
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
        found = self._ranking.candidates(self._runner.forward(segments), rows) if segments else []
        by_leaf = {(id(leaf.sequence), leaf.node): each for leaf, each in zip(rows, found, strict=True)}
        for sequence in busy:
            self._share_prompt(sequence)
        return [by_leaf.get((id(leaf.sequence), leaf.node)) for leaf in leaves]

    def forget(self, sequence: DraftSequence) -> None:
        self._drop_kv(sequence)

    # ------------------------------------------------------------ passes

    def _begin(self, sequence: DraftSequence, busy: Sequence[DraftSequence]) -> None:
        # The last token is always computed anew: its logits are wanted.
        self._open(sequence, busy, len(sequence.tokens) - 1)

    def _segment(
        self, sequence: DraftSequence, nodes: Sequence[int], busy: Sequence[DraftSequence], room: int
    ) -> tuple[Segment, set[int]]:
        """The part of a pass that computes `nodes` as far as slots are to be had and the pass has room for
        tokens, and those nodes. A root whose text was lost to others comes with all of that text."""
        self._begin(sequence, busy)
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
