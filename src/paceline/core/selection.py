"""What decides which drafters are asked in a step, and what of their guesses is verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from paceline.core.draft_cost import DraftCost
from paceline.core.ensemble import Merged
from paceline.core.request import Request
from paceline.core.token_tree import ROOT


@dataclass(slots=True, eq=False)
class Drafted:
    """One request of a step. num_tokens: known, the last of which is the root.  most: guesses that may be
    verified.  free: whether how many is ours to choose, and not the request's own wish.  floor:
    log-probability of being reached below which a guess is not worth a node.  asked: the drafters that were,
    in that order, with how deep their first choices were taken in at most.  whole: whether what one drafter
    says is verified as it is, so that nothing is weighed, and nothing learnt."""

    request: Request
    num_tokens: int
    most: int
    free: bool = True
    floor: float = -inf
    whole: bool = False
    merged: Merged = field(default_factory=Merged)
    asked: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ask:
    """sizes: most guesses, and most in a row, of each request that is asked for.  unread: tokens of all their
    texts that the drafter has not seen."""

    drafter: int
    sizes: list[tuple[Drafted, int]]
    unread: int = 0

    def teach(self, cost: DraftCost, seconds: float) -> None:
        """What it took."""
        sizes = [size for _, size in self.sizes]
        cost.learn(len(sizes), max(sizes), sum(sizes), self.unread, seconds)


class Selector(Protocol):
    """Decides for all requests that share a pass. In a step the methods are called in the order below."""

    def begin(self, step: Sequence[Drafted], drafters: Sequence[int]) -> None:
        """drafters: those there are."""
        ...

    def next_ask(self, step: Sequence[Drafted], drafters: Sequence[int]) -> Ask | None:
        """The next question; None = what there is now is verified."""
        ...

    def on_answer(self, ask: Ask, seconds: float) -> None: ...

    def kept(self, step: Sequence[Drafted]) -> list[list[int]]:
        """Of each request's nodes those to be verified, each with its parent."""
        ...

    def on_commit(self, each: Drafted, tokens: Sequence[int]) -> None:
        """tokens: committed below the root."""
        ...

    def on_end(self, request_id: str) -> None: ...

    def follows(self, drafter: int) -> bool:
        """Whether it is to read prompts while the target does, so that it can be asked at once."""
        ...


def best_nodes(each: Drafted) -> list[int]:
    """As many as may be verified, the best first: a parent comes before its children."""
    values = each.merged.tree.values
    if each.whole:
        return list(range(len(values)))
    return sorted(range(len(values)), key=values.__getitem__, reverse=True)[: each.most]


def accepted_of(each: Drafted, drafter: int, tokens: Sequence[int]) -> int:
    """How many of the committed tokens one drafter guessed, in a row from the root."""
    merged, above = each.merged, ROOT
    for count, token in enumerate(tokens):
        below = merged.tree.child(above, token)
        if below is None or not merged.proposers[below] >> drafter & 1:
            return count
        above = below
    return len(tokens)
