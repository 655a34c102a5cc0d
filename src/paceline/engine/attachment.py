"""The engine's side of one attachment to a draft worker."""

from __future__ import annotations

import secrets
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from paceline.core.work import AdvanceDrafts, DraftDone, GrowDrafts, Release
from paceline.engine.channel import Address, Context, Line, Outlet
from paceline.engine.draft_messages import MOST_ALLOWED_S, Beat, Codec, Ping, TargetFeatures

_PING_S = 0.5
_DEAF_BEATS = 20
"""A worker answers a round in the same turn of its loop that takes it in, and a turn gives a few beats at
most: after so many the answer does not come any more."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. silence_s: without a sign of life, after which a worker is lost; one that loads, or says that
    it reads a long prompt, need only be alive as a process.  load_s: until it is ready.  revive_s: that a
    process of ours which hung has to come back before it is replaced.  first_pause_s, last_pause_s: between
    attempts to get a worker back, doubled from one to the next.  settled_s: of service after which the next
    loss begins with the first pause again."""

    silence_s: float = 2.0
    load_s: float = 600.0
    revive_s: float = 15.0
    first_pause_s: float = 0.1
    last_pause_s: float = 30.0
    settled_s: float = 60.0


class Attachment:
    """A line that the group's thread watches, an outlet for the engine's. number: its name on the wire."""

    def __init__(self, context: Context, address: Address, codec: Codec, silence_s: float) -> None:
        self.number = secrets.randbits(62)
        self.line = Line(context, address, silence_s)
        self.sent = 0
        self.allow_s = 0.0
        self.began = time.perf_counter()
        self.beat = Beat(0.0, 0, 0.0, 0.0)
        self._context, self._address, self._codec = context, address, codec
        self._outlet: Outlet | None = None
        self._pinged_at = self.began
        self._awaited = self._beats_since = 0
        # (round, packets sent up to and with it): of rounds without an answer, the oldest first. The engine's
        # thread appends, the group's takes away.
        self._rounds: deque[tuple[int, int]] = deque()
        self._beats_unanswered = 0

    # ------------------------------------------------------------ the engine's thread

    def submit(self, work: GrowDrafts | AdvanceDrafts | Release | TargetFeatures) -> bool:
        """False when it could not be sent: the next packet shows by its number that one is missing, which
        ends the attachment."""
        assert self._outlet is not None
        if isinstance(work, GrowDrafts):
            self._rounds.append((work.round, self.sent + 1))
        sent = self._outlet.send(self._codec.encode(work, self.number, self.sent))
        self.sent += 1
        return sent

    def shut_outlet(self) -> None:
        if self._outlet is not None:
            self._outlet.close()

    # ------------------------------------------------------------ the group's thread

    def open(self) -> None:
        self._outlet = Outlet(self._context, self._address)

    def tell(self, message: Any) -> None:
        """Beside the work: a greeting, a sign of life."""
        self.line.send(self._codec.encode(message, self.number))

    def ping(self) -> None:
        now = time.perf_counter()
        if now - self._pinged_at >= _PING_S:
            self._pinged_at = now
            self.tell(Ping())

    def take(self, beat: Beat) -> None:
        self.beat, self.allow_s = beat, min(beat.allow_s, MOST_ALLOWED_S)
        if beat.received >= self._awaited:
            self._awaited, self._beats_since = self.sent, 0
        else:
            self._beats_since += 1
        if self._rounds and beat.received >= self._rounds[0][1]:
            self._beats_unanswered += 1

    def is_answer(self, done: DraftDone) -> bool:
        """Whether it answers the oldest open round: a worker takes one after the other."""
        if not self._rounds or self._rounds[0][0] != done.round:
            return False
        self._rounds.popleft()
        self._beats_unanswered = 0
        return True

    @property
    def problem(self) -> str | None:
        """What a worker that gives signs of life does wrong nevertheless."""
        if self._beats_since >= _DEAF_BEATS:
            return "does not receive what it is sent"
        if self._beats_unanswered >= _DEAF_BEATS:
            return "does not answer what it is asked"
        return None
