"""Discrete events around the engine's own core: what is simulated is time and the models, never the policy.

The target answers with `TokenTree.walk` over recorded output, drafters guess for real or from a record, and
each takes what the costs say. A step in turn takes

    questions to drafters + pass of the target + overhead

where the overhead lies between the end of the pass and the moment at which its tokens are out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.params import SamplingParams
from paceline.core.stats import DrafterReport, SpeculationStats
from paceline.core.work import (
    AdvanceDrafts,
    Event,
    GrowDrafts,
    Release,
    RequestArrived,
    RequestDelta,
    RunTarget,
    WaitOver,
    WaitUntil,
    Work,
)
from paceline.drafters.service import AheadMode
from paceline.errors import ConfigError, PacelineError
from paceline.sim.costs.model import CostModel
from paceline.sim.metrics import RequestTimes
from paceline.sim.run.drafters import SimDrafter
from paceline.sim.run.lanes import Agenda, Lane, SharedDevice
from paceline.sim.run.places import Apart, InTurn, Rounds
from paceline.sim.run.requests import SimRequest
from paceline.sim.run.target import SimTarget


@dataclass(frozen=True, slots=True)
class Lanes:
    """Where target and drafter run. separate: each has a lane of its own, as with a draft worker; else they
    work in turn on one.  ahead, ahead_passes: as of `drafters.service.DraftService`.
    shares: speeds of target and drafter while both are busy, where they share a device, 1 = as if alone."""

    separate: bool = False
    ahead: AheadMode = "off"
    ahead_passes: int = 0
    shares: tuple[float, float] | None = None


@dataclass(slots=True)
class Outcome:
    """What became of one request. times: as a client sees it.  error: why it ended early; None = it wrote
    its whole output."""

    request_id: str
    prompt_tokens: int
    times: RequestTimes
    speculation: SpeculationStats
    cached_tokens: int = 0
    preemptions: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a run. verify, draft: in passes of the target, in work of the drafters.  overhead: between
    passes.  duration: from the first arrival to the last token.  idle: in which there was no request."""

    duration: float
    verify: float
    draft: float
    overhead: float
    idle: float


@dataclass(frozen=True, slots=True)
class SimResult:
    """requests: in the order of their ends.  speculation: of all of them; hits, leaf hits and misses are
    those of the core's mirror, or of the drafter's tree where it keeps what it grew until it is asked."""

    requests: tuple[Outcome, ...]
    speculation: SpeculationStats
    spent: Spent
    rounds: Rounds
    target_passes: int
    questions: int
    drafters: tuple[DrafterReport, ...] = ()
    events: int = 0

    @property
    def finished(self) -> list[RequestTimes]:
        return [each.times for each in self.requests if each.error is None]

    @property
    def output_tokens(self) -> int:
        return sum(each.times.tokens or 0 for each in self.requests)

    @property
    def output_rate(self) -> float:
        """Tokens per second."""
        return self.output_tokens / self.spent.duration if self.spent.duration > 0 else 0.0

    @property
    def preemptions(self) -> int:
        return sum(each.preemptions for each in self.requests)


def simulate(
    config: CoreConfig,
    requests: Iterable[SimRequest],
    costs: CostModel,
    drafters: Sequence[SimDrafter] = (),
    *,
    lanes: Lanes | None = None,
    concurrency: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    observe: Callable[[float, Event, list[Work]], None] | None = None,
) -> SimResult:
    """requests: by their arrival.  drafters: in the order of the policy's, whose needs must be theirs.
    concurrency: at most so many are in the engine, a further one comes when one ends; None = all that arrive.
    progress: told after each request how many ended, and tokens in all.  observe: everything the core is
    told and asks for, as an event log has it.

    Raises ConfigError for an empty workload and PacelineError where an output is not the recorded one.
    """
    return _Run(
        config, iter(requests), costs, drafters, lanes or Lanes(), concurrency, progress, observe
    ).run()


@dataclass(slots=True)
class _Open:
    request: SimRequest
    arrived_s: float
    tokens: int = 0
    right: bool = True
    chunk_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)


