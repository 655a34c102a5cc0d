"""Is the machine otherwise idle? Read from /proc (Linux).

A second busy process makes two-thread kernels several times slower, so a measurement counts only if nobody
else used the cores while it ran.
"""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since boot, all cores together. stolen: wanted here, but given to another by the host."""

    busy: float
    stolen: float
    clock: float


@dataclass(frozen=True)
class Disturbance:
    """Shares of all cores' time. foreign: used by processes outside the measured group."""

    foreign: float
    stolen: float

    def within(self, limit: float) -> bool:
        return self.foreign <= limit and self.stolen <= limit


class Watch:
    """Disturbance from its creation to `stop`, beside the process group `group` (None: beside nothing)."""

    def __init__(self, group: int | None = None) -> None:
        self._group = group
        self._own = _group_seconds(group)
        self._start = cpu_times()

    def stop(self) -> Disturbance:
        end = cpu_times()
        own = _group_seconds(self._group) - self._own
        capacity = max(end.clock - self._start.clock, 1e-9) * (os.cpu_count() or 1)
        foreign = max(end.busy - self._start.busy - own, 0.0)
        return Disturbance(foreign / capacity, (end.stolen - self._start.stolen) / capacity)


def cpu_times() -> CpuTimes:
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(text) / _TICKS for text in fields[:8])
    return CpuTimes(user + nice + system + irq + softirq, steal, time.monotonic())


def wait_until_idle(limit: float, patience_s: float, window_s: float = 1.0) -> Disturbance:
    """The first window of `window_s` whose disturbance stays within `limit`, or the last one tried."""
    deadline = time.monotonic() + patience_s
    while True:
        watch = Watch()
        time.sleep(window_s)
        seen = watch.stop()
        if seen.within(limit) or time.monotonic() >= deadline:
            return seen


def describe() -> dict[str, str | int]:
    """The processor and the kernel, for the report."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown"
    )
    return {"cpu": model, "cores": os.cpu_count() or 1, "kernel": platform.release()}


def _group_seconds(group: int | None) -> float:
    """CPU seconds of the living processes of a process group."""
    if group is None:
        return 0.0
    total = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The command's name, in brackets, may hold spaces: fields count from behind it.
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS
