"""How a draft grows that is recorded: one guess after the other, and what else might have come first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from paceline.core.growth import DraftTree, Uncalibrated
from paceline.core.token_tree import ROOT, TokenTree

_NEVER = -1e30
"""A finite log-probability that nothing has."""


@dataclass(frozen=True, slots=True)
class DenseChain(Uncalibrated):
    """The chain of `core.growth.Chain`, guess for guess, and beside the first guess its rivals. top: how many
    candidates the first place gets, the guess included.

    `answer` gives all of it: the first node below each node is the chain's.
    """

    straight = True
    floor = _NEVER
    top: int

    def breadth(self, depth: int) -> int:
        return self.top if depth == 0 else 1

    def score(self, confidence: float, rank: int, depth: int) -> float:
        """Only the first place has rivals, also where a pass gives as many candidates to each."""
        return confidence if rank == 0 or depth == 1 else -inf

    def leaves(self, draft: DraftTree, max_depth: int, *, asked: bool = False) -> list[int]:  # noqa: ARG002
        node = ROOT
        while node in draft.expanded:
            below = draft.tree.children(node)
            if not below:
                return []
            node = below[0]
        return [node] if draft.open(node, max_depth) else []

    def answer(self, draft: DraftTree, max_nodes: int, max_depth: int) -> TokenTree:  # noqa: ARG002
        return draft.tree


def chain_of(parents: Sequence[int]) -> list[int]:
    """The nodes of the chain, from below the root down."""
    nodes: list[int] = []
    for node, parent in enumerate(parents):
        if parent == (nodes[-1] if nodes else ROOT):
            nodes.append(node)
    return nodes
