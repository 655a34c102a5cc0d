"""Who takes part in the next target pass: continuous batching, chunked prefill, preemption by recompute."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from paceline.core.kv_ledger import KVLedger
from paceline.core.request import FinishReason, Phase, Request
from paceline.core.token_tree import TokenTree

MIN_CHUNK = 16
"""Prefill chunks below this many tokens (unless they end the prompt) cost a pass and gain little."""


@dataclass(frozen=True, slots=True)
class Limits:
    """max_num_seqs: requests running at once.  max_batch_tokens: tokens in one target pass, guesses
    included.  num_slots: tokens of KV in all.  context_length: tokens of one request, prompt and output.
    attention_window: positions that a token sees in any layer, its own included, 0 = all before it."""

    context_length: int
    num_slots: int
    max_num_seqs: int = 16
    max_batch_tokens: int = 512
    attention_window: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """One request's part of a pass: tokens `start .. start + length` and guesses, with their slots.

    The known tokens' slots are in `request.slots` already.
    """

    request: Request
    length: int
    tree: TokenTree
    tree_slots: list[int]


class Scheduler:
    """Tables: `waiting` (no slots, oldest first, preempted ones at the front) and `running` (a row and
    slots, oldest first). A request in neither is finished and owns nothing."""

    def __init__(self, limits: Limits, ledger: KVLedger) -> None:
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._ledger = ledger
        self._rows = list(range(limits.max_num_seqs - 1, -1, -1))

    # ------------------------------------------------------------ entering and leaving

    def enter(self, request: Request) -> None:
        self.waiting.append(request)

    def admit(self) -> None:
        """Moves waiting requests to running while a row is free and their known tokens fit.

        First come, first served: nobody overtakes the head of the queue, so nobody starves.
        """
        while self.waiting and self._rows and self._fits(self.waiting[0]):
            request = self.waiting.popleft()
            # The last token is always computed anew: its logits are wanted.
            self._ledger.open(request, request.tokens[:-1])
            request.num_computed = len(request.slots)
            if request.prefix_hit is None:
                request.prefix_hit = len(request.slots)
            request.row = self._rows.pop()
            request.num_mirrored, request.announced = 0, False
            request.phase = Phase.RUNNING
            self.running.append(request)

    def _fits(self, request: Request) -> bool:
        """Counts every token of the request as missing: a prefix hit only makes it better. When nothing
        runs the head always enters, since then no later moment would be better."""
        if not self.running:
            return True
        promised = sum(other.num_uncomputed for other in self.running)
        return self._ledger.num_available >= promised + len(request.tokens) + 1

    def leave(self, request: Request) -> None:
        """Takes a request off either table; what it computed stays in the prefix cache for others."""
        if request.phase is Phase.RUNNING:
            self.running.remove(request)
            # What led to an error, or was never seen to lead to a token, may be broken: NaN spreads.
            sound = request.ended is not FinishReason.ERROR and request.num_output > 0
            self._give_back(request, request.num_computed if sound else 0)
        elif request.phase is Phase.WAITING:
            self.waiting.remove(request)
        request.phase = Phase.FINISHED

    def preempt(self, request: Request) -> None:
        """Back to the front of the queue with prompt and output as known tokens; recomputed later."""
        self.running.remove(request)
        self._give_back(request, request.num_computed)
        request.phase = Phase.WAITING
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _give_back(self, request: Request, num_shared: int) -> None:
        self._ledger.close(request, request.tokens, num_shared)
        self._rows.append(request.row)
        request.row = -1
        request.num_computed = request.num_mirrored = 0
        request.proposal = None

    def share_prefix(self, request: Request, length: int) -> None:
        """Hands the first `length` computed tokens over to the prefix cache, for others to use."""
        held = request.num_cached_slots
        if self._ledger.share(request, request.tokens, length):
            request.num_mirrored = min(request.num_mirrored, held)

    def forget_unseen(self, request: Request) -> None:
        """Lets go of what lies behind the attention window of every token to come."""
        if self.limits.attention_window:
            self._ledger.forget(request, request.num_computed + 1 - self.limits.attention_window)

    # ------------------------------------------------------------ one pass

    def draft_room(self) -> dict[str, int]:
        """Most guesses each decoding request may have verified in the next pass.

        A request never drafts what could not be emitted: of the tokens left, the bonus takes one.
        """
        deciding = [request for request in self.running if request.decoding]
        prefilling = len(self.running) > len(deciding)
        spare = self.limits.max_batch_tokens - len(deciding)
        spare -= min(spare, self.limits.max_batch_tokens // 4) if prefilling else 0
        room = {}
        for index, request in enumerate(deciding):
            fair = spare // (len(deciding) - index)
            room[request.request_id] = max(0, min(fair, request.tokens_left(self.limits.context_length) - 1))
            spare -= room[request.request_id]
        return room

    def schedule(self) -> list[Share]:
        """The next pass: every decoding request first, then prefill with what is left of the budget.

        Slots of known tokens are added to `request.slots`. May preempt the youngest requests.
        """
        planned: dict[str, Share] = {}
        budget = self.limits.max_batch_tokens
        deciding = [request for request in self.running if request.decoding]
        for place, request in enumerate(deciding):
            if request.phase is not Phase.RUNNING:
                continue  # preempted for an older one in this very loop
            others = len(deciding) - place - 1
            share = self._share_of(request, 1, max(0, budget - others - 1), planned)
            if share is not None:
                planned[request.request_id] = share
                budget -= 1 + len(share.tree)
        self._schedule_prefill(budget, planned)
        return list(planned.values())

    def _schedule_prefill(self, budget: int, planned: dict[str, Share]) -> None:
        """The oldest prompt gets at least half of the budget, the younger ones share the rest: a long
        prompt is neither starved nor keeps short ones waiting."""
        prefilling = [request for request in self.running if not request.decoding]
        for place, request in enumerate(prefilling):
            if request.phase is not Phase.RUNNING or budget <= 0:
                continue
            younger = len(prefilling) - place - 1
            part = budget if younger == 0 else max(budget // 2, MIN_CHUNK)
            length = min(request.num_uncomputed, part, budget)
            share = self._share_of(request, length, 0, planned)
            if share is not None:
                planned[request.request_id] = share
                budget -= length

    def _share_of(
        self, request: Request, length: int, max_nodes: int, planned: dict[str, Share]
    ) -> Share | None:
        """Takes slots for `length` known tokens and as many guesses as fit; None when it must wait."""
        tree = request.guesses
        tree = tree.select(max_nodes, request.tokens_left(self.limits.context_length) - 1)
        missing = request.num_computed + length - len(request.slots)
        slots = self._ledger.take(missing + len(tree))
        if slots is None and len(tree):
            tree = tree.select(max(0, self._ledger.num_available - missing), len(tree))
            slots = self._ledger.take(missing + len(tree))
        while slots is None:
            victim = self._youngest_after(request, planned)
            if victim is None:
                break
            self.preempt(victim)
            slots = self._ledger.take(missing + len(tree))
        if slots is None:
            if not planned and self.running != [request]:
                self.preempt(request)
            return None
        request.slots.extend(slots[:missing])
        return Share(request, length, tree, slots[missing:])

    def _youngest_after(self, request: Request, planned: dict[str, Share]) -> Request | None:
        for other in reversed(self.running):
            if other is request:
                return None
            if other.request_id not in planned:
                return other
        return None
