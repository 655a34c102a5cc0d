"""One step's guesses, in turn with the target: drafters are asked one after the other, what they answer
becomes one tree per request, and the best of it is verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.core.ensemble import Ensemble, Guesses
from paceline.core.followers import Followers
from paceline.core.mirror import check_guesses
from paceline.core.request import Phase, Request
from paceline.core.selection import Ask, Drafted, Selector
from paceline.core.token_tree import TokenTree
from paceline.core.work import DraftDone, DraftItem, GrowDrafts, Proposal


class DraftRound:
    """Goes from one question to the next, until what is verified is decided; then the guesses wait for the
    verdict, to be judged by it."""

    def __init__(self, followers: Followers, selector: Selector, ensemble: Ensemble, vocab_size: int) -> None:
        self._followers = followers
        self._selector = selector
        self._ensemble = ensemble
        self._vocab_size = vocab_size
        self._number = 0
        self._open: list[Drafted] | None = None
        self._drafted: dict[str, Drafted] = {}
        self._ask: Ask | None = None

    @property
    def busy(self) -> bool:
        """Whether an answer is waited for."""
        return self._ask is not None

    @property
    def open(self) -> bool:
        return self._open is not None

    def begin(self, step: list[Drafted]) -> None:
        if step:
            self._open = step
            self._selector.begin(step, self._followers.present)

    def go_on(self) -> list[GrowDrafts]:
        """The next question of the step, or its end: then every request has its proposal."""
        if self._open is None:
            return []
        step = self._open = [each for each in self._open if each.request.phase is Phase.RUNNING]
        self._ask = self._selector.next_ask(step, self._followers.present) if step else None
        if self._ask is not None:
            self._number += 1
            return [GrowDrafts(self._number, tuple(map(self._item, self._ask.sizes)), self._ask.drafter)]
        for each, nodes in zip(step, self._selector.kept(step), strict=True):
            tree = each.merged.tree
            each.request.proposal = tree if len(nodes) == len(tree) else tree.of(sorted(nodes))
            if not each.whole:
                self._drafted[each.request.request_id] = each
        self._open = None
        return []

    def _item(self, sized: tuple[Drafted, int]) -> DraftItem:
        each, size = sized
        assert self._ask is not None
        each.asked[self._ask.drafter] = size
        return self._followers.item(self._ask.drafter, each.request, each.num_tokens, size, size)

    # ------------------------------------------------------------ answers

    def on_done(self, event: DraftDone, requests: Mapping[str, Request]) -> None:
        if self._ask is None or event.round != self._number:
            return  # an answer to a round that was given up: dropped, never applied
        ask, self._ask = self._ask, None
        asked = {each.request.request_id: each for each, _ in ask.sizes}
        for proposal in event.proposals:
            each = asked.pop(proposal.request_id, None)
            # A request that ended meanwhile may have a successor of the same id: it was not asked for.
            if each is None or requests.get(proposal.request_id) is not each.request:
                continue
            if proposal.num_tokens == each.num_tokens:
                self._take(each, ask.drafter, proposal)
        self._selector.on_answer(ask, event.seconds)

    def _take(self, each: Drafted, drafter: int, proposal: Proposal) -> None:
        stats, size = each.request.speculation, each.asked[drafter]
        guesses = self._checked(proposal, size)
        if guesses is None:
            stats.num_failed_drafts += 1
            return
        stats.num_drafted_nodes += len(proposal.tokens)
        if each.whole:
            each.merged.tree = TokenTree.build(*guesses)
            return
        name = each.request.request_id
        cut = self._ensemble.take(each.merged, name, drafter, guesses, each.floor)
        if cut is not None:
            each.asked[drafter] = cut - 1

    def _checked(self, proposal: Proposal, size: int) -> Guesses | None:
        """The guesses within the bounds asked for; an invalid one costs only itself."""
        tokens, parents = proposal.tokens, proposal.parents
        scores = proposal.scores or (0.0,) * len(tokens)
        if proposal.error is not None:
            return None
        try:
            check_guesses(tokens, parents, scores, self._vocab_size)
            if len(tokens) <= size and parents == tuple(range(-1, len(tokens) - 1)):
                return tokens, parents, scores
            tree = TokenTree.build(tokens, parents, scores).select(size, size)
        except (ValueError, TypeError):
            return None
        return tree.tokens, tree.parents, tree.scores

    # ------------------------------------------------------------ the verdict

    def begin_verdicts(self, num_requests: int) -> None:
        self._ensemble.begin_step(num_requests)

    def on_commit(self, request: Request, tokens: Sequence[int]) -> None:
        """tokens: committed, the request's newest."""
        each = self._drafted.pop(request.request_id, None)
        if each is None or each.request is not request:
            return
        if each.num_tokens + len(tokens) == len(request.tokens):
            self._selector.on_commit(each, tokens)
            self._ensemble.judge(each.merged, request.request_id, tokens)

    def on_end(self, request_id: str) -> None:
        self._drafted.pop(request_id, None)
        self._ensemble.recent.forget(request_id)
        self._selector.on_end(request_id)

    def on_lost(self, drafter: int) -> None:
        if self._ask is not None and self._ask.drafter == drafter:
            self._ask = None

    def give_up(self) -> None:
        self._ask = self._open = None
