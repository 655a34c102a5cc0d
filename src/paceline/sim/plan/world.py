"""What a candidate is tried on: a workload, a machine, and assumptions about both that may be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Literal

from paceline.core.work import Event, RequestArrived, StepDone, Work
from paceline.errors import ConfigError
from paceline.sim.acceptance import DrafterTrace, RequestTrace
from paceline.sim.costs.forms import DraftTime, PassShape, PassTime, pass_seconds
from paceline.sim.costs.model import CostModel
from paceline.sim.metrics import Slo, distribution, goodput
from paceline.sim.plan.altered import altered_drafter, altered_traces
from paceline.sim.plan.candidates import Candidate
from paceline.sim.plan.machines import Machine
from paceline.sim.run.requests import SimRequest, arriving, sampled, with_lengths
from paceline.sim.run.setup import composed
from paceline.sim.run.simulator import SimResult, simulate
from paceline.workload import AtOnce, Bursts, Lengths, faster

Goal = Literal["throughput", "goodput", "p50", "p95"]
Latency = Literal["ttft", "tpot", "e2e"]


@dataclass(frozen=True, slots=True)
class Objective:
    """throughput: tokens per second.  goodput: requests per second within `slo`.  p50, p95: of `latency`,
    in seconds, the less the better."""

    goal: Goal = "throughput"
    latency: Latency = "e2e"
    slo: Slo | None = None

    def __post_init__(self) -> None:
        if self.goal == "goodput" and self.slo is None:
            raise ConfigError("goodput is the rate of requests within limits: give them with --slo.")

    @property
    def unit(self) -> str:
        if self.goal == "goodput":
            return "requests/s within the limits"
        return "tokens/s" if self.goal == "throughput" else f"s {self.goal} {self.latency}"

    @property
    def fewer_is_better(self) -> bool:
        return self.goal in ("p50", "p95")

    def value(self, result: SimResult, replicas: int) -> float:
        """Of the replicas together. Requests that ended with an error are as late as can be."""
        finished, seconds = result.finished, result.spent.duration
        if self.goal == "throughput":
            return result.output_rate * replicas
        if self.goal == "goodput":
            assert self.slo is not None
            return (goodput(finished, self.slo, seconds) or 0.0) * replicas
        if len(finished) < len(result.requests):
            return inf
        times = [getattr(each, f"{self.latency}_s") for each in finished]
        found = distribution(each for each in times if each is not None)
        return found.percentiles[50 if self.goal == "p50" else 95] if found is not None else inf


@dataclass(frozen=True, slots=True)
class Assumptions:
    """By what factor the world differs from what was given. acceptance: of each guess, given those before it.
    verify, draft: what passes of the target and questions to drafters take.  load: rate or concurrency."""

    acceptance: float = 1.0
    verify: float = 1.0
    draft: float = 1.0
    load: float = 1.0


AS_GIVEN = Assumptions()


@dataclass(frozen=True)
class Workload:
    """Recorded texts, and when they come: so many at any time, at a rate, or as `rows` say.

    most_output, most_context: longer requests are cut, 0 = none is."""

    traces: tuple[RequestTrace, ...]
    concurrency: int | None = None
    rate: float | None = None
    burstiness: float = 1.0
    rows: tuple[Lengths, ...] = ()
    most_output: int = 1024
    most_context: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.traces:
            raise ConfigError("the workload is empty: give traces with at least one request.")
        given = sum((self.concurrency is not None, self.rate is not None, bool(self.rows)))
        if given != 1:
            raise ConfigError(
                f"{'nothing says' if given == 0 else 'several options say'} when requests come: give one of "
                "--concurrency, --rate and --lengths."
            )

    @property
    def closed(self) -> bool:
        return self.concurrency is not None

    def at_once(self, replicas: int, load: float) -> int | None:
        """Of one replica."""
        if self.concurrency is None:
            return None
        return max(1, round(self.concurrency * load / replicas))

    def requests(
        self, traces: Sequence[RequestTrace], count: int, run: int, replicas: int, load: float
    ) -> Iterator[SimRequest]:
        """Of one replica. run: which sample of them."""
        seed = self.seed * 1_000_003 + run
        if self.rows:
            rows = faster(self.rows[run % replicas :: replicas] or self.rows, load)
            start = (run * count) % max(len(rows) - count, 1)
            part = rows[start : start + count]
            first = part[0].at_s
            part = [
                Lengths(each.at_s - first, each.prompt, min(each.output, self.most_output or each.output))
                for each in part
            ]
            return with_lengths(part, traces, seed, self.most_context)
        chosen = sampled(traces, count, seed)
        if self.rate is not None:
            return arriving(chosen, Bursts(self.rate * load / replicas, self.burstiness, seed))
        at_once = self.at_once(replicas, load) or 1
        return arriving(list(_under_way(chosen, at_once)), AtOnce())


def cut(trace: RequestTrace, most_output: int, most_context: int) -> RequestTrace:
    """No longer than that; longer prompts lose their start."""
    output = len(trace.output)
    if most_output:
        output = min(output, most_output)
    if most_context:
        output = min(output, most_context - 1)
    prompt = trace.prompt
    if most_context and len(prompt) + output > most_context:
        prompt = prompt[len(prompt) - (most_context - output) :]
    if output == len(trace.output) and prompt is trace.prompt:
        return trace
    return _part(trace, prompt, 0, output)


def _part(trace: RequestTrace, prompt: Sequence[int], start: int, end: int) -> RequestTrace:
    drafters = {
        name: DrafterTrace(
            found.accepted[start:end],
            found.confidence[start:end] if found.confidence is not None else None,
            found.top[start:end] if found.top is not None else None,
        )
        for name, found in trace.drafters.items()
        if trace.aligned(name)
    }
    return RequestTrace(trace.request_id, tuple(prompt), trace.output[start:end], drafters)


def _under_way(traces: Sequence[RequestTrace], at_once: int) -> Iterator[RequestTrace]:
    """The first ones are each at another place of their answer, as those met at any moment are: else all of a
    batch would begin together, and end together."""
    for number, trace in enumerate(traces):
        if at_once > 1 and number < at_once:
            done = int(len(trace.output) * ((number * 0.618034) % 1.0))
            if 0 < done < len(trace.output):
                trace = _part(trace, (*trace.prompt, *trace.output[:done]), done, len(trace.output))
        yield trace


# ---------------------------------------------------------------- costs that may be wrong


@dataclass(frozen=True, slots=True)
class _ScaledPass:
    whole: PassTime
    factor: float

    def seconds(self, new_tokens: int, kv_tokens: int, requests: int) -> float:
        return self.factor * self.whole.seconds(new_tokens, kv_tokens, requests)

    def seconds_of(self, shape: PassShape) -> float:
        return self.factor * pass_seconds(self.whole, shape)


@dataclass(frozen=True, slots=True)
class _ScaledDraft:
    whole: DraftTime
    factor: float

    def seconds(self, requests: int, levels: int, guesses: int, unread: int, kv_tokens: int) -> float:
        return self.factor * self.whole.seconds(requests, levels, guesses, unread, kv_tokens)


def scaled(costs: CostModel, assumptions: Assumptions) -> CostModel:
    verify, draft = assumptions.verify, assumptions.draft
    target = costs.target if verify == 1.0 else _ScaledPass(costs.target, verify)
    drafts: Mapping[str, DraftTime] = costs.drafts
    if draft != 1.0:
        drafts = {name: _ScaledDraft(each, draft) for name, each in costs.drafts.items()}
    return replace(costs, target=target, drafts=drafts)


# ---------------------------------------------------------------- one simulation


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a simulation lasts. arrivals: requests in all replicas, where they come at moments of their
    own, and where one comes at a time.  per_seat: for each that is served at once, where whole requests are
    counted.  tokens: in all and for each served at once, after which the rate of a closed loop is known well
    enough.  All but the first are of one replica."""

    arrivals: int
    fewest: int
    per_seat: float
    tokens: tuple[int, int]

    def window(self, at_once: int) -> int:
        """Tokens that make the rate known."""
        return max(self.tokens[0], self.tokens[1] * at_once)

    def count(self, at_once: int | None, replicas: int) -> int:
        if at_once is None:
            return max(1, self.arrivals // replicas)
        return max(self.fewest, round(self.per_seat * at_once))


@dataclass(frozen=True)
class World:
    workload: Workload
    machine: Machine
    objective: Objective
    trees: Mapping[str, bool] = field(default_factory=dict)
    most_at_once: int = 256
    _memory: dict[float, tuple[RequestTrace, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        whole = self.workload
        kept = tuple(cut(each, whole.most_output, whole.most_context) for each in whole.traces)
        self._memory[1.0] = kept

    @property
    def most_context(self) -> int:
        """Of any request, tokens of prompt and output."""
        if self.workload.rows:
            most = max(each.prompt + each.output for each in self.workload.rows)
            return min(most, self.workload.most_context or most)
        return max(len(each.prompt) + len(each.output) for each in self.traces)

    def value(
        self,
        candidate: Candidate,
        run: int,
        effort: Effort,
        assumptions: Assumptions = AS_GIVEN,
        tick: Callable[[], None] | None = None,
    ) -> float:
        """By the objective. tick: called again and again; what it raises ends the simulation."""
        replicas, load = candidate.placed.replicas, assumptions.load
        at_once = self.workload.at_once(replicas, load)
        seats = min(at_once or self.most_at_once, self.most_at_once)
        costs = scaled(self.machine.costs(candidate), assumptions)
        setup = composed(
            candidate.config(seats),
            costs,
            trees=any(self.trees.get(name, False) for name in candidate.drafters),
            shares=candidate.placed.shares,
            kv_tokens=self.machine.kv_tokens(candidate),
        )
        drafters = setup.drafters
        if assumptions.acceptance != 1.0:
            drafters = tuple(altered_drafter(each, assumptions.acceptance) for each in drafters)
        count, steady = effort.count(at_once, replicas), None
        if at_once is not None and at_once > 1 and self.objective.goal == "throughput":
            steady = _Steady(seats, effort.window(seats))
            count = 2 * at_once + 2 * effort.window(seats) // self._mean_output
        requests = self.workload.requests(self._traces(assumptions.acceptance), count, run, replicas, load)
        watch = _watch(steady, tick)
        try:
            result = simulate(
                setup.core,
                islice(requests, count),
                costs,
                drafters,
                lanes=setup.lanes,
                concurrency=at_once,
                observe=watch,
            )
        except _Enough:
            assert steady is not None
            return steady.rate * self._used(replicas)
        if steady is not None and steady.rate > 0.0:
            return steady.rate * self._used(replicas)
        return self.objective.value(result, self._used(replicas))

    @property
    def _mean_output(self) -> int:
        return max(1, sum(len(each.output) for each in self.traces) // len(self.traces))

    def _used(self, replicas: int) -> int:
        """Replicas beyond the requests there are have nothing to do."""
        concurrency = self.workload.concurrency
        return replicas if concurrency is None else min(replicas, concurrency)

    @property
    def traces(self) -> tuple[RequestTrace, ...]:
        """As long as they may be."""
        return self._memory[1.0]

    def _traces(self, acceptance: float) -> tuple[RequestTrace, ...]:
        if acceptance not in self._memory:
            self._memory[acceptance] = altered_traces(self.traces, acceptance)
        return self._memory[acceptance]


class _Enough(Exception):
    """The rate is known."""


class _Steady:
    """The rate of a closed loop from when every place is taken and has answered, until so many tokens."""

    def __init__(self, at_once: int, most_tokens: int) -> None:
        self._at_once = at_once
        self._most = most_tokens
        self._answered: set[str] = set()
        self._arrived = 0
        self._since: float | None = None
        self._tokens = 0
        self._last = (0, 0.0)

    @property
    def rate(self) -> float:
        tokens, seconds = self._last
        return tokens / seconds if seconds > 0.0 else 0.0

    def see(self, now: float, event: Event) -> None:
        match event:
            case RequestArrived():
                self._arrived += 1
                if self._since is not None:
                    # While requests come there are as many as there should be.
                    self._last = (self._tokens, now - self._since)
            case StepDone():
                self._count(now, event)

    def _count(self, now: float, event: StepDone) -> None:
        if self._since is not None:
            self._tokens += sum(len(each.tokens) for each in event.verdicts)
            if self._tokens >= self._most:
                self._last = (self._tokens, now - self._since)
                raise _Enough
        else:
            self._answered.update(each.request_id for each in event.verdicts)
            if self._arrived >= self._at_once and len(self._answered) >= self._at_once:
                self._since = now


def _watch(
    steady: _Steady | None, tick: Callable[[], None] | None
) -> Callable[[float, Event, list[Work]], None]:
    def see(now: float, event: Event, _: list[Work]) -> None:
        if tick is not None:
            tick()
        if steady is not None:
            steady.see(now, event)

    return see