class _Run:
    def __init__(
        self,
        config: CoreConfig,
        requests: Iterable[SimRequest],
        costs: CostModel,
        drafters: Sequence[SimDrafter],
        lanes: Lanes,
        concurrency: int | None,
        progress: Callable[[int, int], None] | None,
        observe: Callable[[float, Event, list[Work]], None] | None,
    ) -> None:
        if concurrency is not None and concurrency < 1:
            raise ConfigError(f"the concurrency is {concurrency}: give a whole number from 1.")
        if tuple(drafter.needs for drafter in drafters) != config.drafting.drafters:
            raise ConfigError("the drafters are not those of the policy: give each one's needs, in order.")
        self._core = EngineCore(config)
        self._agenda = Agenda()
        self._requests = iter(requests)
        self._drafters = drafters
        self._concurrency = concurrency
        self._progress = progress
        self._observe = observe
        self._open: dict[str, _Open] = {}
        self._outcomes: list[Outcome] = []
        self._tokens = self._events = self._due = 0
        self._first_s: float | None = None
        self._idle_since: float | None = None
        self._idle_s = 0.0
        self._wait = 0
        self._target = SimTarget(costs)
        target_lane, draft_lane = _made(lanes, self._agenda)
        self._place: InTurn | Apart
        if lanes.separate:
            self._place = Apart(
                self._agenda, self._target, target_lane, draft_lane, drafters, costs, self._feed
            )
            self._place.work_ahead(lanes.ahead, lanes.ahead_passes)
        else:
            self._place = InTurn(self._agenda, self._target, target_lane, drafters, costs, self._feed)

    def run(self) -> SimResult:
        self._next_arrival()
        if self._first_s is None:
            raise ConfigError("the workload is empty: give at least one request to simulate.")
        while self._agenda.step():
            pass
        if self._open:
            raise PacelineError(f"the simulation came to a stop with {len(self._open)} requests unfinished.")
        return self._result()

    # ------------------------------------------------------------ requests

    def _next_arrival(self) -> None:
        """Enters what comes next; of those held back, one for each that ended."""
        while (
            self._due == 0 if self._concurrency is None else len(self._open) + self._due < self._concurrency
        ):
            request = next(self._requests, None)
            if request is None:
                return
            if not request.output:
                raise ConfigError(f"request {request.request_id!r} has no output: leave it out.")
            moment = max(request.arrival_s, self._agenda.now)
            self._first_s = moment if self._first_s is None else self._first_s
            self._due += 1
            self._agenda.at(moment, partial(self._arrive, request))

    def _arrive(self, request: SimRequest) -> None:
        self._due -= 1
        if self._concurrency is None:
            self._next_arrival()
        now = self._agenda.now
        if self._idle_since is not None:
            self._idle_s += now - self._idle_since
            self._idle_since = None
        self._open[request.request_id] = _Open(request, now)
        self._target.arrives(request)
        for drafter in self._drafters:
            drafter.arrives(request)
        params = request.params or _params(len(request.output))
        self._feed(RequestArrived(request.request_id, tuple(request.prompt), params))

    # ------------------------------------------------------------ the core

    def _feed(self, event: Event) -> None:
        self._events += 1
        work = self._core.handle(event, self._agenda.now)
        if self._observe is not None:
            self._observe(self._agenda.now, event, work)
        for item in work:
            self._submit(item)
        ended = [delta for delta in self._core.take_outputs() if self._note(delta)]
        if ended and self._concurrency is not None:
            self._next_arrival()

    def _submit(self, work: Work) -> None:
        match work:
            case RunTarget():
                self._place.verify(work)
            case GrowDrafts() | AdvanceDrafts():
                self._place.draft(work)
            case Release():
                self._place.release(work)
            case WaitUntil():
                self._wait += 1
                number = self._wait
                self._agenda.at(work.at, lambda: self._feed(WaitOver()) if number == self._wait else None)

    def _note(self, delta: RequestDelta) -> bool:
        """Whether the request ended with it."""
        open_, now = self._open[delta.request_id], self._agenda.now
        if delta.tokens:
            expected = open_.request.output[open_.tokens : open_.tokens + len(delta.tokens)]
            open_.right = open_.right and tuple(expected) == tuple(delta.tokens)
            open_.tokens += len(delta.tokens)
            self._tokens += len(delta.tokens)
            open_.chunk_times.append(now)
            open_.chunk_tokens.append(len(delta.tokens))
        if delta.finish_reason is None:
            return False
        del self._open[delta.request_id]
        self._outcomes.append(_outcome(open_, delta, now))
        self._target.leaves(delta.request_id)
        if not self._open:
            self._idle_since = now
        if self._progress is not None:
            self._progress(len(self._outcomes), self._tokens)
        return True

    def _result(self) -> SimResult:
        assert self._first_s is not None
        ended = max(each.times.end_s for each in self._outcomes)
        place = self._place
        speculation = SpeculationStats()
        speculation.add(self._core.speculation)
        place.count_landings(speculation)
        spent = Spent(
            duration=ended - self._first_s,
            verify=place.target_lane.busy_s,
            draft=place.draft_s,
            overhead=place.overhead_s,
            idle=self._idle_s,
        )
        return SimResult(
            requests=tuple(self._outcomes),
            speculation=speculation,
            spent=spent,
            rounds=place.rounds,
            target_passes=place.passes,
            questions=place.questions,
            drafters=self._core.drafts.report(),
            events=self._events,
        )


def _made(lanes: Lanes, agenda: Agenda) -> tuple[Lane, Lane]:
    if lanes.shares is None:
        return Lane(agenda), Lane(agenda)
    if not lanes.separate:
        raise ConfigError("target and drafter take turns: there is nothing to share; leave the shares out.")
    device = SharedDevice(agenda)
    return device.lane(lanes.shares[0]), device.lane(lanes.shares[1])


@lru_cache(maxsize=4096)
def _params(length: int) -> SamplingParams:
    return SamplingParams(max_tokens=length, ignore_eos=True).resolved()


def _outcome(open_: _Open, delta: RequestDelta, now: float) -> Outcome:
    assert delta.summary is not None
    request = open_.request
    whole = open_.right and open_.tokens == len(request.output)
    if delta.error is None and not whole:
        raise PacelineError(
            f"request {request.request_id!r} was given {open_.tokens} tokens that are not the "
            f"{len(request.output)} recorded ones: the simulation is wrong."
        )
    first = open_.chunk_times[0] if open_.chunk_times else None
    last = open_.chunk_times[-1] if open_.chunk_times else now
    times = RequestTimes(open_.arrived_s, first, last, open_.tokens, open_.chunk_times, open_.chunk_tokens)
    return Outcome(
        request.request_id,
        len(request.prompt),
        times,
        delta.summary.speculation,
        delta.summary.num_cached_tokens,
        delta.summary.num_preemptions,
        delta.error,
    )
