"""Target and draft group at the same time: the target on a thread of its own, the drafter in a process that
may be on another host (SwiftSpec, arXiv 2506.11309)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any

from paceline.core.work import (
    AdvanceDrafts,
    DraftDone,
    DrafterJoined,
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
from paceline.engine import quiet_process
from paceline.engine.draft_group import DraftGroup
from paceline.engine.draft_messages import TargetFeatures
from paceline.engine.executor import Target
from paceline.engine.feature_feed import FeatureFeed
from paceline.execution import interrupts

_LOOK_S = 0.1
"""How long Ctrl-C may wait for `poll` to notice it."""


class _Raised:
    """What the target's thread met instead of an answer. step: of the pass, None = it forgot requests."""

    def __init__(self, step: int | None, error: Exception) -> None:
        self.step, self.error = step, error


class DisaggregatedExecutor:
    """Takes over `group`, which was started with `events`; None = there is no drafter. feed: hidden states of
    the target's that the drafter reads.

    Work for the drafter is on its way when `submit` returns; work for the target begins with the next
    moment its thread is free. Of two passes submitted, the first is over before the second begins, so
    that slots may be given away while a pass that was given up still runs.
    """

    def __init__(
        self,
        target: Target,
        group: DraftGroup | None,
        events: SimpleQueue[Any],
        feed: FeatureFeed | None = None,
    ) -> None:
        self._target = target
        self._group = group
        self._events = events
        self._feed = feed
        self._work: SimpleQueue[RunTarget | Release | None] = SimpleQueue()
        self._running: set[int] = set()  # steps submitted, neither answered nor given up
        self._round: int | None = None  # the same, of a round of guesses
        self._wait_until: float | None = None
        self._quiet = True
        self.advance_s = 0.0  # the drafter takes tokens in on its own time
        quiet_process.enter()
        self._thread = threading.Thread(target=self._run_target, name="paceline-target", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        return not self._promised and self._events.empty()

    @property
    def _promised(self) -> bool:
        return bool(self._running) or self._round is not None or self._wait_until is not None

    def submit(self, work: Work) -> None:
        match work:
            case RunTarget():
                self._running.add(work.step)
                self._work.put(work)
            case WaitUntil():
                self._wait_until = work.at
            case GrowDrafts() | AdvanceDrafts():
                self._tell_drafter(work)
            case Release():
                self._tell_drafter(work)
                self._work.put(work)

    def _tell_drafter(self, work: GrowDrafts | AdvanceDrafts | Release) -> None:
        if isinstance(work, Release):
            if self._feed is not None:
                self._feed.forget(work.request_ids)
        elif self._feed is not None:
            self._send(self._feed.before(work))
        sent = self._group is not None and self._group.submit(work)
        if isinstance(work, GrowDrafts):
            self._round = work.round
            if not sent:  # the core may not have heard yet that nobody is there
                self._events.put(DraftDone(work.round, (), drafter=work.drafter))

    def _send(self, features: Iterable[TargetFeatures]) -> None:
        for message in features:
            if self._group is not None:
                self._group.submit(message)

    def poll(self) -> Event | None:
        """The next event, waited for as long as something under way will bring one; else None, also where
        SIGINT waits (`execution.interrupts`). Raises what the target raised."""
        while True:
            try:
                found = self._events.get(*self._patience())
            except Empty:
                if self._wait_until is not None and time.perf_counter() >= self._wait_until:
                    self._wait_until = None
                    return WaitOver()
                if not self._promised or interrupts.pending():
                    return None
                continue
            if isinstance(found, _Raised):
                if found.step is None or found.step in self._running:
                    self._running.discard(found.step or 0)
                    raise found.error
            elif (event := self._noted(found)) is not None:
                return event

    def _patience(self) -> tuple[bool, float]:
        """Arguments of `get`: whether to wait, and how long."""
        if not self._promised or interrupts.pending():
            return False, 0.0
        if self._wait_until is None:
            return True, _LOOK_S
        wait_s = self._wait_until - time.perf_counter()
        return wait_s > 0, min(max(wait_s, 0.0), _LOOK_S)

    def _noted(self, event: Event) -> Event | None:
        """The event, unless it answers what was given up."""
        match event:
            case StepDone():
                if event.step not in self._running:
                    return None
                self._running.remove(event.step)
                if self._feed is not None:
                    self._send(self._feed.after_pass())
            case DraftDone():
                if event.round == self._round:
                    self._round = None
            case DrafterLost() | DrafterJoined():
                self._round = None
                if self._feed is not None:
                    self._feed.forget_announcements()
                if self._group is not None:
                    self._group.turn_to(event)
        return event

    def forget_queued(self) -> None:
        """What the target is in the middle of goes on, and its answer is dropped."""
        kept = []
        with suppress(Empty):
            while True:
                work = self._work.get_nowait()
                if not isinstance(work, RunTarget):
                    kept.append(work)
        for work in kept:
            self._work.put(work)
        self._running.clear()
        self._round = self._wait_until = None

    def close(self) -> None:
        """Waits for the pass that is under way. May be called twice."""
        try:
            if self._thread.is_alive():
                self.forget_queued()
                self._work.put(None)
                self._thread.join()
                self._target.close()
        finally:
            if self._quiet:
                self._quiet = False
                quiet_process.leave()
            if self._group is not None:
                self._group.close()

    # ------------------------------------------------------------ the target's thread

    def _run_target(self) -> None:
        while (work := self._work.get()) is not None:
            started = time.perf_counter()
            try:
                if isinstance(work, Release):
                    self._target.release(work.request_ids)
                    continue
                done = self._target.run(work)
                if self._feed is not None:
                    self._feed.reached(work)
            except Exception as error:  # noqa: BLE001 - `poll` raises it
                self._events.put(_Raised(work.step if isinstance(work, RunTarget) else None, error))
            else:
                ended = time.perf_counter()
                self._events.put(replace(done, seconds=ended - started, ended=ended))
