"""The coordinator's copy of the tree that a drafter keeps growing for one request."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.token_tree import ROOT, Landing, TokenTree
from paceline.core.work import DraftNodes

MOST_NODES = 1024
"""Nodes that one request's copy may hold; further ones are dropped. A drafter's mistake costs no more."""


class DraftMirror:
    """Committing moves the root down the tree and touches nothing else, so that the next subtree can be
    chosen at once; what died is swept out later, while the target is busy.

    The tree's own root stands for the committed token at position `base - 1`; `_spine[i]` is the node of the
    committed token at `base + i`, the last of them (or ROOT) is where guesses hang now. A token that was
    committed without having been drafted becomes a node too: guesses that were under way to it find it.
    """

    def __init__(self, generation: int, num_tokens: int) -> None:
        self.generation = generation
        self.tree = TokenTree()
        self._base = num_tokens
        self._spine: list[int] = []
        self._places: dict[int, int] = {}  # a drafter's node number -> node, as long as it may live
        self._next = 0

    @property
    def root(self) -> int:
        return self._spine[-1] if self._spine else ROOT

    @property
    def num_tokens(self) -> int:
        """Committed tokens, up to and with the root."""
        return self._base + len(self._spine)

    def extend(self, nodes: DraftNodes, vocab_size: int) -> int:
        """Takes in streamed nodes; those below what is dead are dropped. Returns how many were kept.

        Raises ValueError for what no drafter in step can send; nothing of it is kept.
        """
        if nodes.first != self._next:
            raise ValueError(f"nodes start at {nodes.first}, expected {self._next}")
        self._next += len(nodes.tokens)
        if not all(type(token) is int and 0 <= token < vocab_size for token in nodes.tokens):
            raise ValueError("a token is not in the vocabulary")
        if not all(score <= 0.0 for score in nodes.scores):  # false for NaN
            raise ValueError("a score is not a log-probability")
        if not all(parent < nodes.first + at for at, parent in enumerate(nodes.parents)):
            raise ValueError("a parent is not an earlier node")
        kept = 0
        for number, (token, parent, score) in enumerate(
            zip(nodes.tokens, nodes.parents, nodes.scores, strict=True), nodes.first
        ):
            place = self._places.get(parent) if parent >= 0 else self._committed(-parent)
            if place is not None and len(self.tree) < MOST_NODES:
                self._places[number] = self.tree.add(place, token, score)
                kept += 1
        return kept

    def _committed(self, num_tokens: int) -> int | None:
        """The node of the committed token at `num_tokens - 1`; None when it was swept out or is unknown."""
        at = num_tokens - self._base
        if at == 0:
            return ROOT
        return self._spine[at - 1] if 0 < at <= len(self._spine) else None

    def add_chain(self, tokens: Sequence[int], score: float) -> None:
        """Guesses from elsewhere below the root; equal ones merge."""
        node = self.root
        for token in tokens:
            node = self.tree.add(node, token, score)

    def commit(self, tokens: Sequence[int]) -> Landing:
        """Moves the root down along newly committed tokens, the last of which is the bonus token."""
        landing = Landing.MISS
        for token in tokens:
            below = self.tree.child(self.root, token)
            if below is None:
                landing = Landing.MISS
                below = self.tree.add(self.root, token)
            else:
                landing = Landing.HIT if self.tree.children(below) else Landing.LEAF_HIT
            self._spine.append(below)
        return landing

    def select(self, max_nodes: int, max_depth: int) -> TokenTree:
        """The best nodes below the root, as a tree of their own."""
        return self.tree.select(max_nodes, max_depth, self.root)

    def sweep(self) -> None:
        """Drops what is not below the root."""
        tree, place = self.tree.rerooted(self.root)
        self._base, self._spine = self.num_tokens, []
        self._places = {number: place[node] for number, node in self._places.items() if node in place}
        self.tree = tree
