"""What does the core's work, and the plain way of doing it: in this process, one thing after the other."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from paceline.core.work import (
    AdvanceDrafts,
    DraftDone,
    DrafterLost,
    Event,
    GrowDrafts,
    Release,
    RunTarget,
    StepDone,
    WaitOver,
    WaitUntil,
    Work,
)
from paceline.drafters.base import ClosingDrafter, Drafter, released
from paceline.drafters.service import proposals_of
from paceline.execution.interrupts import interruptible

logger = logging.getLogger(__name__)


class Executor(Protocol):
    """Where work is done. What it answers comes in an order of its own, one event at a time."""

    @property
    def idle(self) -> bool:
        """Whether nothing submitted is still to be done or to be answered."""
        ...

    @property
    def advance_s(self) -> float:
        """Seconds of this thread that drafters spent on taking in tokens, without guessing."""
        ...

    def submit(self, work: Work) -> None:
        """Takes work on; returns at once."""
        ...

    def poll(self) -> Event | None:
        """The next event, waited for if work is under way that will be answered; else None.

        Raises what a part of the work raised.
        """
        ...

    def forget_queued(self) -> None:
        """Drops work that has not begun, but for releases."""
        ...

    def close(self) -> None: ...


class Target(Protocol):
    """What runs target passes. Called from one thread."""

    def run(self, work: RunTarget) -> StepDone: ...

    def release(self, request_ids: Iterable[str]) -> None: ...

    def close(self) -> None: ...


class LocalExecutor:
    """Target and drafters in turn on the calling thread, inside `poll`."""

    def __init__(self, target: Target, drafters: Sequence[Drafter] = ()) -> None:
        """drafters: in the order of the policy's."""
        self._target = target
        self._drafters: list[Drafter | None] = list(drafters)
        self._queue: deque[Work] = deque()
        self.advance_s = 0.0

    @property
    def idle(self) -> bool:
        return not self._queue

    def submit(self, work: Work) -> None:
        self._queue.append(work)

    def poll(self) -> Event | None:
        event = None
        while self._queue and event is None:
            work = self._queue.popleft()
            try:
                with interruptible():
                    event = self._run(work)
            except BaseException:
                if isinstance(work, Release):
                    self._queue.appendleft(work)
                raise
        return event

    def forget_queued(self) -> None:
        self._queue = deque(work for work in self._queue if isinstance(work, Release))

    def close(self) -> None:
        for release in [work for work in self._queue if isinstance(work, Release)]:
            for index in range(len(self._drafters)):
                self._run_drafter(index, release)
        self._queue.clear()
        try:
            for drafter in self._drafters:
                if isinstance(drafter, ClosingDrafter):
                    drafter.close()
        finally:
            self._target.close()

    def _run(self, work: Work) -> Event | None:
        """The event that answers `work`, if it is of a kind that is answered."""
        match work:
            case RunTarget():
                started = time.perf_counter()
                done = self._target.run(work)
                ended = time.perf_counter()
                return replace(done, seconds=ended - started, ended=ended)
            case WaitUntil():
                time.sleep(max(0.0, work.at - time.perf_counter()))
                return WaitOver()
            case Release():
                self._target.release(work.request_ids)
                for index in range(len(self._drafters)):
                    if (lost := self._run_drafter(index, work)) is not None:
                        self._queue.appendleft(work)  # for those after it; twice is once
                        return lost
                return None
        return self._run_drafter(work.drafter, work)

    def _run_drafter(self, index: int, work: GrowDrafts | AdvanceDrafts | Release) -> Event | None:
        drafter = self._drafters[index] if index < len(self._drafters) else None
        if drafter is None:
            return DraftDone(work.round, (), drafter=index) if isinstance(work, GrowDrafts) else None
        started = time.perf_counter()
        try:
            match work:
                case GrowDrafts():
                    answer = proposals_of(drafter, work.items)
                    return DraftDone(work.round, answer, time.perf_counter() - started, index)
                case AdvanceDrafts():
                    drafter.advance(work.items)
                    self.advance_s += time.perf_counter() - started
                case Release():
                    released(drafter, work)
        except Exception as error:
            # Whatever a drafter does, decoding goes on without it: the output is the target's own.
            logger.exception("a drafter failed; decoding goes on without it")
            self._drafters[index] = None
            return DrafterLost(f"{type(error).__name__}: {error}", index)
        return None
