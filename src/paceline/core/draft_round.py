"""One round of guesses, in turn with the target: drafters are asked one after the other, what they answer is
merged into one tree per request, and the best of it is verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.followers import Followers
from paceline.core.mirror import check_guesses
from paceline.core.request import Phase, Request
from paceline.core.token_tree import TokenTree
from paceline.core.work import DraftDone, DraftItem, GrowDrafts, Proposal


@dataclass(slots=True, eq=False)
class Drafted:
    """One request of a round. most: guesses that may be verified.  free: whether how many is ours to choose,
    and not the request's own wish.  tree: the guesses of all drafters that answered.  asked: those that were
    asked, with how many guesses in a row at most."""

    request: Request
    most: int
    free: bool = True
    tree: TokenTree = field(default_factory=TokenTree)
    asked: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ask:
    """sizes: most guesses (and in a row) of each request that is asked for."""

    drafter: int
    sizes: list[tuple[Drafted, int]]


class Selector(Protocol):
    """Decides, for all requests that share a pass, which drafter is asked for which, and what is verified."""

    def next_ask(self, round: list[Drafted], drafters: list[int]) -> Ask | None:
        """The next question; None = what there is now is verified. drafters: those there are."""
        ...

    def on_draft(self, round: list[Drafted], drafter: int, seconds: float) -> None:
        """The answer to a question has been taken in, which took so long."""
        ...

    def kept(self, round: list[Drafted]) -> list[list[int]]:
        """Of each request's tree the nodes to verify, ascending, each with its parent."""
        ...


class DraftRound:
    def __init__(self, followers: Followers, selector: Selector, vocab_size: int) -> None:
        self._followers = followers
        self._selector = selector
        self._vocab_size = vocab_size
        self._number = 0
        self._open: list[Drafted] | None = None
        self._asked: dict[str, tuple[Drafted, DraftItem]] | None = None
        self._drafter = 0

    @property
    def busy(self) -> bool:
        """Whether an answer is waited for."""
        return self._asked is not None

    @property
    def open(self) -> bool:
        return self._open is not None

    def begin(self, round: list[Drafted]) -> None:
        self._open = round

    def go_on(self) -> list[GrowDrafts]:
        """The next question of the round, or its end: then every request has its proposal."""
        if self._open is None:
            return []
        self._open = [each for each in self._open if each.request.phase is Phase.RUNNING]
        ask = self._selector.next_ask(self._open, self._followers.present) if self._open else None
        if ask is not None:
            self._number += 1
            self._drafter, self._asked = ask.drafter, {}
            for each, size in ask.sizes:
                each.asked[ask.drafter] = size
                request = each.request
                item = self._followers.item(ask.drafter, request, len(request.tokens), size, size)
                self._asked[request.request_id] = (each, item)
            return [GrowDrafts(self._number, tuple(item for _, item in self._asked.values()), ask.drafter)]
        for each, nodes in zip(self._open, self._selector.kept(self._open), strict=True):
            whole = len(nodes) == len(each.tree)
            each.request.proposal = each.tree if whole else each.tree.subtree(nodes)[0]
        self._open = None
        return []

    def on_done(self, event: DraftDone, requests: Mapping[str, Request]) -> None:
        if self._asked is None or event.round != self._number:
            return  # an answer to a round that was given up: dropped, never applied
        asked, self._asked = self._asked, None
        for proposal in event.proposals:
            each, item = asked.get(proposal.request_id, (None, None))
            # A request that ended meanwhile may have a successor of the same id: it was not asked for.
            if each is None or item is None or requests.get(proposal.request_id) is not each.request:
                continue
            if proposal.num_tokens == len(each.request.tokens):
                self._take(each, item, proposal)
        self._selector.on_draft([each for each, _ in asked.values()], event.drafter, event.seconds)

    def _take(self, each: Drafted, item: DraftItem, proposal: Proposal) -> None:
        """The proposal within the bounds asked for; an invalid one costs only its own guesses."""
        stats = each.request.speculation
        try:
            tokens, scores = proposal.tokens, proposal.scores or (0.0,) * len(proposal.tokens)
            check_guesses(tokens, proposal.parents, scores, self._vocab_size)
            tree = TokenTree.build(tokens, proposal.parents, scores) if proposal.error is None else None
        except (ValueError, TypeError):
            tree = None
        if tree is None:
            stats.num_failed_drafts += 1
            return
        stats.num_drafted_nodes += len(tree)
        tree = tree.select(item.max_nodes, item.max_depth)
        if len(each.tree):
            each.tree.merge(tree)
        else:
            each.tree = tree

    def on_lost(self, drafter: int) -> None:
        if drafter == self._drafter:
            self._asked = None

    def give_up(self) -> None:
        self._asked = self._open = None
