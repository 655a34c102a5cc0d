"""Where the core's work is done: all of it in turn, as `engine.executor` does it, or target and drafter at
the same time, as `engine.disaggregated` and `engine.draft_worker` do."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from paceline.core.stats import SpeculationStats
from paceline.core.work import AdvanceDrafts, DraftDone, Event, GrowDrafts, NodesDrafted, Release, RunTarget
from paceline.drafters.base import released
from paceline.drafters.service import AheadMode, DraftService, DraftWork, merged
from paceline.errors import ConfigError
from paceline.sim.costs.model import CostModel
from paceline.sim.run.drafters import RecordedTree, SimDrafter
from paceline.sim.run.lanes import Agenda, Lane
from paceline.sim.run.target import SimTarget, decodes

Feed = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Rounds:
    """From the end of a target pass that decodes to the end of the next one, if that decodes too, summed over
    `count` of them.

    passes: seconds in them.  gap: between them, of which
    overhead: of the step.  drafting: the target waits for passes of the drafter: for each of them where they
    work in turn, else where its tree holds too little, after a miss or on a leaf.  behind: until the drafter
    is done with the pass that it is in.  other: messages, waits that were chosen.
    """

    count: int = 0
    passes: float = 0.0
    gap: float = 0.0
    overhead: float = 0.0
    drafting: float = 0.0
    behind: float = 0.0

    @property
    def other(self) -> float:
        return max(0.0, self.gap - self.overhead - self.drafting - self.behind)


class _Place:
    """What both have: target passes and what lies between them."""

    def __init__(
        self, agenda: Agenda, target: SimTarget, target_lane: Lane, drafters: Sequence[SimDrafter], feed: Feed
    ) -> None:
        self.target_lane = target_lane
        self.passes = self.questions = 0
        self.draft_s = self.overhead_s = 0.0
        self._agenda = agenda
        self._target = target
        self._drafters = drafters
        self._feed = feed
        self._ended: float | None = None  # the last pass, if it decoded and the next has not begun
        self._since = (0.0, 0.0, 0.0)  # overhead, drafting, behind: since then
        self._rounds = 0
        self._sums = [0.0] * 5

    @property
    def rounds(self) -> Rounds:
        passes, gap, overhead, drafting, behind = self._sums
        return Rounds(self._rounds, passes, gap, overhead, drafting, behind)

    def _pass(self, work: RunTarget, done: Callable[[], None]) -> None:
        """done: once its answer was given to the core."""
        self.passes += 1
        decoding = decodes(work)
        gap = self._agenda.now - self._ended if decoding and self._ended is not None else None
        between = self._since

        def finish(seconds: float) -> None:
            if gap is not None:
                self._rounds += 1
                sums = (seconds, gap, *between)
                self._sums = [a + b for a, b in zip(self._sums, sums, strict=True)]
            ended, overhead = self._agenda.now, self._target.overhead_s(work)
            self._ended = ended if decoding else None
            self._since = (overhead, 0.0, 0.0)
            self.overhead_s += overhead

            def answer() -> None:
                done()
                self._feed(self._target.answer(work, seconds, ended))

            if overhead:
                self._agenda.after(overhead, answer)
            else:
                answer()

        self.target_lane.run(self._target.seconds(work), finish)

    def _count(self, *, drafting: float = 0.0, behind: float = 0.0) -> None:
        if self._ended is not None and not self.target_lane.busy:
            overhead, drafting_before, behind_before = self._since
            self._since = (overhead, drafting_before + drafting, behind_before + behind)

    def count_landings(self, stats: SpeculationStats) -> None:
        """Of trees whose nodes are not sent, which the core knows nothing of."""
        if stats.num_hits + stats.num_leaf_hits + stats.num_misses:
            return
        for drafter in self._drafters:
            if isinstance(drafter, RecordedTree):
                found = drafter.candidates
                stats.num_hits += found.hits
                stats.num_leaf_hits += found.leaf_hits
                stats.num_misses += found.misses


def _forget(drafter: SimDrafter, work: Release) -> None:
    """A drafter may still guess for a request that ended a moment ago, until it hears of it."""
    for request_id in work.request_ids:
        drafter.leaves(request_id)


class InTurn(_Place):
    """One thing after the other, in the order in which it was asked for."""

    def __init__(
        self,
        agenda: Agenda,
        target: SimTarget,
        lane: Lane,
        drafters: Sequence[SimDrafter],
        costs: CostModel,
        feed: Feed,
    ) -> None:
        super().__init__(agenda, target, lane, drafters, feed)
        self._draft_lane = Lane(agenda)
        self._switch_s = costs.switch_s
        self._asked: int | None = None
        self._queue: deque[RunTarget | GrowDrafts | AdvanceDrafts | Release] = deque()
        self._busy = False

    def verify(self, work: RunTarget) -> None:
        self._enter(work)

    def draft(self, work: GrowDrafts | AdvanceDrafts) -> None:
        self._enter(work)

    def release(self, work: Release) -> None:
        self._enter(work)

    def _enter(self, work: RunTarget | GrowDrafts | AdvanceDrafts | Release) -> None:
        self._queue.append(work)
        if not self._busy:
            self._go_on()

    def _go_on(self) -> None:
        self._busy = False
        while self._queue and not self._busy:
            work = self._queue.popleft()
            match work:
                case RunTarget():
                    self._busy = True
                    self._pass(work, self._free)
                    continue
                case GrowDrafts():
                    self._ask(work)
                case AdvanceDrafts():
                    self._advance(work)
                case Release():
                    for drafter in self._drafters:
                        released(drafter, work)
                        _forget(drafter, work)

    def _free(self) -> None:
        """Before the answer is given, so that what is asked next is not held up; what waits comes first."""
        self._go_on()

    def _ask(self, work: GrowDrafts) -> None:
        self._busy = True
        self.questions += 1
        drafter = self._drafters[work.drafter]
        before = drafter.meter.now
        answer = tuple(drafter.grow(work.items))
        seconds = drafter.meter.now - before
        if self._asked is not None and self._asked != work.drafter:
            seconds += self._switch_s
        self._asked = work.drafter

        def done(took: float) -> None:
            self.draft_s += took
            self._count(drafting=took)
            self._go_on()
            self._feed(DraftDone(work.round, answer, took, work.drafter))

        self._draft_lane.run(seconds, done)

    def _advance(self, work: AdvanceDrafts) -> None:
        drafter = self._drafters[work.drafter]
        before = drafter.meter.now
        drafter.advance(work.items)
        seconds = drafter.meter.now - before
        if seconds <= 0.0:
            return
        self._busy = True

        def done(took: float) -> None:
            self.draft_s += took
            self._go_on()

        self._draft_lane.run(seconds, done)


class Apart(_Place):
    """The target on one lane, the drafter on another, and messages between them that take their time."""

    def __init__(
        self,
        agenda: Agenda,
        target: SimTarget,
        target_lane: Lane,
        draft_lane: Lane,
        drafters: Sequence[SimDrafter],
        costs: CostModel,
        feed: Feed,
    ) -> None:
        super().__init__(agenda, target, target_lane, drafters, feed)
        if len(drafters) > 1:
            raise ConfigError("only one drafter works beside the target: name one, or let them work in turn.")
        self._draft_lane = draft_lane
        self._message_s = costs.message_s
        self._passes: deque[RunTarget] = deque()
        self._inbox: list[tuple[float, DraftWork]] = []
        self._todo: deque[DraftWork] = deque()
        self._looked_ahead = True
        self._service: DraftService | None = None

    def work_ahead(self, ahead: AheadMode, passes: int) -> None:
        if self._drafters:
            self._meter = self._drafters[0].meter
            self._service = DraftService(self._drafters[0], ahead, passes, self._meter)

    # ------------------------------------------------------------ the target's lane

    def verify(self, work: RunTarget) -> None:
        self._passes.append(work)
        if not self.target_lane.busy:
            self._next_pass()

    def _next_pass(self) -> None:
        if self._passes and not self.target_lane.busy:
            self._pass(self._passes.popleft(), self._next_pass)

    # ------------------------------------------------------------ the drafter's

    def draft(self, work: DraftWork) -> None:
        if self._service is not None:
            self._send(partial(self._arrived, work))

    def release(self, work: Release) -> None:
        self.draft(work)

    def _send(self, message: Callable[[], None]) -> None:
        self._agenda.after(self._message_s, message)

    def _arrived(self, work: DraftWork) -> None:
        self._inbox.append((self._agenda.now, work))
        if not self._draft_lane.busy:
            self._turn()

    def _turn(self) -> None:
        """All waiting messages, then one pass, and so on: what `DraftWorker.turn` does."""
        assert self._service is not None
        while not self._draft_lane.busy:
            if self._todo:
                self._apply(self._todo.popleft())
            elif not self._looked_ahead:
                self._looked_ahead = True
                self._do(self._service.work_ahead)
            elif self._inbox or self._service.wants_work:
                for arrived, work in self._inbox:
                    if isinstance(work, GrowDrafts):
                        self._count(behind=self._agenda.now - arrived)
                self._todo.extend(merged([work for _, work in self._inbox]))
                self._inbox.clear()
                self._looked_ahead = False
            else:
                return

    def _apply(self, work: DraftWork) -> None:
        assert self._service is not None
        asked = isinstance(work, GrowDrafts)
        self.questions += asked
        self._do(partial(self._service.apply, work), asked=asked)
        if isinstance(work, Release):
            _forget(self._drafters[0], work)

    def _do(self, job: Callable[[], DraftDone | NodesDrafted | None], *, asked: bool = False) -> None:
        before = self._meter.now
        answer = job()
        seconds = self._meter.now - before

        def done(took: float) -> None:
            self.draft_s += took
            if asked:
                self._count(drafting=took)
            if answer is not None:
                self._send(partial(self._feed, replace(answer, seconds=took)))
            self._turn()

        if seconds > 0.0:
            self._draft_lane.run(seconds, done)
        elif answer is not None:
            self._send(partial(self._feed, answer))
