"""An event log, run again by the simulator: the models answer as they did and take as long, and the core must
be told, and ask for, the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from paceline.core.drafting import DrafterNeeds
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.placement import SerialPlacement
from paceline.core.work import (
    DraftDone,
    DraftItem,
    Event,
    GrowDrafts,
    Proposal,
    RequestArrived,
    RunTarget,
    StepDone,
    WaitOver,
    Work,
)
from paceline.engine.replay import read_log
from paceline.errors import EngineError, shown
from paceline.sim.costs.model import CostModel
from paceline.sim.run.drafters import Meter
from paceline.sim.run.requests import SimRequest
from paceline.sim.run.simulator import SimResult, simulate

Entry = tuple[float, Event, list[Work]]
Recorded = TypeVar("Recorded")


def replayed(path: Path) -> SimResult:
    """path: of a run in turn, none of whose requests was aborted and none of whose parts was lost.

    Raises EngineError for a log that is damaged or of another kind of run, and at the first event or work
    that is not the recorded.
    """
    config, entries = read_log(path)
    log = list(entries)
    _check(path, config, log)
    run = _Run(path, config, log)
    result = simulate(config, run.requests, run.costs, run.drafters, observe=run.compare)
    if run.seen < len(log):
        raise EngineError(f"{path}:{run.seen + 2}: the simulation ends before this event.")
    return result


def _check(path: Path, config: CoreConfig, log: Sequence[Entry]) -> None:
    if not isinstance(config.placement, SerialPlacement):
        raise EngineError(
            f"{path}: drafter and target ran at the same time; replay it without the simulator."
        )
    for number, (_, event, _) in enumerate(log, 2):
        if not isinstance(event, RequestArrived | DraftDone | StepDone | WaitOver):
            raise EngineError(
                f"{path}:{number}: a run with {type(event).__name__} cannot be simulated; replay it without "
                "the simulator."
            )


@dataclass(frozen=True)
class _LoggedPass:
    """taken: of pass after pass."""

    taken: Iterator[float]

    def seconds(self, new_tokens: int, kv_tokens: int, requests: int) -> float:  # noqa: ARG002
        return next(self.taken)


@dataclass(frozen=True)
class _LoggedCosts(CostModel):
    """overheads: of pass after pass."""

    overheads: Iterator[float] = field(default_factory=lambda: iter(()))

    def overhead_s(self, requests: int) -> float:  # noqa: ARG002
        return next(self.overheads)


class _LoggedDrafter:
    """Answers what is recorded, question after question."""

    def __init__(self, needs: DrafterNeeds, answers: Iterator[DraftDone]) -> None:
        self.needs = needs
        self.meter = Meter()
        self._answers = answers

    def arrives(self, request: SimRequest) -> None:
        """The log says it all."""

    def leaves(self, request_id: str) -> None:
        """The log says it all."""

    def grow(self, items: Sequence[DraftItem]) -> list[Proposal]:  # noqa: ARG002
        answer = next(self._answers)
        self.meter.spend(answer.seconds)
        return list(answer.proposals)

    def advance(self, items: Sequence[DraftItem]) -> None:
        """What it took lies between two recorded events."""

    def release(self, request_ids: Iterable[str]) -> None:
        """The log says it all."""


class _Run:
    """What the simulator is given, and what it must make of it. seen: events so far."""

    def __init__(self, path: Path, config: CoreConfig, log: Sequence[Entry]) -> None:
        self.seen = 0
        self._path = path
        self._log = log
        times = _times(log)
        steps = [event for _, event, _ in log if isinstance(event, StepDone)]
        self.requests = _requests(path, config, log, times.arrivals)
        self.costs = _LoggedCosts(
            _LoggedPass(_recorded(path, [step.seconds for step in steps])),
            {},
            overheads=iter(times.overheads),
        )
        self.drafters = [
            _LoggedDrafter(needs, _recorded(path, [done for done in _answers(log) if done.drafter == index]))
            for index, needs in enumerate(config.drafting.drafters)
        ]

    def compare(self, now: float, event: Event, work: list[Work]) -> None:  # noqa: ARG002 - times are made
        if self.seen >= len(self._log):
            raise EngineError(f"{self._path}: the simulation goes on after the end, with {shown(event)}.")
        _, recorded, asked = self._log[self.seen]
        self.seen += 1
        where = f"{self._path}:{self.seen + 1}"
        if _untimed(event) != _untimed(recorded):
            raise EngineError(
                f"{where}: the simulator told the core {shown(event)}, recorded was {shown(recorded)}."
            )
        if work != asked:
            raise EngineError(f"{where}: the core asks for {shown(work)}, recorded was {shown(asked)}.")


def _recorded(path: Path, values: Sequence[Recorded]) -> Iterator[Recorded]:
    yield from values
    raise EngineError(f"{path}: the log ends before the simulation does: it is cut short.")


def _answers(log: Sequence[Entry]) -> Iterator[DraftDone]:
    return (event for _, event, _ in log if isinstance(event, DraftDone))


def _untimed(event: Event) -> Event:
    """What the core looks at."""
    match event:
        case StepDone():
            return replace(event, seconds=0.0, ended=0.0, sample_seconds=0.0)
        case DraftDone():
            return replace(event, seconds=0.0)
    return event


def _requests(
    path: Path, config: CoreConfig, log: Sequence[Entry], arrivals: Sequence[float]
) -> list[SimRequest]:
    """after: what the target said beyond an answer's end, in the pass that ended it."""
    core, outputs, said = EngineCore(config), dict[str, list[int]](), dict[str, list[int]]()
    for now, event, _ in log:
        core.handle(event, now)
        for delta in core.take_outputs():
            outputs.setdefault(delta.request_id, []).extend(delta.tokens)
        for verdict in event.verdicts if isinstance(event, StepDone) else ():
            said.setdefault(verdict.request_id, []).extend(verdict.tokens)
    arrived = [event for _, event, _ in log if isinstance(event, RequestArrived)]
    seen = set[str]()
    for each in arrived:
        if each.request_id in seen:
            raise EngineError(f"{path}: request {shown(each.request_id)} arrives twice; record it again.")
        if not outputs.get(each.request_id):
            raise EngineError(f"{path}: request {shown(each.request_id)} has no token yet: it is cut short.")
        seen.add(each.request_id)
    return [
        SimRequest(
            each.request_id,
            moment,
            each.prompt,
            outputs[each.request_id],
            params=each.params,
            after=said[each.request_id][len(outputs[each.request_id]) :],
        )
        for each, moment in zip(arrived, arrivals, strict=True)
    ]


@dataclass(slots=True)
class _Times:
    """arrivals: of each request.  overheads: after each pass, so that its answer comes when it did."""

    arrivals: list[float] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)


def _times(log: Sequence[Entry]) -> _Times:
    """By the simulator's clock: what lies between a drafter's answer and the next work is put after the pass,
    and who came meanwhile is let in between the same two events."""
    found, at, open_, waiting = _Times(), 0.0, 0, 0
    for now, event, work in log:
        match event:
            case RequestArrived() if not open_:
                at = now
                found.arrivals.append(now)
            case RequestArrived():
                waiting += 1
            case DraftDone():
                at = _let_in(found, waiting, at, at + event.seconds)
            case StepDone():
                ended = at + event.seconds
                found.overheads.append(max(0.0, now - ended))
                at = _let_in(found, waiting, at, ended + found.overheads[-1])
        if not isinstance(event, RequestArrived):
            open_, waiting = open_ - 1, 0
        open_ += sum(isinstance(item, RunTarget | GrowDrafts) for item in work)
    return found


def _let_in(found: _Times, count: int, before: float, after: float) -> float:
    found.arrivals += [before + (after - before) * (number + 1) / (count + 1) for number in range(count)]
    return after
