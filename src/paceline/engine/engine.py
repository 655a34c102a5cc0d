"""The loop around the core: real events in, work out."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from paceline.core.engine_core import EngineCore
from paceline.core.params import SamplingParams
from paceline.core.stats import SpeculationStats
from paceline.core.work import (
    Event,
    RequestAborted,
    RequestArrived,
    RequestDelta,
    RequestSummary,
    StepDone,
    TokenLogprobs,
    Verdict,
    Work,
    WorkLost,
)
from paceline.engine.draft_group import DraftGroupStats
from paceline.engine.executor import Executor
from paceline.engine.lanes import LaneRecord, priced
from paceline.engine.outputs import Chunk, LaneStats, ModelMemory, RequestOutput, Timing, Usage
from paceline.engine.replay import EventLog
from paceline.engine.text import TextOutput
from paceline.engine.timeline import Timeline
from paceline.execution.interrupts import uninterrupted
from paceline.loading.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class About:
    """What every output of an engine carries. mode, placement: see `LaneStats`.
    drafters: those whose memory is known.  target: its memory."""

    model: str
    drafter: str
    load_s: float
    mode: str = ""
    placement: str = ""
    drafters: tuple[ModelMemory, ...] = ()
    target: ModelMemory = field(default_factory=ModelMemory)


@dataclass(slots=True)
class OpenRequest:
    """What the engine, as opposed to the core, knows of a request."""

    request_id: str
    index: int
    prompt: list[int]
    params: SamplingParams
    text: TextOutput
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Engine:
    """`step` waits for one thing to happen and returns what became certain, by request id."""

    def __init__(
        self,
        core: EngineCore,
        executor: Executor,
        tokenizer: Tokenizer,
        about: About,
        log: EventLog | None = None,
        group: DraftGroupStats | None = None,
    ) -> None:
        """group: of a drafter in a process of its own."""
        self.core = core
        self.about = about
        self._lanes = LaneRecord(about.mode, about.placement, group)
        self._executor = executor
        self._tokenizer = tokenizer
        self._log = log
        self._requests: dict[str, OpenRequest] = {}
        self._ready: list[tuple[str, Chunk]] = []

    @property
    def idle(self) -> bool:
        return self._executor.idle and not self._ready

    @property
    def executor(self) -> Executor:
        """For those who measure it, between requests."""
        return self._executor

    @property
    def timeline(self) -> Timeline:
        return self._lanes.timeline

    @property
    def lanes(self) -> LaneStats:
        """As of this moment."""
        lanes = replace(
            self._lanes.stats(),
            draft_advance_s=self._executor.advance_s,
            target_memory=self.about.target,
        )
        return replace(lanes, drafters=priced(self.core.drafts.report(), lanes, self.about.drafters))

    @property
    def speculation(self) -> SpeculationStats:
        """Of all requests so far, those that still run included: a copy."""
        total = SpeculationStats()
        total.add(self.core.speculation)
        for request in list(self.core.requests.values()):
            total.add(request.speculation)
        return total

    def add(self, request_id: str, index: int, prompt: Sequence[int], params: SamplingParams) -> None:
        text = TextOutput(self._tokenizer, params)
        with uninterrupted():
            self._requests[request_id] = OpenRequest(request_id, index, list(prompt), params, text)
            self._feed(RequestArrived(request_id, tuple(prompt), params))

    def abort(self, request_id: str) -> None:
        with uninterrupted():
            self._feed(RequestAborted(request_id))

    def step(self) -> list[tuple[str, Chunk]]:
        """Ctrl-C ends the wait, or the pass that this thread itself is in, and is raised once the core knows
        of all that happened: the engine stays usable, and what became certain comes with the next step."""
        with uninterrupted():
            self._turn()
        ready, self._ready = self._ready, []
        return ready

    def _turn(self) -> None:
        try:
            event = self._executor.poll()
            if isinstance(event, StepDone):
                event = self._with_stops(event)
        except Exception as error:
            logger.exception("a step failed; the requests that were running end with an error")
            event = self._lose(error)
        except BaseException as error:
            self._feed(self._lose(error))
            raise
        if event is not None:
            self._feed(event)

    def _lose(self, error: BaseException) -> WorkLost:
        """The requests that run end with what is queued for them; later ones are served."""
        self._executor.forget_queued()
        return WorkLost(f"a step failed: {type(error).__name__}: {error}")

    def _feed(self, event: Event) -> None:
        now = time.perf_counter()
        work = self.core.handle(event, now)
        for item in work:
            self._executor.submit(item)
        self._lanes.note(now, event, work, idle=self.core.idle)
        for delta in self.core.take_outputs():
            if delta.finish_reason is not None:
                self._lanes.note_end(now, delta)
            self._ready.append(self._chunk(delta))
        self._record(now, event, work)

    def _record(self, now: float, event: Event, work: list[Work]) -> None:
        """A log that can no longer be written is given up; the requests go on."""
        if self._log is None:
            return
        try:
            self._log.append(now, event, work)
        except OSError as error:
            logger.warning("the event log ends here, it cannot be written: %s", error.strerror)
            with suppress(OSError):
                self._log.close()
            self._log = None

    def close(self) -> None:
        try:
            self._executor.close()
        finally:
            self._close_log()

    def _close_log(self) -> None:
        log, self._log = self._log, None
        if log is not None:
            try:
                log.close()
            except OSError as error:
                logger.warning("the event log is incomplete, it cannot be written: %s", error.strerror)

    def _with_stops(self, event: StepDone) -> StepDone:
        """The core reads no text: where a stop string ends is written into the event, so a recorded log
        replays without a tokenizer."""
        verdicts = tuple(self._with_stop(verdict) for verdict in event.verdicts)
        return replace(event, verdicts=verdicts)

    def _with_stop(self, verdict: Verdict) -> Verdict:
        request = self._requests.get(verdict.request_id)
        stop = request.text.find_stop(verdict.tokens) if request is not None else None
        return verdict if stop is None else replace(verdict, stop_at=stop.num_tokens)

    def _chunk(self, delta: RequestDelta) -> tuple[str, Chunk]:
        request = self._requests[delta.request_id]
        request.tokens.extend(delta.tokens)
        request.logprobs.extend(delta.logprobs)
        text = request.text.push(delta.tokens, delta.finish_reason)
        output = None
        if delta.finish_reason is not None:
            del self._requests[delta.request_id]
            output = self._output(request, delta)
        return delta.request_id, Chunk(text, list(delta.tokens), output)

    def _output(self, request: OpenRequest, delta: RequestDelta) -> RequestOutput:
        assert delta.finish_reason is not None
        assert delta.summary is not None
        return RequestOutput(
            request_id=request.request_id,
            index=request.index,
            prompt_token_ids=request.prompt,
            text=request.text.text,
            token_ids=request.tokens,
            finish_reason=str(delta.finish_reason),
            error=delta.error,
            engine_fault=delta.engine_fault,
            usage=Usage(len(request.prompt), len(request.tokens), delta.summary.num_cached_tokens),
            timing=self._timing(delta.summary, len(request.tokens)),
            drafter=self.about.drafter,
            speculation=delta.summary.speculation,
            model=self.about.model,
            seed=request.params.seed,
            logprobs=request.logprobs if request.params.logprobs is not None else None,
        )

    def _timing(self, summary: RequestSummary, num_tokens: int) -> Timing:
        decode, after_first = summary.decode_s, num_tokens - 1
        tpot = decode / after_first if decode is not None and after_first > 0 else None
        return Timing(self.about.load_s, summary.ttft_s, decode, tpot)
