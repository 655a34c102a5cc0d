"""Memory of this process and its children while something runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import Self

import psutil

_EVERY_S = 0.05


def resident_bytes() -> int:
    """Of this process and every child. What they share counts for each of them."""
    return _resident(_family())


def _family() -> list[psutil.Process]:
    """Looks at every process there is, which takes milliseconds."""
    here = psutil.Process()
    return [here, *here.children(recursive=True)]


def _resident(processes: Iterable[psutil.Process]) -> int:
    total = 0
    for process in processes:
        with suppress(psutil.Error):  # it has just ended
            total += process.memory_info().rss
    return total


class PeakMemory:
    """Looks every 50 ms at the processes that there were at the beginning: an engine starts its own before
    it serves, and to look for others would take time from what is measured. `peak` is the most that was
    seen, `stood_still_s` the longest time between two looks: where it is seconds, the process was stopped."""

    def __init__(self) -> None:
        self._processes = _family()
        self.peak = _resident(self._processes)
        self.stood_still_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-memory", daemon=True)

    def _watch(self) -> None:
        last = time.perf_counter()
        while not self._stop.wait(_EVERY_S):
            now = time.perf_counter()
            self.stood_still_s, last = max(self.stood_still_s, now - last), now
            self.peak = max(self.peak, _resident(self._processes))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, _resident(self._processes))
