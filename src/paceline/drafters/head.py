"""Candidates from a head: a small decoder over the target's hidden states (EAGLE-3, arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from paceline.core.drafting import DrafterNeeds
from paceline.core.token_tree import ROOT
from paceline.drafters.base import Drafter
from paceline.drafters.features import FeatureSource
from paceline.drafters.head_pass import HeadPass, Unbacked
from paceline.drafters.materials import Materials
from paceline.drafters.ranking import Ranking, coupling
from paceline.drafters.slot_keeper import SlotKeeper
from paceline.drafters.tree_drafter import Candidates, DraftSequence, Leaf
from paceline.execution.devices import current
from paceline.execution.forward_batch import Segment, SlotTables, build_batch
from paceline.kernels.kv_cache import KVCache
from paceline.models.head import HeadDecoder

_ROOT_TOKENS = 16
"""New tokens that are computed in the pass of the root itself: as many as a verification mostly commits."""


class HeadModel(SlotKeeper):
    """Position p of a text holds what the head makes of the target's features at p and of token p + 1, so
    that n tokens have n - 1 positions, the last of which is the root's. A node of the tree is fed its
    parent's output instead of features.

    What is computed so is kept no longer than need be: positions held are backed by features, and only those
    are shared with other requests. Where features are late, accepted nodes stand for their tokens
    (`Unbacked.spine`) until they come, and are then computed anew in their places.
    """

    lag = 1

    def __init__(
        self,
        decoder: HeadDecoder,
        kv: KVCache,
        source: FeatureSource,
        *,
        num_rows: int,
        context_length: int,
        target_vocab_size: int,
        eos_token_ids: Sequence[int],
        chunk_tokens: int,
    ) -> None:
        """chunk_tokens: most tokens of one pass."""
        super().__init__(SlotTables(num_rows, context_length), kv.num_slots)
        self.needs = DrafterNeeds("head", context_length=context_length, ingests_prompts=True)
        self._decoder = decoder
        self._kv = kv
        self._source = source
        self._ranking = Ranking(target_vocab_size, eos_token_ids, decoder.target_ids)
        self._chains = decoder.spec.num_modules == 1 and self._ranking.covers(decoder.spec.draft_vocab_size)
        self.by_distance: dict[int, list[int]] = {}
        """By `Unbacked.far`: how often candidates were judged, and were right: what late features cost."""
        self._chunk_tokens = chunk_tokens
        self._root_tokens = min(_ROOT_TOKENS, chunk_tokens)
        self._unbacked: dict[str, Unbacked] = {}  # of the sequences in `_holding`

    # ------------------------------------------------------------ the model's protocol

    def problem(self, sequence: DraftSequence) -> str | None:
        if sequence.foreign:
            return "the text holds a token that the head does not know"
        assert self.needs.context_length is not None
        if len(sequence.tokens) > self.needs.context_length:
            return "the text is longer than the head's context"
        return None

    def moved(self, sequence: DraftSequence, accepted: Sequence[int], place: dict[int, int]) -> None:
        known = self._decoder.spec.vocab_size
        new = sequence.tokens[sequence.num_held :]
        sequence.foreign = sequence.foreign or any(token >= known for token in new)
        if sequence.cache_node is None:
            return
        own = self._unbacked[sequence.request_id]
        for node in accepted:
            own.spine.append(sequence.node_slots.pop(node))
            own.tip, own.far[ROOT] = own.hidden.pop(node), own.far.pop(node)
        dead = [slot for node, slot in sequence.node_slots.items() if node not in place]
        self._ledger.pool.release(dead)
        sequence.node_slots = {
            place[node]: slot for node, slot in sequence.node_slots.items() if node in place
        }
        own.hidden = {place[node]: own.hidden[node] for node in own.hidden if node in place}
        kept = {place[node]: far for node, far in own.far.items() if node in place and place[node] != ROOT}
        own.far = {ROOT: own.far[ROOT], **kept}

    def judged(self, sequence: DraftSequence, node: int, *, right: bool) -> None:
        """The target has chosen what follows the node, and the node's candidates had it or not."""
        own = self._unbacked.get(sequence.request_id)
        far = own.far.get(node) if own is not None else None
        if far is not None:
            tally = self.by_distance.setdefault(far, [0, 0])
            tally[0] += 1
            tally[1] += right

    def advance(self, sequences: Sequence[DraftSequence]) -> bool:
        """A part of what is behind, as much as one pass holds; a few last positions are left to the root's
        own pass."""
        this = HeadPass(self._chunk_tokens)
        for sequence in sequences:
            self._catch_up(sequence, sequences, this)
        self._run(this)
        for sequence in sequences:
            self._share_prompt(sequence)
        return bool(this.segments)

    def expand(self, leaves: Sequence[Leaf]) -> list[Candidates | None]:
        parts: dict[str, list[int]] = {}
        for at, leaf in enumerate(leaves):
            parts.setdefault(leaf.sequence.request_id, []).append(at)
        busy = [leaves[part[0]].sequence for part in parts.values()]
        found: list[Candidates | None] = [None] * len(leaves)
        waiting = list(parts.values())
        while waiting:
            this = HeadPass(self._chunk_tokens)
            rows, later = [], []
            for part in waiting:
                sequence, first = leaves[part[0]].sequence, leaves[part[0]].node
                if first == ROOT and not self._can_start(sequence, busy):
                    continue
                if first == ROOT:
                    fits = self._missing(sequence) <= this.room
                    rows += part if fits and self._add_root(sequence, busy, this) else []
                    later += [] if fits else [part]
                else:
                    nodes = [leaves[at].node for at in part[: this.room]]
                    rows += part[: self._add_nodes(sequence, nodes, busy, this)]
                    later += [part[len(nodes) :]] if len(nodes) < len(part) else []
            logits = self._run(this)
            if logits is not None:
                ranked = self._ranking.candidates(logits, [leaves[at] for at in rows])
                for at, candidates in zip(rows, ranked, strict=True):
                    found[at] = candidates
            waiting = later
        for sequence in busy:
            self._share_prompt(sequence)
        return found

    def chain(
        self, leaves: Sequence[Leaf], steps: int, hang: Callable[[Leaf, Candidates], int | None]
    ) -> bool:
        busy = [leaf.sequence for leaf in leaves]
        able = self._chains and all(
            each.params.plain and self._can_start(each, busy) and self._backed(each) == len(each.tokens) - 1
            for each in busy
        )
        missing = [self._missing(each) for each in busy] if able else []
        room = self._ledger.num_available - sum(missing) - len(busy) * (steps - 1)
        if not able or room < 0 or sum(missing) > self._chunk_tokens:
            return False
        this = HeadPass(self._chunk_tokens)
        for sequence in busy:
            self._add_root(sequence, busy, this)
        slots = self._take(len(busy) * (steps - 1), busy)
        assert slots is not None
        temperatures, seeds = coupling(leaves)
        with current(self._kv.keys.device):
            found = self._decoder.chain(
                build_batch(this.segments, self._tables),
                this.hidden(self._source, self._decoder),
                self._kv,
                slots=np.array(slots, dtype=np.int32).reshape(len(busy), steps - 1),
                temperatures=temperatures,
                seeds=seeds,
                positions=[len(sequence.tokens) for sequence in busy],
                count=max(leaf.count for leaf in leaves),
            )
        tokens, scores, output = found[0].tolist(), found[1].tolist(), found[2].flatten(0, 1).unbind(0)
        unused = [
            slot
            for at, leaf in enumerate(leaves)
            for slot in self._hang_chain(
                leaf,
                slots[at * (steps - 1) : (at + 1) * (steps - 1)],
                tokens[at],
                scores[at],
                output[at * steps : (at + 1) * steps],
                hang,
            )
        ]
        self._ledger.pool.release(unused)
        for sequence in busy:
            self._share_prompt(sequence)
        return True

    def _hang_chain(
        self,
        leaf: Leaf,
        slots: list[int],
        tokens: list[list[int]],
        scores: list[list[float]],
        output: Sequence[Tensor],
        hang: Callable[[Leaf, Candidates], int | None],
    ) -> list[int]:
        """tokens, scores: of the candidates of each step.  output: of each step. The slots that nothing was
        computed in which is wanted."""
        sequence, own = leaf.sequence, self._unbacked[leaf.sequence.request_id]
        own.tip, own.far[ROOT], node, used = output[0], 0, leaf.node, 0
        for step, (ids, values) in enumerate(zip(tokens, scores, strict=True)):
            count = min(leaf.count, sum(token >= 0 for token in ids))
            below = hang(Leaf(sequence, node, leaf.count), Candidates(ids[:count], values[:count]))
            if below is None or step == len(slots):
                break
            node, used = below, step + 1
            sequence.node_slots[node], own.hidden[node] = slots[step], output[step + 1]
            own.far[node] = step + 1
        return slots[used:]

    def forget(self, sequence: DraftSequence) -> None:
        self._drop_kv(sequence)

    # ------------------------------------------------------------ positions

    def _key(self, tokens: Sequence[int]) -> Sequence[int]:
        """Position p depends on token p + 1 too: the first has the first two."""
        return [tokens[0] << 32 | tokens[1], *tokens[2:]] if len(tokens) > 1 else []

    def _backed(self, sequence: DraftSequence) -> int:
        """Of how many positions there are features."""
        return min(self._source.computed(sequence.request_id), len(sequence.tokens) - 1)

    def _reached(self, sequence: DraftSequence) -> int:
        """How many positions are computed, with features or without."""
        return sequence.num_held + len(self._unbacked[sequence.request_id].spine)

    def _begin(self, sequence: DraftSequence, busy: Sequence[DraftSequence]) -> bool:
        """Whether it holds KV, now if not before. The last position with features is always computed anew:
        its output is wanted."""
        if sequence.cache_node is None:
            backed = self._backed(sequence)
            if backed <= 0:
                return False
            self._open(sequence, busy, backed - 1)
            self._unbacked[sequence.request_id] = Unbacked()
        return True

    def _can_start(self, sequence: DraftSequence, busy: Sequence[DraftSequence]) -> bool:
        """Whether the root's position can be computed in one pass."""
        if not self._begin(sequence, busy):
            return False
        last = len(sequence.tokens) - 2
        if self._backed(sequence) > last >= sequence.num_held:
            return self._missing(sequence) <= self._chunk_tokens
        tip = self._unbacked[sequence.request_id].tip
        return tip is not None and self._reached(sequence) == last

    def _missing(self, sequence: DraftSequence) -> int:
        """Tokens of the root's pass."""
        last = len(sequence.tokens) - 2
        return last + 1 - sequence.num_held if self._backed(sequence) > last else 1

    def _drop_kv(self, sequence: DraftSequence) -> None:
        own = self._unbacked.pop(sequence.request_id, None)
        if own is not None:
            self._ledger.pool.release(own.spine)
        super()._drop_kv(sequence)

    # ------------------------------------------------------------ passes

    def _catch_up(self, sequence: DraftSequence, busy: Sequence[DraftSequence], this: HeadPass) -> None:
        """Adds what one pass can do to bring the sequence up to its root."""
        if not self._begin(sequence, busy):
            return
        last, backed, reached = len(sequence.tokens) - 2, self._backed(sequence), self._reached(sequence)
        end = backed
        if backed > last and ROOT not in sequence.draft.expanded:
            end = last if last - sequence.num_held >= self._root_tokens else 0
        end = min(end, sequence.num_held + this.room)
        if end > sequence.num_held:
            # What follows is fed the output there, unless it has features of its own.
            self._add_backed(sequence, end, busy, this, wanted=end >= reached and end == backed)
        elif reached < last and backed <= sequence.num_held and this.room > 0:
            self._add_unbacked(sequence, busy, this)

    def _add_root(self, sequence: DraftSequence, busy: Sequence[DraftSequence], this: HeadPass) -> bool:
        """False = there are no slots."""
        end = len(sequence.tokens) - 1
        if self._backed(sequence) == end:
            return self._add_backed(sequence, end, busy, this, wanted=True)
        return self._add_unbacked(sequence, busy, this)

    def _add_backed(
        self,
        sequence: DraftSequence,
        end: int,
        busy: Sequence[DraftSequence],
        this: HeadPass,
        *,
        wanted: bool,
    ) -> bool:
        """Positions up to `end`, by the target's features; accepted nodes that stood for some lend their
        slots."""
        start, spine = sequence.num_held, self._unbacked[sequence.request_id].spine
        lent = min(len(spine), end - start)
        slots = self._take(end - start - lent, busy)
        if slots is None:
            return False
        self._append(sequence, [*spine[:lent], *slots])
        del spine[:lent]
        sequence.num_held = end
        tokens = sequence.tokens[start + 1 : end + 1]
        this.add(Segment(sequence.row, start, tokens, wanted), (sequence.request_id, start, end))
        this.wanted += [(sequence, ROOT)] if wanted else []
        return True

    def _add_unbacked(self, sequence: DraftSequence, busy: Sequence[DraftSequence], this: HeadPass) -> bool:
        """The next position, by the head's own output at the one before."""
        own, at = self._unbacked[sequence.request_id], self._reached(sequence)
        slots = self._take(1, busy) if own.tip is not None else None
        if slots is None or own.tip is None:
            return False
        own.spine += slots
        token, path = sequence.tokens[at + 1], tuple(own.spine)
        this.add(Segment(sequence.row, sequence.num_held, (), True, [token], [path]), own.tip[None])
        this.wanted.append((sequence, ROOT))
        return True

    def _add_nodes(
        self, sequence: DraftSequence, nodes: Sequence[int], busy: Sequence[DraftSequence], this: HeadPass
    ) -> int:
        """As many of the nodes as slots are to be had for; how many."""
        own, tree, places = self._unbacked[sequence.request_id], sequence.draft.tree, sequence.node_slots
        tokens, paths, inputs = [], [], []
        for node in nodes:
            slots = self._take(1, busy)
            if slots is None:
                break
            places[node] = slots[0]
            parent = tree.parents[node]
            above = own.tip if parent == ROOT else own.hidden[parent]
            assert above is not None
            inputs.append(above)
            tokens.append(tree.tokens[node])
            paths.append([*own.spine, *(places[other] for other in tree.path(node))])
            this.wanted.append((sequence, node))
        if tokens:
            joined = inputs[0][None] if len(inputs) == 1 else torch.stack(inputs)
            this.add(Segment(sequence.row, sequence.num_held, (), True, tokens, paths), joined)
        return len(tokens)

    def _run(self, this: HeadPass) -> Tensor | None:
        """Logits of the wanted rows; None where there is nothing to compute."""
        if not this.segments:
            return None
        batch = build_batch(this.segments, self._tables)
        with current(self._kv.keys.device):
            hidden = this.hidden(self._source, self._decoder)
            logits, output = self._decoder.forward(batch, hidden, self._kv)
            output = output.clone()
        for (sequence, node), row in zip(this.wanted, output, strict=True):
            own = self._unbacked[sequence.request_id]
            if node == ROOT:
                own.tip, own.far[ROOT] = row, own.far[ROOT] + 1 if own.spine else 0
            else:
                own.hidden[node] = row
                own.far[node] = own.far[sequence.draft.tree.parents[node]] + 1
        return logits


def made(materials: Materials) -> Drafter:
    assert materials.head is not None
    assert materials.features is not None
    decoder, limits = materials.head, materials.limits
    spec = decoder.spec
    # Further modules would want passes of their own over the text: each draft step takes the first.
    shape = 1, limits.num_slots, spec.num_kv_heads, spec.head_dim
    kv = KVCache(*shape, decoder.kv_dtype, materials.head_device)
    model = HeadModel(
        decoder,
        kv,
        materials.features,
        num_rows=limits.max_num_seqs,
        context_length=min(limits.context_length, materials.context_length),
        target_vocab_size=materials.target_vocab_size,
        eos_token_ids=materials.eos_token_ids,
        chunk_tokens=limits.max_batch_tokens,
    )
    return materials.tree(model)
