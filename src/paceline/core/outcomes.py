"""Chains for the outcomes of a verification that is under way."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.growth import DraftTree, Uncalibrated
from paceline.core.token_tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class OutcomeCache(Uncalibrated):
    """Verifies a chain as long as asked for; meanwhile drafts a chain of `length` for each of the likeliest
    outcomes: some of it accepted, then one of the `fan_out` best other tokens (Saguaro, arXiv 2603.03251). A
    verdict among them finds its chain ready, any other is drafted for while the target waits."""

    length: int
    fan_out: int = 3

    def breadth(self, depth: int) -> int:  # noqa: ARG002
        return self.fan_out + 1

    def leaves(self, draft: DraftTree, max_depth: int, *, asked: bool = False) -> list[int]:
        length = max_depth if asked else self.length
        chain = _chain(draft.tree, ROOT, length)
        if len(chain) < length:
            tip = chain[-1] if chain else ROOT
            return [tip] if draft.open(tip, max_depth) else []
        if asked:
            return []  # outcomes can wait, the target does not
        tips = chain[-1:]  # what follows if all of it is accepted
        for above, on_chain in zip([ROOT, *chain], [*chain, ROOT], strict=True):
            for other in draft.tree.children(above)[: self.fan_out + 1]:
                if other != on_chain:
                    below = _chain(draft.tree, other, self.length)
                    if len(below) < self.length:
                        tips.append(below[-1] if below else other)
        return [tip for tip in tips if draft.open(tip, max_depth)]

    def answer(self, draft: DraftTree, max_nodes: int, max_depth: int) -> TokenTree:
        chain = _chain(draft.tree, ROOT, min(max_nodes, max_depth))
        return draft.tree.subtree(chain)[0]


def _chain(tree: TokenTree, node: int, length: int) -> list[int]:
    """The best child, its best child, and so on, `length` of them at most."""
    nodes: list[int] = []
    while len(nodes) < length and (below := tree.children(node)):
        node = below[0]
        nodes.append(node)
    return nodes
