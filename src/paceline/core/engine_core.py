"""The state machine that engine and simulator drive."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.draft_lane import DraftLane, DraftPolicy
from paceline.core.drafting import FixedLength
from paceline.core.kv_ledger import KVLedger
from paceline.core.placement import Placement, SerialPlacement
from paceline.core.request import FinishReason, Phase, Request
from paceline.core.scheduler import Limits, Scheduler, Share
from paceline.core.stats import SpeculationStats
from paceline.core.stopping import cut
from paceline.core.work import (
    Announcement,
    DraftDone,
    DrafterJoined,
    DrafterLost,
    Event,
    FinishedOutput,
    NodesDrafted,
    Release,
    RequestAborted,
    RequestArrived,
    RequestDelta,
    RunTarget,
    StepDone,
    TargetItem,
    TokenLogprobs,
    Verdict,
    WaitOver,
    Work,
    WorkLost,
)


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Everything the policy depends on, apart from the events."""

    limits: Limits
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    prefix_cache: bool = True
    drafting: DraftPolicy = field(default_factory=lambda: DraftPolicy((), FixedLength(0)))
    placement: Placement = field(default_factory=SerialPlacement)


class EngineCore:
    """`handle` takes one event and returns the work it makes possible; `take_outputs` what became final.

    The same events give the same work: there is no clock but `now` and no randomness. Work that names a
    request never outlives it: slots of a request in flight return to the pool only when its step is done.
    """

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.ledger = KVLedger(config.limits.num_slots, prefix_cache=config.prefix_cache)
        self.scheduler = Scheduler(config.limits, self.ledger)
        self.drafts = DraftLane(config.drafting, config.vocab_size, self.scheduler)
        self.requests: dict[str, Request] = {}
        self.speculation = SpeculationStats()
        self._outputs: list[RequestDelta] = []
        self._released: list[str] = []
        self._finished: list[FinishedOutput] = []
        self._shares: dict[str, Share] | None = None
        self._step = 0

    def handle(self, event: Event, now: float) -> list[Work]:
        match event:
            case StepDone():
                self._on_step_done(event, now)
            case NodesDrafted():
                self.drafts.on_nodes(event, self.requests, now)
            case DraftDone():
                self.drafts.on_done(event, self.requests)
            case RequestArrived():
                self._on_arrival(event, now)
            case RequestAborted():
                self._on_abort(event)
            case DrafterLost():
                self.drafts.on_lost(event, self.requests.values())
            case DrafterJoined():
                self.drafts.on_joined(event)
            case WorkLost():
                self._on_work_lost(event)
            case WaitOver():
                pass  # what it was waited for is looked at again below
        return self._next_work(now)

    def take_outputs(self) -> list[RequestDelta]:
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def idle(self) -> bool:
        return not self.requests

    @property
    def draft_busy(self) -> bool:
        return self.drafts.busy

    @property
    def target_busy(self) -> bool:
        return self._shares is not None

    # ------------------------------------------------------------ events

    def _on_arrival(self, event: RequestArrived, now: float) -> None:
        request = Request(event.request_id, list(event.prompt), len(event.prompt), event.params, now)
        problem = self._refusal(request)
        if problem:
            delta = RequestDelta(request.request_id, (), (), FinishReason.ERROR, problem, request.summary())
            self._emit(delta)
            return
        self.requests[request.request_id] = request
        self.scheduler.enter(request)

    def _refusal(self, request: Request) -> str | None:
        limits = self.config.limits
        if request.request_id in self.requests:
            return f"request id {request.request_id!r} is in use: choose another."
        if not request.tokens:
            return "the prompt is empty: give at least one token."
        if request.num_prompt >= limits.context_length:
            return (
                f"the prompt has {request.num_prompt} tokens and the context is {limits.context_length}, "
                "output included: shorten the prompt."
            )
        if request.num_prompt + 1 > limits.num_slots:
            return (
                f"the prompt has {request.num_prompt} tokens and the KV cache holds {limits.num_slots}: "
                "shorten the prompt or give the cache more slots."
            )
        return None

    def _on_abort(self, event: RequestAborted) -> None:
        request = self.requests.get(event.request_id)
        if request is not None:
            self._end(request, FinishReason.ABORT)

    def _on_work_lost(self, event: WorkLost) -> None:
        """Ends the running requests: nothing that the lost work may have left behind is relied on."""
        shares, self._shares = self._shares or {}, None
        self.drafts.on_work_lost()
        for share in shares.values():
            share.request.in_flight = False
            self.ledger.pool.release(share.tree_slots)
        for request in list(self.scheduler.running):
            if request.ended is None:
                self._end(request, FinishReason.ERROR, event.reason, engine_fault=True)
            else:
                self._drop(request)

    def _on_step_done(self, event: StepDone, now: float) -> None:
        if self._shares is None or event.step != self._step:
            return
        shares, self._shares = self._shares, None
        if all(share.request.decoding for share in shares.values()):
            size = sum(share.length + len(share.tree) for share in shares.values())
            context = sum(share.request.num_computed for share in shares.values())
            self.drafts.on_pass(len(shares), size, context, event.seconds, now)
        else:
            self.drafts.on_other_pass(now)
        verdicts = {verdict.request_id: verdict for verdict in event.verdicts}
        for request_id, share in shares.items():
            share.request.in_flight = False
            self._commit(share, verdicts.get(request_id), now)

    def _commit(self, share: Share, verdict: Verdict | None, now: float) -> None:
        request = share.request
        request.num_computed += share.length
        request.num_mirrored = request.num_computed
        request.proposal = None
        path = [share.tree_slots[node] for node in verdict.path] if verdict is not None else []
        self.ledger.pool.release(slot for slot in share.tree_slots if slot not in path)
        request.slots.extend(path)
        if request.ended is not None:  # aborted while in flight
            self._drop(request)
        elif verdict is None:
            if request.num_uncomputed == 0:
                self._end(request, FinishReason.ERROR, "the target gave no verdict", engine_fault=True)
        else:
            if verdict.tokens:
                self._accept(request, verdict, len(share.tree), now)
            if verdict.error is not None:
                self._end(request, FinishReason.ERROR, verdict.error)
        if request.ended is None:
            self.scheduler.forget_unseen(request)

    def _accept(self, request: Request, verdict: Verdict, num_draft: int, now: float) -> None:
        prefilled = request.num_output == 0
        kept, reason = cut(request, verdict, self.config.eos_token_ids, self.config.limits.context_length)
        request.tokens.extend(verdict.tokens[:kept])
        # KV of an accepted token cut off by a stop is nobody's: its slot leaves with the request.
        request.num_computed += min(len(verdict.path), kept)
        request.first_token_at = now if request.first_token_at is None else request.first_token_at
        request.last_token_at = now
        if not prefilled:
            request.speculation.count_step(num_draft, min(len(verdict.path), kept), kept)
        elif request.num_cached_slots < request.num_prompt:
            self.scheduler.share_prefix(request, min(request.num_prompt, request.num_computed))
        tokens, logprobs = verdict.tokens[:kept], verdict.logprobs[:kept]
        accepted = min(len(verdict.path), kept)
        self.drafts.on_commit(request, tokens, num_draft, accepted, now, decoding=not prefilled)
        if reason is None:
            self._emit(RequestDelta(request.request_id, tokens, logprobs))
        else:
            self._end(request, reason, tokens=tokens, logprobs=logprobs)

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        error: str | None = None,
        *,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        engine_fault: bool = False,
    ) -> None:
        if request.ended is not None:
            return
        request.ended = reason
        self._emit(
            RequestDelta(request.request_id, tokens, logprobs, reason, error, request.summary(), engine_fault)
        )
        if not request.in_flight:
            self._drop(request)

    def _drop(self, request: Request) -> None:
        self.scheduler.leave(request)
        self.speculation.add(request.speculation)
        del self.requests[request.request_id]
        self.drafts.on_end(request.request_id)
        self._released.append(request.request_id)
        if self.drafts.learns_outputs and request.ended in (FinishReason.STOP, FinishReason.LENGTH):
            self._finished.append(FinishedOutput(tuple(request.output), request.params.tenant))

    def _emit(self, delta: RequestDelta) -> None:
        self._outputs.append(delta)

    # ------------------------------------------------------------ work

    def _next_work(self, now: float) -> list[Work]:
        released = self._take_released()
        if not self.target_busy:
            self.scheduler.admit()
        work = self.config.placement.next_work(self, now)
        # Who ends for want of slots may have been followed a moment ago: the drafter hears it in this order.
        at = next((at for at, item in enumerate(work) if isinstance(item, RunTarget)), len(work))
        return [*released, *work[:at], *self._take_released(), *work[at:]]

    def _take_released(self) -> list[Work]:
        released, self._released = self._released, []
        finished, self._finished = self._finished, []
        return [Release(tuple(released), tuple(finished))] if released else []

    def plan_drafts(self) -> list[Work]:
        return self.drafts.plan_round()

    def follow_drafts(self, now: float) -> list[Work]:
        return self.drafts.follow(now)

    def propose(self, now: float) -> float:
        return self.drafts.propose(now)

    def plan_target(self, *, follow_prefill: bool) -> list[Work]:
        shares = self.scheduler.schedule() or self._without_the_stuck()
        if not shares:
            return []
        self._step += 1
        self._shares = {share.request.request_id: share for share in shares}
        follow = self.drafts.follow_prefill(shares) if follow_prefill else []
        for share in shares:
            share.request.in_flight = True
        return [RunTarget(self._step, tuple(map(self._target_item, shares))), *follow]

    def _without_the_stuck(self) -> list[Share]:
        """A request that runs alone and still finds no slot can never go on: only that one ends."""
        shares: list[Share] = []
        while self.scheduler.running and not shares:
            self._end(
                self.scheduler.running[0],
                FinishReason.ERROR,
                f"the KV cache holds {self.config.limits.num_slots} tokens and this request needs more: "
                "give the cache more slots or lower max_tokens.",
            )
            self.scheduler.admit()
            shares = self.scheduler.schedule()
        return shares

    def _target_item(self, share: Share) -> TargetItem:
        request = share.request
        end = request.num_computed + share.length
        announcement = None
        if not request.announced:
            announcement = Announcement(request.num_prompt, request.params, tuple(request.tokens))
            request.announced = True
        return TargetItem(
            request_id=request.request_id,
            row=request.row,
            start=request.num_computed,
            tokens=tuple(request.tokens[request.num_computed : end]),
            slots_from=request.num_mirrored,
            slots=tuple(request.slots[request.num_mirrored : end]),
            sample=end == len(request.tokens),
            tree_tokens=tuple(share.tree.tokens),
            tree_parents=tuple(share.tree.parents),
            tree_slots=tuple(share.tree_slots),
            announcement=announcement,
        )


__all__ = ["CoreConfig", "EngineCore", "Limits", "Phase"]
