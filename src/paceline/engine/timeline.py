"""When draft and target ran: the spans of both lanes, what lies between them, and a trace to look at."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from paceline.errors import ConfigError, EngineError

_KEPT = 100_000
"""Spans of each lane that are remembered; older ones are forgotten, their seconds stay counted."""
_KEPT_GAPS = 10_000
"""Sorted as often as somebody asks, a few times a second on a terminal."""

Made = tuple[tuple[str, tuple[int, ...]], ...]
"""Token ids by request: written by the target, or guessed by the drafter."""


@dataclass(frozen=True, slots=True)
class Span:
    """One pass. start, end: seconds of time.perf_counter.  tokens: rows of the pass, or nodes drafted.
    guesses: how many of a target pass's rows verified one.  made: empty unless a trace is wanted."""

    start: float
    end: float
    tokens: int
    guesses: int = 0
    made: Made = ()


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that takes no time. at: seconds of time.perf_counter.  about: what there is to say of it."""

    at: float
    name: str
    about: dict[str, object]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Seconds from the end of a target pass to the start of the next, while requests ran; of the newest
    10,000."""

    median_s: float
    p99_s: float
    count: int


class Lane:
    """The spans of one side, in order."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=_KEPT)
        self.count = 0
        self.busy_s = 0.0

    def add(self, span: Span) -> None:
        self.spans.append(span)
        self.count += 1
        self.busy_s += span.end - span.start

    def make_room(self, start: float) -> None:
        """Moves back what ended after `start`: of one that works on one pass at a time, whose news may come
        late, the earlier pass was over before the later began."""
        at = len(self.spans) - 1
        while at >= 0 and self.spans[at].end > start:
            late = self.spans[at]
            start -= late.end - late.start
            self.spans[at] = replace(late, start=start, end=start + (late.end - late.start))
            at -= 1


class Timeline:
    """target: passes of the target.  draft: passes of the drafter, by the time their news came.  moments:
    where requests begin and end, and where a drafter is lost or comes back.

    keep_tokens: whether spans remember which tokens they made.
    """

    def __init__(self) -> None:
        self.target, self.draft = Lane(), Lane()
        self.moments: deque[Moment] = deque(maxlen=_KEPT)
        self.keep_tokens = False
        self._gaps: deque[float] = deque(maxlen=_KEPT_GAPS)
        # The stretch of time in which the target is never without requests: the one under way, or the last.
        self._running = False
        self._began = self._ended = 0.0
        self._active_s = self._drafting_s = 0.0

    def target_pass(
        self, start: float, end: float, tokens: int, *, goes_on: bool, guesses: int = 0, made: Made = ()
    ) -> None:
        """goes_on: whether requests remain, so that the time to the next pass is a gap."""
        if self._running:
            self._gaps.append(start - self._ended)
            self._active_s += end - self._ended
        else:
            self._began = start
            self._active_s += end - start
            self._drafting_s += sum(span.end - max(span.start, start) for span in self._drafts_after(start))
        self._ended, self._running = end, goes_on
        self.target.add(Span(start, end, tokens, guesses, made if self.keep_tokens else ()))

    def draft_pass(self, start: float, end: float, tokens: int, *, made: Made = ()) -> None:
        until = end if self._running else min(end, self._ended)
        self._drafting_s += max(0.0, until - max(start, self._began))
        self.draft.make_room(start)
        self.draft.add(Span(start, end, tokens, made=made if self.keep_tokens else ()))

    def moment(self, at: float, name: str, **about: object) -> None:
        self.moments.append(Moment(at, name, about))

    def pause(self) -> None:
        """No request is left: the time to the next pass is nobody's gap."""
        self._running = False

    def _drafts_after(self, start: float) -> Iterator[Span]:
        for span in reversed(self.draft.spans):
            if span.end <= start:
                return
            yield span

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
        """Share of the time with requests, from the first target pass on, in which no draft pass was under
        way; None = no passes."""
        if not self.draft.spans or self._active_s <= 0:
            return None
        return max(0.0, 1.0 - self._drafting_s / self._active_s)

    def write_trace(self, path: Path, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """A trace in the Chrome format, for ui.perfetto.dev or chrome://tracing. decode: what writes the
        text of the tokens that spans remember.

        Raises EngineError when it cannot be written.
        """
        try:
            path.write_bytes(
                msgspec.json.encode({"traceEvents": self._events(decode), "displayTimeUnit": "ms"})
            )
        except OSError as error:
            raise EngineError(f"cannot write the trace {path}: {error.strerror}.") from error

    def _events(self, decode: Callable[[Sequence[int]], str] | None) -> list[dict[str, object]]:
        starts = [span.start for lane in (self.target, self.draft) for span in lane.spans]
        origin = min([*starts, *(moment.at for moment in self.moments)], default=0.0)
        events: list[dict[str, object]] = []
        for number, name in enumerate(("target", "draft", "requests"), 1):
            events.append({"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": name}})
        for number, (name, lane) in enumerate((("target", self.target), ("draft", self.draft)), 1):
            events += [
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": number,
                    "name": f"{name} pass",
                    "ts": (span.start - origin) * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                    "args": _about(span, decode),
                }
                for span in lane.spans
            ]
        events += [
            {
                "ph": "i",
                "s": "p",
                "pid": 1,
                "tid": 3,
                "name": moment.name,
                "ts": (moment.at - origin) * 1e6,
                "args": moment.about,
            }
            for moment in self.moments
        ]
        return events


def _about(span: Span, decode: Callable[[Sequence[int]], str] | None) -> dict[str, object]:
    about: dict[str, object] = {"tokens": span.tokens}
    if span.guesses:
        about["guesses"] = span.guesses
    for name, ids in span.made:
        about[name] = {"ids": ids} if decode is None else {"ids": ids, "text": [decode([id]) for id in ids]}
    return about


def check_trace(path: Path) -> None:
    """Raises ConfigError for a path that cannot be written; what is there stays as it is."""
    new = not path.exists()
    try:
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write the trace {path}: {error.strerror}.") from None
