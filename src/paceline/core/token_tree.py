"""The one shape every proposal has: guesses hanging below a committed token."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from itertools import accumulate

ROOT = -1
"""The committed token the guesses hang below. It is no node: it has no index in the tree's lists."""


class Landing(StrEnum):
    """Where the bonus token fell: on a node with guesses below it, on one without, outside the tree."""

    HIT = "hit"
    LEAF_HIT = "leaf hit"
    MISS = "miss"


def depths_of(parents: Sequence[int]) -> list[int]:
    """Of nodes by their parents, each an earlier node or `ROOT`; 1 = below the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent != ROOT else 1)
    return depths


class TokenTree:
    """Nodes are numbered in the order of their making, so a parent's index is below its child's.

    tokens, parents, depths, scores: one entry per node. A node's depth is 1 below the root. Its score is
    the estimated log-probability (at most 0) that the target takes it given its parent, and its value the
    sum of the scores on its path: never above its parent's, so best-first selection stays connected.

    `_children` and `_below` are kept once the tree branches. Until then it is a chain: every node hangs below
    the one before it.
    """

    __slots__ = ("_below", "_children", "depths", "parents", "scores", "tokens", "values")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.scores: list[float] = []
        self.values: list[float] = []
        self._children: dict[tuple[int, int], int] | None = None
        self._below: list[list[int]] = []  # of the root first, then of each node

    @classmethod
    def build(
        cls, tokens: Iterable[int], parents: Iterable[int], scores: Iterable[float] | None = None
    ) -> TokenTree:
        """A tree from parallel lists; equal tokens under one parent merge.

        Raises ValueError when a parent is not an earlier node.
        """
        tokens, parents = list(tokens), list(parents)
        if parents == list(range(ROOT, len(tokens) - 1)):
            return cls.chain(tokens, list(scores) if scores else None)
        tree = cls()
        place = {ROOT: ROOT}
        for index, (token, parent, score) in enumerate(
            zip(tokens, parents, scores or [0.0] * len(tokens), strict=True)
        ):
            if parent not in place:
                raise ValueError(f"node {index} hangs below {parent}, which is not an earlier node")
            place[index] = tree.add(place[parent], token, score)
        return tree

    @classmethod
    def chain(cls, tokens: Sequence[int], scores: Sequence[float] | None = None) -> TokenTree:
        tree = cls()
        tree.hang_chain(ROOT, tokens, scores or [0.0] * len(tokens))
        return tree

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, score: float = 0.0) -> int:
        """The index of the node `token` below `parent`; an equal sibling is kept at its better score."""
        known = self.child(parent, token)
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
        self._enter(node)
        return node

    def _enter(self, first: int) -> None:
        """Takes in the nodes from `first` on, of which only the first may branch off."""
        if self._children is None:
            if self.parents[first] == first - 1:
                return
            self._children, self._below, first = {}, [[]], 0
        for node in range(first, len(self.tokens)):
            parent = self.parents[node]
            self._children[parent, self.tokens[node]] = node
            self._below[parent + 1].append(node)
            self._below.append([])

    def child(self, parent: int, token: int) -> int | None:
        if self._children is not None:
            return self._children.get((parent, token))
        node = parent + 1
        return node if node < len(self.tokens) and self.tokens[node] == token else None

    def children(self, node: int) -> list[int]:
        """Nodes directly below `node` (ROOT included), in the order of their making."""
        if self._children is not None:
            return self._below[node + 1]
        return [node + 1] if node + 1 < len(self.tokens) else []

    def path(self, node: int) -> list[int]:
        """Nodes from below the root down to `node`; empty for ROOT."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def value(self, node: int) -> float:
        return self.values[node] if node != ROOT else 0.0

    def depth(self, node: int) -> int:
        return self.depths[node] if node != ROOT else 0

    def best_below(self, root: int, max_nodes: int, max_depth: int) -> list[int]:
        """The best nodes below `root` by value, best first, at most `max_depth` levels below it.

        Ties go to the node made earlier. Value never rises along a path, so what is taken is connected.
        """
        if self._children is None:
            return list(range(root + 1, min(root + 1 + min(max_nodes, max_depth), len(self.tokens))))
        best: list[int] = []
        deepest = self.depth(root) + max_depth
        heap = [(-self.values[node], node) for node in self.children(root)] if max_depth > 0 else []
        heapq.heapify(heap)
        while heap and len(best) < max_nodes:
            node = heapq.heappop(heap)[1]
            best.append(node)
            if self.depths[node] < deepest:
                for below in self.children(node):
                    heapq.heappush(heap, (-self.values[below], below))
        return best

    def best_path(self, root: int, most: int) -> list[int]:
        """Tokens from `root` down: the best child, its best child, and so on, at most `most`."""
        tokens: list[int] = []
        nodes = self.children(root)
        while nodes and len(tokens) < most:
            best = max(nodes, key=lambda node: (self.values[node], -node))
            tokens.append(self.tokens[best])
            nodes = self.children(best)
        return tokens

    def graft(self, root: int, path: Sequence[int], tokens: Sequence[int], score: float, most: int) -> None:
        """Guesses from elsewhere, one after the other below `path`, which leads down from `root`; equal ones
        merge. Nothing if there is no such path; no new node once the tree has `most`."""
        node: int | None = root
        for token in path:
            node = self.child(node, token) if node is not None else None
        near = len(self.tokens) + len(tokens) > most
        for token in tokens if node is not None else ():
            assert node is not None
            if near and len(self.tokens) >= most and self.child(node, token) is None:
                return
            node = self.add(node, token, score)

    def hang_chain(self, parent: int, tokens: Sequence[int], scores: Sequence[float]) -> None:
        """New nodes, one below the other; `parent` has no child that is equal to the first."""
        if not tokens:
            return
        first, depth = len(self.tokens), self.depth(parent)
        last = first + len(tokens)
        self.tokens += tokens
        self.parents.append(parent)
        self.parents += range(first, last - 1)
        self.depths += range(depth + 1, depth + 1 + len(tokens))
        self.scores += scores
        values = accumulate(scores, initial=self.value(parent))
        next(values)
        self.values += values
        self._enter(first)

    def revalue(self) -> None:
        """After scores were changed in place."""
        scores, values = self.scores, self.values
        for node, above in enumerate(self.parents):
            values[node] = scores[node] + values[above] if above >= 0 else scores[node]

    def select(self, max_nodes: int, max_depth: int) -> TokenTree:
        """The best `max_nodes` nodes by value, no deeper than `max_depth`, as a tree of its own; connected
        by construction. Ties go to the node made earlier; the order is kept."""
        if len(self) <= max_nodes and (not self.depths or max(self.depths) <= max_depth):
            return self
        return self.of(sorted(self.best_below(ROOT, max_nodes, max_depth)))

    def of(self, kept: Sequence[int]) -> TokenTree:
        """The nodes `kept` below ROOT, ascending, each with its parent, as a tree."""
        if len(kept) == len(self.tokens):
            return self
        if self._children is None:
            return self.chain(self.tokens[: len(kept)], self.scores[: len(kept)])
        return self.subtree(kept)[0]

    def rerooted(self, root: int) -> tuple[TokenTree, dict[int, int]]:
        """What hangs below `root`, and where each of its nodes is now: the others are gone."""
        alive, kept = {root}, []
        for node in range(root + 1, len(self.tokens)):
            if self.parents[node] in alive:
                alive.add(node)
                kept.append(node)
        return self.subtree(kept, root)

    def subtree(self, kept: Sequence[int], root: int = ROOT) -> tuple[TokenTree, dict[int, int]]:
        """The nodes `kept` below `root`, ascending, each with its parent, as a tree; and where each is."""
        tree, place = TokenTree(), {root: ROOT}
        for node in kept:
            place[node] = tree.add(place[self.parents[node]], self.tokens[node], self.scores[node])
        del place[root]
        return tree, place

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
            below = self.child(node, token)
            if below is None:
                return path, tokens
            path.append(below)
            node = below
