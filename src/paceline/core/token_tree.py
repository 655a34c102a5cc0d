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


class TokenTree:
    """Nodes are numbered in the order of their making, so a parent's index is below its child's.

    tokens, parents, depths, scores: one entry per node. A node's depth is 1 below the root. Its score is
    the estimated log-probability (at most 0) that the target takes it given its parent, and its value the
    sum of the scores on its path: never above its parent's, so best-first selection stays connected.
    """

    __slots__ = ("_below", "_children", "depths", "parents", "scores", "tokens", "values")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.scores: list[float] = []
        self.values: list[float] = []
        self._children: dict[tuple[int, int], int] = {}
        self._below: list[list[int]] = [[]]  # of the root first, then of each node

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
        self._below[parent + 1].append(node)
        self._below.append([])
        return node

    def child(self, parent: int, token: int) -> int | None:
        return self._children.get((parent, token))

    def children(self, node: int) -> list[int]:
        """Nodes directly below `node` (ROOT included), in the order of their making."""
        return self._below[node + 1]

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
        first, count = len(self.tokens), len(tokens)
        parents = [parent, *range(first, first + count - 1)]
        depth = self.depth(parent)
        self.tokens += tokens
        self.parents += parents
        self.depths += range(depth + 1, depth + count + 1)
        self.scores += scores
        self.values += list(accumulate(scores, initial=self.value(parent)))[1:]
        self._children.update(
            zip(zip(parents, tokens, strict=True), range(first, first + count), strict=True)
        )
        self._below[parent + 1].append(first)
        self._below += [[node] for node in range(first + 1, first + count)]
        self._below.append([])

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
        return self.subtree(sorted(self.best_below(ROOT, max_nodes, max_depth)))[0]

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
            below = self._children.get((node, token))
            if below is None:
                return path, tokens
            path.append(below)
            node = below
