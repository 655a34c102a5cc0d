"""Candidates from the first layers of the target itself, its final norm and its head (LayerSkip, arXiv
2404.16710, section 4.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.core.drafting import DrafterNeeds
from paceline.core.growth import DraftTree
from paceline.core.slots import SlotPool
from paceline.core.token_tree import ROOT
from paceline.drafters.base import Drafter
from paceline.drafters.materials import Materials
from paceline.drafters.ranking import Ranking
from paceline.drafters.tree_drafter import Candidates, DraftSequence, Leaf
from paceline.errors import ConfigError
from paceline.execution.forward_batch import Segment
from paceline.execution.target_view import TargetView


class EarlyLayers:
    """Committed tokens are read where the target has written them, through its own row of slots: there is no
    text to follow, whatever was cached, cut into chunks, or computed anew. The root, which the target has not
    computed, and the nodes of the tree get slots of the same cache that the core knows nothing of.

    The target computes all layers of what it verifies in slots of its own, so that nothing is handed over. A
    node that lives on below the next root keeps its slot, the one that becomes the root included.
    """

    def __init__(
        self,
        target: TargetView,
        *,
        layers: int,
        slots: range,
        target_vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        """layers: how many of the target's run.  slots: of the target's cache, this drafter's alone."""
        self.needs = DrafterNeeds("layers")
        self._target = target
        self._layers = layers
        self._first = slots.start
        self._pool = SlotPool(len(slots))
        self._ranking = Ranking(target_vocab_size, eos_token_ids)
        self._holding: dict[str, DraftSequence] = {}  # those with nodes that are computed

    # ------------------------------------------------------------ the model's protocol

    def problem(self, sequence: DraftSequence) -> str | None:  # noqa: ARG002 - whatever the target serves
        return None

    def moved(self, sequence: DraftSequence, accepted: Sequence[int], place: dict[int, int]) -> None:  # noqa: ARG002
        slots = sequence.node_slots
        self._pool.release(slot for node, slot in slots.items() if node not in place)
        sequence.node_slots = {place[node]: slot for node, slot in slots.items() if node in place}

    def advance(self, sequences: Sequence[DraftSequence]) -> bool:  # noqa: ARG002 - the target reads texts
        return False

    def expand(self, leaves: Sequence[Leaf]) -> list[Candidates | None]:
        parts: dict[str, list[Leaf]] = {}
        for leaf in leaves:
            parts.setdefault(leaf.sequence.request_id, []).append(leaf)
        segments, rows = [], []
        for group in parts.values():
            sequence = group[0].sequence
            # Until the target has it in a pass again, the slots of a request that was preempted are unknown.
            if self._target.computed(sequence.request_id) != len(sequence.tokens) - 1:
                continue
            taken = [leaf for leaf in group if self._take(sequence, leaf.node, parts)]
            if taken:
                segments.append(self._segment(sequence, [leaf.node for leaf in taken]))
                rows += taken
        if not segments:
            return [None] * len(leaves)
        logits = self._target.runner.forward(segments, self._layers)
        found = self._ranking.candidates(logits, rows)
        by_leaf = {(id(leaf.sequence), leaf.node): each for leaf, each in zip(rows, found, strict=True)}
        return [by_leaf.get((id(leaf.sequence), leaf.node)) for leaf in leaves]

    def forget(self, sequence: DraftSequence) -> None:
        self._pool.release(sequence.node_slots.values())
        sequence.node_slots = {}
        self._holding.pop(sequence.request_id, None)

    # ------------------------------------------------------------ slots and passes

    def _take(self, sequence: DraftSequence, node: int, busy: Iterable[str]) -> bool:
        """A slot for a node that is to be computed, if need be of the request that was idle longest."""
        while (slots := self._pool.allocate(1)) is None:
            idle = [each for name, each in self._holding.items() if name not in busy and each.node_slots]
            if not idle:
                return False
            other = min(idle, key=lambda each: each.last_use)
            self.forget(other)
            # It starts anew below its next root: below this one it would take the slots back, without end.
            other.draft, other.numbers = DraftTree(closed={ROOT}), []
        sequence.node_slots[node] = slots[0]
        self._holding[sequence.request_id] = sequence
        return True

    def _segment(self, sequence: DraftSequence, nodes: Sequence[int]) -> Segment:
        """The root is a guess like the others, below the last token that the target has computed."""
        tree, slots = sequence.draft.tree, sequence.node_slots
        tokens = [sequence.tokens[-1] if node == ROOT else tree.tokens[node] for node in nodes]
        paths = [[self._first + slots[other] for other in (ROOT, *tree.path(node))] for node in nodes]
        row = self._target.row(sequence.request_id)
        return Segment(row, len(sequence.tokens) - 1, (), True, tokens, paths)


def made(materials: Materials) -> Drafter:
    """Raises ConfigError for a number of layers that the target cannot end after."""
    target = materials.target
    assert target is not None
    runner, limits = target.runner, materials.limits
    model = EarlyLayers(
        target,
        layers=_depth(materials.speculation.draft_layers, runner.decoder.spec.num_layers),
        slots=range(limits.num_slots, runner.kv.num_slots),
        target_vocab_size=materials.target_vocab_size,
        eos_token_ids=materials.eos_token_ids,
    )
    return materials.tree(model)


def _depth(wanted: int, num_layers: int) -> int:
    """A third where nothing is said."""
    if num_layers < 2:
        raise ConfigError(
            "speculation.draft is layers but the target has a single one: choose another drafter, or none."
        )
    if wanted >= num_layers:
        raise ConfigError(
            f"speculation.draft_layers is {wanted} but the target has {num_layers} layers: give fewer, so "
            "that guesses cost less than what they guess."
        )
    return wanted or max(1, num_layers // 3)
