"""The one shape every proposal has: guesses hanging below a committed token."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

ROOT = -1
"""The committed token the guesses hang below. It is no node: it has no index in the tree's lists."""


class TokenTree:
    """Nodes are numbered in the order of their making, so a parent's index is below its child's.

    tokens, parents, depths, scores: one entry per node. A node's depth is 1 below the root. Its score is
    the estimated log-probability (at most 0) that the target takes it given its parent, and its value the
    sum of the scores on its path: never above its parent's, so best-first selection stays connected.
    """

    __slots__ = ("_children", "depths", "parents", "scores", "tokens", "values")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.scores: list[float] = []
        self.values: list[float] = []
        self._children: dict[tuple[int, int], int] = {}

    @classmethod
    def build(
        cls, tokens: Iterable[int], parents: Iterable[int], scores: Iterable[float] | None = None
    ) -> TokenTree:
        """A tree from parallel lists; equal tokens under one parent merge.

        Raises ValueError when a parent is not an earlier node.
        """
        tree = cls()
        place = {ROOT: ROOT}
        tokens = list(tokens)
        for index, (token, parent, score) in enumerate(
            zip(tokens, parents, scores or [0.0] * len(tokens), strict=True)
        ):
            if parent not in place:
                raise ValueError(f"node {index} hangs below {parent}, which is not an earlier node")
            place[index] = tree.add(place[parent], token, score)
        return tree

    @classmethod
    def chain(cls, tokens: Sequence[int], scores: Sequence[float] | None = None) -> TokenTree:
        return cls.build(tokens, range(ROOT, len(tokens) - 1), scores)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, score: float = 0.0) -> int:
        """The index of the node `token` below `parent`; an equal sibling is kept at its better score."""
        known = self._children.get((parent, token))
        value = score + (self.values[parent] if parent != ROOT else 0.0)
        if known is not None:
            if value > self.values[known]:
                self.scores[known], self.values[known] = score, value
                for below in range(known + 1, len(self.tokens)):
                    above = self.parents[below]
                    self.values[below] = self.scores[below] + (self.values[above] if above != ROOT else 0.0)
            return known
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1 if parent != ROOT else 1)
        self.scores.append(score)
        self.values.append(value)
        self._children[parent, token] = node
        return node

    def child(self, parent: int, token: int) -> int | None:
        return self._children.get((parent, token))

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to `node`; empty for the root."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def select(self, max_nodes: int, max_depth: int) -> TokenTree:
        """The best `max_nodes` nodes by value no deeper than `max_depth`, connected by construction.

        Ties go to the node made earlier. Nodes keep their relative order.
        """
        if len(self) <= max_nodes and (not self.depths or max(self.depths) <= max_depth):
            return self
        shallow = [node for node in range(len(self)) if self.depths[node] <= max_depth]
        # Value never rises along a path and ties prefer the earlier node: a parent precedes its child.
        best = heapq.nsmallest(max(max_nodes, 0), shallow, key=lambda node: (-self.values[node], node))
        kept = sorted(best)
        place = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
        return TokenTree.build(
            [self.tokens[node] for node in kept],
            [place[self.parents[node]] for node in kept],
            [self.scores[node] for node in kept],
        )

    def walk(self, target_token: Callable[[int], int | None]) -> tuple[list[int], list[int]]:
        """Verification: follow the target's own tokens down the tree.

        target_token(node) is the token the target chooses after `node` (ROOT included), None if it can
        choose none. Returns the accepted nodes and the committed tokens: the accepted ones and, unless none
        could be chosen, the bonus token. The same rule holds for chains and trees, greedy and sampled.
        """
        node = ROOT
        path: list[int] = []
        tokens: list[int] = []
        while True:
            token = target_token(node)
            if token is None:
                return path, tokens
            tokens.append(token)
            below = self._children.get((node, token))
            if below is None:
                return path, tokens
            path.append(below)
            node = below
