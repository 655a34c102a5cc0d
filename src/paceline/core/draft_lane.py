"""The core's side of the drafter: what it has been told, what is asked of it, what it answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.core.drafting import DrafterNeeds, DraftLength
from paceline.core.hand_over import HandOver
from paceline.core.lookup import Lookup, LookupOdds
from paceline.core.mirror import MOST_NODES, DraftMirror, check_guesses
from paceline.core.planner import Planner
from paceline.core.request import Request
from paceline.core.scheduler import Scheduler, Share
from paceline.core.text_index import IndexedText
from paceline.core.token_tree import ROOT, TokenTree
from paceline.core.work import (
    AdvanceDrafts,
    Announcement,
    DraftDone,
    DraftItem,
    GrowDrafts,
    NodesDrafted,
    Proposal,
    Work,
)


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """drafter: what it declares, None = there is none.  length: guesses verified per request and pass.
    lookup: shortest and longest n-gram by which a request's own text fills up what the drafter left open,
    None = it does not.  planned: whether `length` is a bound within which measured costs and acceptance
    decide, or what is done."""

    drafter: DrafterNeeds | None
    length: DraftLength
    lookup: tuple[int, int] | None = None
    planned: bool = False


@dataclass(frozen=True, slots=True)
class _Offer:
    """nodes: below `root`, the best first, each after its parent."""

    tree: TokenTree
    root: int
    nodes: list[int]

    @property
    def values(self) -> list[float]:
        """Log-probabilities of being reached from the root."""
        base = self.tree.value(self.root)
        return [self.tree.values[node] - base for node in self.nodes]


class DraftLane:
    """Every request is either followed by the drafter or not announced to it (`num_drafter_tokens` is 0): not
    yet, or no longer, since a drafter that is lost forgets all. One that joins is told of each anew."""

    def __init__(self, policy: DraftPolicy, vocab_size: int, scheduler: Scheduler) -> None:
        self.lost: str | None = None
        self._policy = policy
        self._vocab_size = vocab_size
        self._scheduler = scheduler
        self._asked: dict[str, tuple[Request, DraftItem]] | None = None
        self._round = 0
        self._generation = 0
        self._lookup_odds = LookupOdds()
        self._planner = Planner()
        self._hand_over = HandOver()

    @property
    def busy(self) -> bool:
        """Whether a round of guesses was asked for and has not come."""
        return self._asked is not None

    @property
    def _drafter(self) -> DrafterNeeds | None:
        return self._policy.drafter if self.lost is None else None

    # ------------------------------------------------------------ events

    def on_done(self, event: DraftDone, requests: Mapping[str, Request]) -> None:
        if self._asked is None or event.round != self._round:
            return  # an answer to a round that was given up: dropped, never applied
        asked, self._asked = self._asked, None
        # A request that ended meanwhile may have a successor of the same id: it was not asked for.
        current = {name: pair for name, pair in asked.items() if requests.get(name) is pair[0]}
        for proposal in event.proposals:
            request, item = current.get(proposal.request_id, (None, None))
            if request is None or item is None or proposal.num_tokens != len(request.tokens):
                continue
            request.proposal = self._checked(request, item, proposal)
        for request, _ in current.values():
            if request.proposal is None:
                request.proposal = TokenTree()
        depths = (depth for request, _ in current.values() for depth in request.guesses.depths)
        deepest = max(depths, default=0)
        self._planner.on_draft(deepest, event.seconds)

    def _checked(self, request: Request, item: DraftItem, proposal: Proposal) -> TokenTree:
        """The proposal as a tree within the bounds asked for; an invalid one costs only its own guesses."""
        try:
            tokens, scores = proposal.tokens, proposal.scores or (0.0,) * len(proposal.tokens)
            check_guesses(tokens, proposal.parents, scores, self._vocab_size)
            tree = TokenTree.build(tokens, proposal.parents, scores) if proposal.error is None else None
        except (ValueError, TypeError):
            tree = None
        if tree is None:
            request.speculation.num_failed_drafts += 1
            return TokenTree()
        request.speculation.num_drafted_nodes += len(tree)
        return tree.select(item.max_nodes, item.max_depth)

    def on_nodes(self, event: NodesDrafted, requests: Mapping[str, Request], now: float) -> None:
        for nodes in event.grown:
            request = requests.get(nodes.request_id)
            mirror = request.mirror if request is not None else None
            if request is None or mirror is None or mirror.generation != nodes.generation:
                continue  # of a request that ended, or of the drafter's life before it was lost
            caught_up = nodes.num_tokens == len(request.tokens)
            self._hand_over.on_nodes(request.request_id, now, caught_up=caught_up)
            if mirror.crowded:  # and the target is busy, mostly
                mirror.sweep()
            try:
                mirror.extend(nodes, self._vocab_size)
            except (ValueError, TypeError):
                request.speculation.num_failed_drafts += 1
            else:
                request.speculation.num_drafted_nodes += len(nodes.tokens)

    def on_lost(self, reason: str, requests: Iterable[Request]) -> None:
        """Plain decoding from here on: same output, no guesses."""
        self.lost, self._asked = reason, None
        for request in requests:
            request.num_drafter_tokens, request.mirror = 0, None
            self._hand_over.forget(request.request_id)

    def on_end(self, request_id: str) -> None:
        self._hand_over.forget(request_id)
        if not any(request.decoding for request in self._scheduler.running):
            self._hand_over.on_idle()

    def on_joined(self) -> None:
        self.lost = None

    def on_work_lost(self) -> None:
        self._asked = None

    def on_pass(self, tokens: int, seconds: float) -> None:
        """A target pass over so many tokens, none of them a prompt's, took so long."""
        self._planner.target.learn(tokens, seconds)

    def on_commit(
        self,
        request: Request,
        tokens: tuple[int, ...],
        verified: int,
        accepted: int,
        now: float,
        *,
        decoding: bool,
    ) -> None:
        request.acceptance.count(verified, accepted)
        self._hand_over.on_commit(len(tokens), now)
        if request.lookup is not None:
            request.lookup.judge(tokens, self._lookup_odds)
        if request.mirror is not None:
            landing = request.mirror.commit(tokens)
            if decoding:
                request.speculation.count_landing(landing)

    # ------------------------------------------------------------ in turn with the target

    def plan_round(self) -> list[Work]:
        """Asks for guesses for every decoding request that has none."""
        if self._drafter is None:
            return []
        room = self._scheduler.draft_room()
        asked: dict[str, tuple[Request, DraftItem]] = {}
        for request in self._scheduler.running:
            if not request.decoding or request.proposal is not None:
                continue
            count = min(self._drafted(request, len(room)), room[request.request_id])
            if self._policy.planned and self._chosen_here(request):
                count = self._planner.length(request.acceptance, count, len(room))
            if count > 0:
                asked[request.request_id] = (request, self._item(request, count, count, len(request.tokens)))
        if not asked:
            return []
        self._round += 1
        self._asked = asked
        return [GrowDrafts(self._round, tuple(item for _, item in asked.values()))]

    def follow_prefill(self, shares: Iterable[Share]) -> list[Work]:
        """Keeps a drafter that reads prompts in step with those chunks of them that the target computes."""
        if self._drafter is None or not self._drafter.ingests_prompts:
            return []
        batch_size = len(self._scheduler.running)
        items = []
        for share in shares:
            request, upto = share.request, share.request.num_computed + share.length
            if request.decoding or upto <= request.num_drafter_tokens:
                continue
            if self._drafted(request, batch_size) > 0:
                items.append(self._item(request, 0, 0, upto))
        return [AdvanceDrafts(tuple(items))] if items else []

    def _wanted(self, request: Request, batch_size: int) -> int:
        """Guesses to verify for `request` in a pass that so many requests share."""
        own = request.params.num_speculative_tokens
        return self._policy.length.wanted(batch_size) if own is None else min(own, MOST_NODES)

    def _drafted(self, request: Request, batch_size: int) -> int:
        """How many of them the drafter can make; not above 0 where its context is full."""
        drafter, count = self._policy.drafter, self._wanted(request, batch_size)
        if drafter is not None and drafter.context_length is not None:
            count = min(count, drafter.context_length - len(request.tokens))
        return count

    def _item(self, request: Request, max_nodes: int, max_depth: int, upto: int) -> DraftItem:
        """What the drafter has not seen of the first `upto` tokens."""
        start, announcement = request.num_drafter_tokens, None
        if start == 0:
            self._generation += 1
            request.drafter_generation = self._generation
            announcement = Announcement(request.num_prompt, request.params)
        request.num_drafter_tokens = upto
        return DraftItem(
            request.request_id,
            start,
            tuple(request.tokens[start:upto]),
            max_nodes,
            max_depth,
            announcement,
            request.drafter_generation,
        )

    # ------------------------------------------------------------ at the same time as the target

    def follow(self, now: float) -> list[Work]:
        """Tells a drafter that works ahead every token it has not seen; it goes on below the last."""
        if self._drafter is None:
            return []
        context = self._scheduler.limits.context_length
        batch_size = len(self._scheduler.running)
        items = []
        for request in self._scheduler.running:
            if request.num_drafter_tokens == len(request.tokens):
                continue
            if request.mirror is not None and request.mirror.overdue:
                request.mirror.sweep()
            if self._drafted(request, batch_size) <= 0:
                continue
            # Below the last token of a prompt it may start before the target has read it.
            depth = min(max(request.tokens_left(context) - 1, 0), MOST_NODES)
            item = self._item(request, depth, depth, len(request.tokens))
            if depth > 0:  # else there is no answer to be waited for
                self._hand_over.on_follow(request.request_id, now)
            if item.announcement is not None:
                request.mirror = DraftMirror(item.generation, len(request.tokens))
                if (lookup := self._lookup(request)) is not None:
                    lookup.read(request.tokens)  # now, while the target is busy with the prompt
            items.append(item)
        return [AdvanceDrafts(tuple(items))] if items else []

    def propose(self, now: float) -> float:
        """Gives every decoding request the best nodes there are below its root, at this moment. Returns when
        the target should take them: `now`, or a moment until which better ones are worth waiting for."""
        room = self._scheduler.draft_room()
        deciding = [request for request in self._scheduler.running if request.decoding]
        offers = [self._offer(request, len(room), room[request.request_id]) for request in deciding]
        counts = [len(offer.nodes) for offer in offers]
        if self._policy.planned:
            worthwhile = self._planner.counts([offer.values for offer in offers])
            counts = [
                count if self._chosen_here(request) else asked
                for request, count, asked in zip(deciding, worthwhile, counts, strict=True)
            ]
        for request, offer, count in zip(deciding, offers, counts, strict=True):
            request.proposal = offer.tree.subtree(sorted(offer.nodes[:count]), offer.root)[0]
        if len(deciding) < len(self._scheduler.running) or self.lost is not None:
            return now
        return self._hand_over.at(deciding, now)

    def _chosen_here(self, request: Request) -> bool:
        """Whether how much is guessed is ours to choose, and not the request's own wish."""
        return request.params.num_speculative_tokens is None

    def _offer(self, request: Request, batch_size: int, room: int) -> _Offer:
        """What there is to verify for one request, from its drafter and from its own text."""
        count = min(self._wanted(request, batch_size), room)
        mirror, lookup = request.mirror, self._lookup(request)
        tree, root = (mirror.tree, mirror.root) if mirror is not None else (TokenTree(), ROOT)
        if lookup is not None:
            lookup.open.clear()  # of an offer that was not taken, since the target waited
        if count <= 0:
            self._hand_over.on_no_room(request.request_id)
            return _Offer(tree, root, [])
        if lookup is not None:
            lookup.read(request.tokens)
            best = tree.best_path(root, count)
            for path in [[], best] if best else [[]]:
                found = lookup.find(path, count)
                if found is not None:
                    score = self._lookup_odds.log_probability(found.matched)
                    before = len(tree)
                    tree.graft(root, path, found.tokens, score, MOST_NODES)
                    request.speculation.num_drafted_nodes += len(tree) - before
        return _Offer(tree, root, tree.best_below(root, count, count))

    def _lookup(self, request: Request) -> Lookup | None:
        if self._policy.lookup is not None and request.lookup is None:
            request.lookup = Lookup(IndexedText(*self._policy.lookup))
        return request.lookup
