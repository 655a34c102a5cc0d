"""A candidate model that a script stands for, and the engine's side of one request."""

from __future__ import annotations

import random
from collections.abc import Sequence

from paceline.core.drafting import DrafterNeeds
from paceline.core.mirror import DraftMirror
from paceline.core.params import SamplingParams
from paceline.core.token_tree import ROOT, TokenTree
from paceline.core.work import Announcement, DraftItem, DraftNodes, Proposal
from paceline.drafters.tree_drafter import Candidates, DraftSequence, Leaf
from tests.core.scripted import VOCAB, scripted

PARAMS = SamplingParams().resolved()
Text = tuple[int, ...]


class ScriptModel:
    """Knows what it has computed, by text, and complains when it is asked for it twice, or too early.

    stingy: share of the leaves it finds no room for.  chunk: tokens of known text that one pass reads.
    """

    def __init__(self, *, context: int | None = None, stingy: float = 0.0, chunk: int = 5) -> None:
        self.needs = DrafterNeeds("script", context_length=context, ingests_prompts=True)
        self.passes: list[list[tuple[str, Text]]] = []
        self.refused: set[str] = set()
        self.surprise = 0.0  # how much less likely every candidate is than the script says
        self.again = False  # whether a text may be computed twice
        self._stingy, self._chunk = stingy, chunk
        self._rng = random.Random(0)
        self._read: dict[str, int] = {}
        self._computed: dict[str, set[Text]] = {}

    def problem(self, sequence: DraftSequence) -> str | None:
        return "refused" if sequence.request_id in self.refused else None

    def moved(self, sequence: DraftSequence, accepted: Sequence[int], place: dict[int, int]) -> None:
        name = sequence.request_id
        read = self._read.get(name, 0)
        done = self._computed.setdefault(name, set())
        for _ in accepted:
            read += 1
            assert tuple(sequence.tokens[:read]) in done, "an accepted node was never computed"
        assert read <= len(sequence.tokens)
        self._read[name] = read
        expanded = {new for new in place.values() if new in sequence.draft.expanded}
        alive = {(*sequence.tokens, *sequence.path_tokens(node)) for node in expanded - {ROOT}}
        assert alive <= done
        self._computed[name] = alive | {tuple(sequence.tokens[:read])}
        assert (ROOT in expanded) <= (read == len(sequence.tokens))

    def advance(self, sequences: Sequence[DraftSequence]) -> bool:
        room = self._chunk
        for sequence in sequences:
            assert sequence.request_id not in self.refused
            read = self._read.get(sequence.request_id, 0)
            more = min(room, max(0, len(sequence.tokens) - 1 - read))
            self._read[sequence.request_id] = read + more
            room -= more
        return room < self._chunk

    def expand(self, leaves: Sequence[Leaf]) -> list[Candidates | None]:
        assert leaves
        self.passes.append([])
        return [self._candidates(leaf) for leaf in leaves]

    def _candidates(self, leaf: Leaf) -> Candidates | None:
        sequence, name = leaf.sequence, leaf.sequence.request_id
        text = (*sequence.tokens, *sequence.path_tokens(leaf.node))
        assert self._read[name] >= len(sequence.tokens) - 1, "the text before the root was not read"
        if self._rng.random() < self._stingy:
            return None
        self.passes[-1].append((name, text))
        done = self._computed[name]
        assert self.again or text not in done, "computed twice"
        assert len(text) == len(sequence.tokens) or text[:-1] in done, "computed before its parent"
        done.add(text)
        self._read[name] = max(self._read[name], len(sequence.tokens))
        tokens, scores = zip(*scripted(text)[: leaf.count], strict=True)
        return Candidates(tokens, [score - self.surprise for score in scores])

    def forget(self, sequence: DraftSequence) -> None:
        self._read.pop(sequence.request_id, None)
        self._computed.pop(sequence.request_id, None)


class Side:
    """The engine's side of one request: its text, what the drafter was told of it, a mirror of the tree."""

    def __init__(self, name: str, prompt: Sequence[int], generation: int = 1) -> None:
        self.name, self.text, self.told = name, list(prompt), 0
        self.num_prompt, self.generation = len(prompt), generation
        self.mirror: DraftMirror | None = None
        self.numbers: dict[int, Text] = {}

    def item(self, max_nodes: int = 8, max_depth: int = 8) -> DraftItem:
        start, self.told = self.told, len(self.text)
        announcement = Announcement(self.num_prompt, PARAMS) if start == 0 else None
        if start == 0:
            self.mirror = DraftMirror(self.generation, len(self.text))
        tokens = tuple(self.text[start:])
        return DraftItem(self.name, start, tokens, max_nodes, max_depth, announcement, self.generation)

    def hear(self, nodes: DraftNodes) -> None:
        """Every streamed node is a candidate of the text it hangs below."""
        assert nodes.generation == self.generation
        assert nodes.num_tokens == self.told
        for number, (token, parent) in enumerate(zip(nodes.tokens, nodes.parents, strict=True), nodes.first):
            above = self.numbers[parent] if parent >= 0 else tuple(self.text[:-parent])
            assert token in [each for each, _ in scripted(above)]
            self.numbers[number] = (*above, token)
        assert self.mirror is not None
        self.mirror.extend(nodes, VOCAB)

    def commit(self, tokens: Sequence[int]) -> None:
        self.text += tokens
        if self.mirror is not None:
            self.mirror.commit(tokens)


def check(side: Side, proposal: Proposal, max_nodes: int, max_depth: int) -> TokenTree:
    assert (proposal.request_id, proposal.num_tokens) == (side.name, len(side.text))
    assert proposal.error is None
    tree = TokenTree.build(proposal.tokens, proposal.parents, proposal.scores)
    assert len(tree) <= max_nodes
    assert max(tree.depths, default=0) <= max_depth
    for node in range(len(tree)):
        *above, last = (tree.tokens[other] for other in tree.path(node))
        assert last in [token for token, _ in scripted([*side.text, *above])]
    return tree
