"""Simulated time: what happens when, and the lanes that do one thing after the other."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from paceline.errors import ConfigError, shown

Action = Callable[[], None]


class Agenda:
    """What is to happen, by its moment; at one moment, in the order in which it was entered."""

    def __init__(self) -> None:
        self.now = 0.0
        self._entries: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def at(self, moment: float, action: Action) -> None:
        heapq.heappush(self._entries, (moment, next(self._numbers), action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def step(self) -> bool:
        """Lets the next thing happen; False = there is none."""
        if not self._entries:
            return False
        moment, _, action = heapq.heappop(self._entries)
        self.now = max(self.now, moment)
        action()
        return True


class Lane:
    """Does one job at a time. busy_s: seconds in jobs, however fast.  jobs: how many were begun."""

    def __init__(self, agenda: Agenda, device: SharedDevice | None = None) -> None:
        self.busy = False
        self.busy_s = 0.0
        self.jobs = 0
        self._agenda = agenda
        self._device = device

    def run(self, seconds: float, done: Callable[[float], None]) -> None:
        """A job that takes so long on a device of its own. done: told how long it took. Not while busy."""
        assert not self.busy
        self.busy = True
        self.jobs += 1
        started = self._agenda.now

        def finish() -> None:
            took = self._agenda.now - started if self._device is not None else seconds
            self.busy_s += took
            self.busy = False
            done(took)

        if self._device is None:
            self._agenda.after(seconds, finish)
        else:
            self._device.start(self, seconds, finish)


class SharedDevice:
    """Several lanes on one device. Alone, a lane has all of it; beside others it runs at its share's
    speed."""

    def __init__(self, agenda: Agenda) -> None:
        self._agenda = agenda
        self._shares: dict[Lane, float] = {}
        self._left: dict[Lane, tuple[float, Action]] = {}  # seconds of work, and what then
        self._since = 0.0
        self._plan = 0

    def lane(self, share: float) -> Lane:
        """Raises ConfigError for a share that is none."""
        if not 0 < share <= 1:
            raise ConfigError(f"a lane's share of its device is {shown(share)}: give a number from 0 to 1.")
        lane = Lane(self._agenda, self)
        self._shares[lane] = share
        return lane

    def start(self, lane: Lane, seconds: float, finish: Action) -> None:
        self._settle()
        self._left[lane] = (seconds, finish)
        self._replan()

    def _speed(self, lane: Lane) -> float:
        return self._shares[lane] if len(self._left) > 1 else 1.0

    def _settle(self) -> None:
        passed, self._since = self._agenda.now - self._since, self._agenda.now
        for lane, (seconds, finish) in self._left.items():
            self._left[lane] = (seconds - passed * self._speed(lane), finish)

    def _replan(self) -> None:
        """What is planned for the jobs as they were before is void."""
        self._plan += 1
        if not self._left:
            return
        lane = min(self._left, key=lambda each: self._left[each][0] / self._speed(each))
        plan, wait = self._plan, max(self._left[lane][0], 0.0) / self._speed(lane)
        self._agenda.after(wait, lambda: self._finish(lane) if plan == self._plan else None)

    def _finish(self, lane: Lane) -> None:
        self._settle()
        _, finish = self._left.pop(lane)
        self._replan()
        finish()
