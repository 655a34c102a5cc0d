"""How a draft tree grows: which leaves the next draft pass expands, and what a candidate is worth.

One pass of the draft model computes several leaves at once and gives each its likeliest next tokens. A rule
sees one request's tree; it decides nothing that could change the output.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from math import inf, log
from typing import Protocol

from paceline.core.acceptance import AcceptanceModel
from paceline.core.token_tree import ROOT, TokenTree


@dataclass(slots=True)
class DraftTree:
    """One request's tree on the drafter's side.

    expanded: nodes (and ROOT) that a draft pass has computed: their candidates are in the tree.  closed:
    leaves that can have none.  passes: since the root is where it is.  confidence, rank: of each node as the
    drafter gave it; `tree.scores` is what the rule made of them.
    """

    tree: TokenTree = field(default_factory=TokenTree)
    expanded: set[int] = field(default_factory=set)
    closed: set[int] = field(default_factory=set)
    confidence: list[float] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    passes: int = 0

    def open_leaves(self, max_depth: int) -> list[int]:
        """What can still be expanded so that its children are at most `max_depth` deep; ROOT first."""
        if ROOT not in self.expanded:
            return [ROOT] if self.open(ROOT, max_depth) else []
        done, closed = self.expanded, self.closed
        return [
            node
            for node, depth in enumerate(self.tree.depths)
            if depth < max_depth and node not in done and node not in closed
        ]

    def open(self, node: int, max_depth: int) -> bool:
        return self.tree.depth(node) < max_depth and node not in self.expanded and node not in self.closed

    def best(self, leaves: list[int], count: int) -> list[int]:
        return heapq.nsmallest(count, leaves, key=lambda leaf: (-self.tree.value(leaf), leaf))

    def add(self, parent: int, token: int, confidence: float, rank: int, score: float) -> int:
        node = self.tree.add(parent, token, score)
        if node == len(self.confidence):
            self.confidence.append(confidence)
            self.rank.append(rank)
        return node

    def rerooted(self, root: int) -> tuple[DraftTree, dict[int, int]]:
        """What hangs below `root`, and where each of its nodes (and `root` itself) is now."""
        tree, place = self.tree.rerooted(root)
        place[root] = ROOT
        kept = sorted(place.items(), key=lambda pair: pair[1])[1:]
        return (
            DraftTree(
                tree,
                {place[node] for node in self.expanded if node in place},
                {place[node] for node in self.closed if node in place},
                [self.confidence[node] for node, _ in kept],
                [self.rank[node] for node, _ in kept],
            ),
            place,
        )


class GrowthRule(Protocol):
    @property
    def straight(self) -> bool:
        """Whether it goes on below the one candidate of the pass before, as far as it is let."""
        ...

    @property
    def floor(self) -> float:
        """Log-probability of being reached below which a candidate gets no node, but for a leaf's first."""
        ...

    def breadth(self, depth: int) -> int:
        """How many children a node at `depth` gets when it is expanded; 0 = the root."""
        ...

    def score(self, confidence: float, rank: int, depth: int) -> float:
        """A node's estimated log-probability given its parent, at most 0."""
        ...

    def leaves(self, draft: DraftTree, max_depth: int, *, asked: bool = False) -> list[int]:
        """What the next pass expands, the best first; empty when the rule has grown all it wants.

        asked: whether the target waits for the answer, of `max_depth`; else the rule's own depth bounds it.
        """
        ...

    def answer(self, draft: DraftTree, max_nodes: int, max_depth: int) -> TokenTree:
        """What of the tree is to be verified."""
        ...

    def learn(self, draft: DraftTree, parent: int, token: int) -> None:
        """The target chose `token` after `parent`, whose candidates are in the tree."""
        ...


class BestNodes:
    """Verifies the nodes of largest value."""

    __slots__ = ()
    straight = False

    def answer(self, draft: DraftTree, max_nodes: int, max_depth: int) -> TokenTree:
        return draft.tree.select(max_nodes, max_depth)


class Uncalibrated(BestNodes):
    """Takes the drafter at its word, and every candidate."""

    __slots__ = ()
    floor = -inf

    def score(self, confidence: float, rank: int, depth: int) -> float:  # noqa: ARG002
        return confidence

    def learn(self, draft: DraftTree, parent: int, token: int) -> None:
        """Nothing to learn."""


