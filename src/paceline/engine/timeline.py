"""When draft and target ran: the spans of both lanes, what lies between them, and a trace to look at."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec

from paceline.errors import EngineError

_KEPT = 100_000
"""Spans of each lane that are remembered; older ones are forgotten, their seconds stay counted."""


@dataclass(frozen=True, slots=True)
class Span:
    """One pass. start, end: seconds of time.perf_counter.  tokens: rows of the pass, or nodes drafted."""

    start: float
    end: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Gaps:
    """Seconds from the end of a target pass to the start of the next, while requests decoded."""

    median_s: float
    p99_s: float
    count: int


class Lane:
    """The spans of one side, in order."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=_KEPT)
        self.busy_s = 0.0

    def add(self, start: float, end: float, tokens: int) -> None:
        self.spans.append(Span(start, end, tokens))
        self.busy_s += end - start


class Timeline:
    """target: passes of the target.  draft: passes of the drafter, by the time their news came."""

    def __init__(self) -> None:
        self.target, self.draft = Lane(), Lane()
        self._gaps: deque[float] = deque(maxlen=_KEPT)
        self._target_ended: float | None = None

    def target_pass(self, start: float, end: float, tokens: int, *, goes_on: bool) -> None:
        """goes_on: whether requests remain, so that the time to the next pass is a gap."""
        if self._target_ended is not None:
            self._gaps.append(start - self._target_ended)
        self._target_ended = end if goes_on else None
        self.target.add(start, end, tokens)

    def draft_pass(self, start: float, end: float, tokens: int) -> None:
        self.draft.add(start, end, tokens)

    @property
    def gaps(self) -> Gaps | None:
        """None before the second pass of a request."""
        if not self._gaps:
            return None
        ordered = sorted(self._gaps)
        return Gaps(
            ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], len(ordered)
        )

    @property
    def draft_idle_share(self) -> float | None:
        """Share of the target's busy and waiting time in which the drafter did nothing; None = no passes."""
        spans = self.target.spans
        if not spans or not self.draft.spans:
            return None
        begin, end = spans[0].start, spans[-1].end
        busy = sum(
            min(span.end, end) - max(span.start, begin) for span in self.draft.spans if span.end > begin
        )
        return max(0.0, 1.0 - busy / (end - begin)) if end > begin else None

    def write_trace(self, path: Path) -> None:
        """A trace in the Chrome format, for ui.perfetto.dev or chrome://tracing.

        Raises EngineError when it cannot be written.
        """
        starts = [span.start for lane in (self.target, self.draft) for span in lane.spans]
        origin = min(starts, default=0.0)
        events: list[dict[str, object]] = []
        for number, (name, lane) in enumerate((("target", self.target), ("draft", self.draft)), 1):
            events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}})
            events += [
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": number,
                    "name": f"{name} pass",
                    "ts": (span.start - origin) * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                    "args": {"tokens": span.tokens},
                }
                for span in lane.spans
            ]
        try:
            path.write_bytes(msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms"}))
        except OSError as error:
            raise EngineError(f"cannot write the trace {path}: {error.strerror}.") from error
