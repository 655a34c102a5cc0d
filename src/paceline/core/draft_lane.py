"""The core's side of the drafter: what it has been told, what is asked of it, what it answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.core.draft_cost import Costs, DraftCost
from paceline.core.draft_round import DraftRound
from paceline.core.drafting import DrafterNeeds, DraftLength
from paceline.core.ensemble import Ensemble
from paceline.core.followers import Followers
from paceline.core.hand_over import HandOver
from paceline.core.lookup import Lookup, LookupOdds
from paceline.core.mirror import MOST_NODES, DraftMirror
from paceline.core.planner import Planner
from paceline.core.request import Request
from paceline.core.scheduler import Scheduler, Share
from paceline.core.selection import Drafted
from paceline.core.selectors import SELECTORS
from paceline.core.stats import DrafterReport
from paceline.core.text_index import IndexedText
from paceline.core.token_tree import ROOT, TokenTree
from paceline.core.work import (
    AdvanceDrafts,
    DraftDone,
    DrafterJoined,
    DrafterLost,
    NodesDrafted,
    Work,
)

_AHEAD = 0
"""The drafter that works at the same time as the target."""


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """drafters: what each declares; none = nothing is guessed. At the same time as the target only the first
    of them works.  length: guesses verified per request and pass.
    lookup: shortest and longest n-gram by which a request's own text fills up what the drafter left open,
    None = it does not.  planned: whether `length` is a bound within which measured costs and acceptance
    decide, by the rule that `selector` names (`core.selectors`), or what is done."""

    drafters: tuple[DrafterNeeds, ...]
    length: DraftLength
    lookup: tuple[int, int] | None = None
    planned: bool = False
    selector: str = "combined"


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
    def __init__(self, policy: DraftPolicy, vocab_size: int, scheduler: Scheduler) -> None:
        self._policy = policy
        self._vocab_size = vocab_size
        self._scheduler = scheduler
        self._followers = Followers(policy.drafters)
        self._lookup_odds = LookupOdds()
        self._planner = Planner()
        drafters = range(len(policy.drafters))
        self._costs = Costs(self._planner.target, [DraftCost() for _ in drafters])
        self._ensemble = Ensemble(len(policy.drafters))
        self._selector = SELECTORS[policy.selector if policy.planned else "everyone"](
            self._followers, self._costs, self._ensemble.recent
        )
        self._round = DraftRound(self._followers, self._selector, self._ensemble, vocab_size)
        self._hand_over = HandOver()

    @property
    def learns_outputs(self) -> bool:
        """Whether a drafter wants to be told how requests ended."""
        return any(needs.learns_outputs for needs in self._policy.drafters)

    @property
    def busy(self) -> bool:
        """Whether guesses were asked for and have not come."""
        return self._round.busy

    @property
    def lost(self) -> str | None:
        """Why drafters are lost; None = all are there."""
        return self._followers.lost

    def report(self) -> tuple[DrafterReport, ...]:
        """Of each drafter; what is guessed at the same time as the target is not judged here."""
        rows = zip(self._policy.drafters, self._costs.drafts, self._ensemble.reliability, strict=True)
        return tuple(
            DrafterReport(needs.name, cost.count, cost.total_s, said.error, said.tenths)
            for needs, cost, said in rows
        )

    # ------------------------------------------------------------ events

    def on_done(self, event: DraftDone, requests: Mapping[str, Request]) -> None:
        self._round.on_done(event, requests)

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

    def on_lost(self, event: DrafterLost, requests: Iterable[Request]) -> None:
        """Decoding goes on with the drafters that are left, or without: same output."""
        self._followers.lose(event.drafter, event.reason, requests)
        self._round.on_lost(event.drafter)
        for request in requests:
            request.mirror = None
            self._hand_over.forget(request.request_id)

    def on_end(self, request_id: str) -> None:
        self._hand_over.forget(request_id)
        self._round.on_end(request_id)
        self._costs.pace.forget(request_id)
        if not any(request.decoding for request in self._scheduler.running):
            self._hand_over.on_idle()
            self._costs.pace.on_other(None)

    def on_joined(self, event: DrafterJoined) -> None:
        self._followers.join(event.drafter)

    def on_work_lost(self) -> None:
        self._round.give_up()

    def on_pass(self, requests: int, tokens: int, context: int, seconds: float, now: float) -> None:
        """A target pass over so many requests and tokens, none of them a prompt's, took so long. context:
        tokens that they look back on."""
        self._round.begin_verdicts(requests)
        if self._policy.planned:  # else nobody asks for costs
            target = self._costs.target
            target.learn(tokens, seconds, context)
            self._costs.pace.on_step(target.of(requests) if target.known else 0.0, seconds, now)

    def on_other_pass(self, now: float) -> None:
        """One that read prompts."""
        self._costs.pace.on_other(now)

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
        self._costs.pace.on_tokens(request.request_id, len(tokens))
        self._round.on_commit(request, tokens)
        self._hand_over.on_commit(len(tokens), now)
        if request.lookup is not None:
            request.lookup.judge(tokens, self._lookup_odds)
        if request.mirror is not None:
            landing = request.mirror.commit(tokens)
            if decoding:
                request.speculation.count_landing(landing)

    # ------------------------------------------------------------ in turn with the target

    def plan_round(self) -> list[Work]:
        """The next question to a drafter, for decoding requests that have no guesses yet."""
        if not self._round.open and self._followers.present:
            self._round.begin(self._to_be_drafted())
        return [*self._round.go_on()]

    def _to_be_drafted(self) -> list[Drafted]:
        room = self._scheduler.draft_room()
        batch_size = len(room)
        return [
            Drafted(request, len(request.tokens), most, self._chosen_here(request))
            for request in self._scheduler.running
            if request.decoding
            and request.proposal is None
            and (most := min(self._wanted(request, batch_size), room[request.request_id])) > 0
        ]

    def follow_prefill(self, shares: Iterable[Share]) -> list[Work]:
        """Keeps drafters that read prompts in step with those chunks of them that the target computes."""
        work: list[Work] = []
        batch_size = len(self._scheduler.running)
        chunks = [
            (share.request, share.request.num_computed + share.length)
            for share in shares
            if not share.request.decoding and self._wanted(share.request, batch_size) > 0
        ]
        for drafter in self._followers.present if chunks else ():
            if not self._followers.needs(drafter).ingests_prompts or not self._selector.follows(drafter):
                continue
            items = tuple(
                self._followers.item(drafter, request, upto)
                for request, upto in chunks
                if upto > self._followers.num_told(drafter, request) and self._fits(drafter, request)
            )
            if items:
                work.append(AdvanceDrafts(items, drafter))
        return work

    def _wanted(self, request: Request, batch_size: int) -> int:
        """Guesses to verify for `request` in a pass that so many requests share."""
        own = request.params.num_speculative_tokens
        return self._policy.length.wanted(batch_size) if own is None else min(own, MOST_NODES)

    def _fits(self, drafter: int, request: Request) -> bool:
        """Whether its context is not full."""
        room = self._followers.room(drafter, request)
        return room is None or room > 0

    # ------------------------------------------------------------ at the same time as the target

    def follow(self, now: float) -> list[Work]:
        """Tells a drafter that works ahead every token it has not seen; it goes on below the last."""
        if not self._followers.present:
            return []
        context = self._scheduler.limits.context_length
        batch_size = len(self._scheduler.running)
        items = []
        for request in self._scheduler.running:
            if self._followers.num_told(_AHEAD, request) == len(request.tokens):
                continue
            if request.mirror is not None and request.mirror.overdue:
                request.mirror.sweep()
            if self._wanted(request, batch_size) <= 0 or not self._fits(_AHEAD, request):
                continue
            # Below the last token of a prompt it may start before the target has read it.
            depth = min(max(request.tokens_left(context) - 1, 0), MOST_NODES)
            item = self._followers.item(_AHEAD, request, len(request.tokens), depth, depth)
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