@dataclass(frozen=True, slots=True)
class Chain(Uncalibrated):
    """One guess after the other. depth: how far, while nobody asks."""

    straight = True
    depth: int

    def breadth(self, depth: int) -> int:  # noqa: ARG002
        return 1

    def leaves(self, draft: DraftTree, max_depth: int, *, asked: bool = False) -> list[int]:
        return draft.open_leaves(max_depth if asked else min(max_depth, self.depth))[-1:]


@dataclass(frozen=True, slots=True)
class FixedShape(Uncalibrated):
    """The same tree for every root without guesses: every node at depth i has the `widths[i]` likeliest
    children. Below a root that was one of its nodes what hung there stays, which is a part of the shape, and
    is grown to the full depth."""

    widths: tuple[int, ...]

    def breadth(self, depth: int) -> int:
        return self.widths[depth] if depth < len(self.widths) else 0

    def leaves(self, draft: DraftTree, max_depth: int, *, asked: bool = False) -> list[int]:  # noqa: ARG002
        leaves = draft.open_leaves(min(max_depth, len(self.widths)))
        shallowest = min((draft.tree.depth(leaf) for leaf in leaves), default=0)
        return [leaf for leaf in leaves if draft.tree.depth(leaf) == shallowest]


@dataclass(frozen=True, slots=True)
class BestFirst(Uncalibrated):
    """The `width` leaves of largest cumulative log-probability, `passes` times (SwiftSpec, section 3.1;
    SpecExec, arXiv 2406.02532). passes: 0 = without end."""

    width: int
    passes: int = 0
    candidates: int = 8

    def breadth(self, depth: int) -> int:  # noqa: ARG002
        return self.candidates

    def leaves(self, draft: DraftTree, max_depth: int, *, asked: bool = False) -> list[int]:  # noqa: ARG002
        if self.passes and draft.passes >= self.passes:
            return []
        return draft.best(draft.open_leaves(max_depth), self.width)


@dataclass(frozen=True, slots=True)
class Layers(Uncalibrated):
    """Level by level, the `width` best nodes of the newest one, `passes` times; what is verified is chosen
    from all of them afterwards (EAGLE-2, arXiv 2406.16858). depth: how far, while nobody asks.  passes: 0 =
    without end."""

    width: int
    depth: int
    passes: int = 0
    candidates: int = 8

    def breadth(self, depth: int) -> int:  # noqa: ARG002
        return self.candidates

    def leaves(self, draft: DraftTree, max_depth: int, *, asked: bool = False) -> list[int]:
        if self.passes and draft.passes >= self.passes:
            return []
        leaves = draft.open_leaves(max_depth if asked else min(max_depth, self.depth))
        newest = max((draft.tree.depth(node) for node in draft.expanded), default=-1) + 1
        return draft.best([leaf for leaf in leaves if draft.tree.depth(leaf) == newest], self.width)


@dataclass(frozen=True, slots=True)
class Calibrated(BestNodes):
    """Best first by the probability that the target accepts, as learnt from what it accepted so far. What is
    less likely to be reached than `floor` says is not expanded."""

    width: int
    passes: int = 0
    floor: float = log(0.004)
    candidates: int = 8
    model: AcceptanceModel = field(default_factory=AcceptanceModel)

    def breadth(self, depth: int) -> int:  # noqa: ARG002
        return self.candidates

    def score(self, confidence: float, rank: int, depth: int) -> float:
        return self.model.log_probability(confidence, rank, depth)

    def leaves(self, draft: DraftTree, max_depth: int, *, asked: bool = False) -> list[int]:  # noqa: ARG002
        if self.passes and draft.passes >= self.passes:
            return []
        best = draft.best(draft.open_leaves(max_depth), self.width)
        return [leaf for leaf in best if draft.tree.value(leaf) > self.floor]

    def learn(self, draft: DraftTree, parent: int, token: int) -> None:
        tree = draft.tree
        for node in tree.children(parent):
            self.model.learn(
                draft.confidence[node],
                draft.rank[node],
                tree.depths[node],
                accepted=tree.tokens[node] == token,
            )
