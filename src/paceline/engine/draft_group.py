"""The engine's side of a draft worker: start it, watch it, lose it without harm and get it back."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import msgspec
import zmq

from paceline import errors
from paceline.core.drafting import DrafterNeeds
from paceline.core.work import (
    AdvanceDrafts,
    DraftDone,
    DrafterJoined,
    DrafterLost,
    GrowDrafts,
    NodesDrafted,
    Release,
)
from paceline.engine.attachment import Attachment, Patience
from paceline.engine.channel import Address, Context, Line
from paceline.engine.draft_host import DraftHost, RemoteHost
from paceline.engine.draft_messages import (
    FOR_ENGINE,
    MOST_BYTES_TO_ENGINE,
    Beat,
    Bye,
    Codec,
    DraftGroupSpec,
    Fault,
    Hello,
    Malformed,
    Ready,
    Refused,
    TargetFeatures,
)
from paceline.errors import EngineError, PacelineError

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_ASK_AGAIN_S = 0.5
_OTHER_ENGINE_S = 15.0
"""A worker gives an engine up that has been silent for less than this."""
_MOST_WAITING = 4096
"""Events not yet taken by the engine; a worker that makes more is not working for it."""


@dataclass(slots=True)
class DraftGroupStats:
    """losses: of the worker.  joins: since the first.  busy_s, up_s: seconds that the drafter worked, and
    that a worker was there, up to its last sign of life.  last_loss: why the worker was lost the last time.
    by_distance: see `Beat`.
    """

    losses: int = 0
    joins: int = 0
    busy_s: float = 0.0
    up_s: float = 0.0
    last_loss: str = ""
    by_distance: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def idle_share(self) -> float | None:
        """Share of its time that the worker had nothing to do."""
        return 1.0 - self.busy_s / self.up_s if self.up_s > 0 else None


class DraftGroup:
    """Puts DraftDone, NodesDrafted, DrafterLost and DrafterJoined into `events`.

    `start`, `submit`, `turn_to` and `close` are the engine's thread's. `turn_to` is told every event as the
    core is given it: work goes to the worker that the core believes in, or nowhere.
    """

    def __init__(
        self,
        spec: DraftGroupSpec,
        host: DraftHost,
        events: SimpleQueue[Any],
        patience: Patience | None = None,
    ) -> None:
        self.stats = DraftGroupStats()
        spec = spec.abroad() if isinstance(host, RemoteHost) else spec
        self._hello = Hello(secrets.randbits(62), msgspec.Raw(msgspec.msgpack.encode(spec)))
        self._host = host
        self._events = events
        self._patience = patience or Patience()
        self._codec = Codec(FOR_ENGINE, MOST_BYTES_TO_ENGINE)
        self._context: Context = zmq.Context()
        self._first: Future[DrafterNeeds] = Future()
        self._needs: DrafterNeeds | None = None
        self._address: Address | None = None
        self._current: Attachment | None = None
        self._joining: deque[Attachment] = deque()
        self._closing = threading.Event()
        self._failures = 0  # attempts in a row to have the worker back
        self._causes: set[str] = set()
        # The kernel ties a child to the thread that started it, so one thread keeps the worker for life.
        self._thread = threading.Thread(target=self._run, name="paceline-draft-group", daemon=True)

    # ------------------------------------------------------------ the engine's thread

    def start(self) -> DrafterNeeds:
        """Waits until the worker is ready; returns what its drafter declares.

        Raises the PacelineError that kept it from it.
        """
        self._thread.start()
        try:
            needs = self._first.result()
        except BaseException:
            self.close()
            raise
        self._current = self._joining.popleft()
        return needs

    def submit(self, work: GrowDrafts | AdvanceDrafts | Release | TargetFeatures) -> bool:
        """False when it goes nowhere: a GrowDrafts is then never answered."""
        return self._current is not None and self._current.submit(work)

    def turn_to(self, event: DrafterLost | DrafterJoined) -> None:
        if self._current is not None:
            self._current.shut_outlet()
        self._current = self._joining.popleft() if isinstance(event, DrafterJoined) else None

    def close(self) -> None:
        """Ends the worker, if it is ours, and everything that belongs to it."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        for attachment in filter(None, (self._current, *self._joining)):
            attachment.shut_outlet()
        self._current = None
        self._joining.clear()
        self._context.destroy(linger=0)

    # ------------------------------------------------------------ the group's own thread

    def _run(self) -> None:
        try:
            self._keep()
        except Exception as error:
            logger.exception("the draft group failed; decoding goes on without speculation")
            if not self._first.done():
                self._first.set_exception(error)
            else:
                self._events.put(DrafterLost(f"{type(error).__name__}: {error}"))
        finally:
            self._host.end()

    def _keep(self) -> None:
        pause = self._patience.first_pause_s
        while not self._closing.is_set():
            attachment = self._attach()
            if attachment is not None:
                reason = self._serve(attachment)
                served_s = time.perf_counter() - attachment.began
                if reason is None:
                    attachment.tell(Bye())
                    attachment.line.close(linger_s=0.2)
                    return
                attachment.line.close()
                if served_s > self._patience.settled_s:
                    pause = self._patience.first_pause_s
                self._lose(reason)
            elif self._needs is None:
                return
            self._closing.wait(pause)
            pause = min(2 * pause, self._patience.last_pause_s)

    def _lose(self, reason: str) -> None:
        self.stats.last_loss = reason
        self.stats.losses += 1
        logger.warning("%s %s; decoding goes on without it until it is back", self._host.name, reason)
        self._events.put(DrafterLost(reason))

    def _attach(self) -> Attachment | None:
        """An attachment whose worker is ready; None where there is none, and `start` is told the cause."""
        attachment = None
        try:
            before, address = self._address, self._host.ensure()
            self._address = address
            attachment = Attachment(self._context, address, self._codec, self._patience.silence_s)
            attachment.tell(self._hello)
            load_s = self._patience.revive_s if address is before else self._patience.load_s
            needs = self._await_ready(attachment, load_s)
        except (PacelineError, OSError, zmq.ZMQError) as error:
            if attachment is not None:
                attachment.line.close()
            self._not_attached(error)
            return None
        self._failures, self._causes = 0, set()
        attachment.open()
        self._joining.append(attachment)
        if self._first.done():
            self.stats.joins += 1
            logger.info("%s is back", self._host.name)
            self._events.put(DrafterJoined())
        else:
            self._needs = needs
            self._first.set_result(needs)
        return attachment

    def _not_attached(self, error: PacelineError | OSError | zmq.ZMQError) -> None:
        """At the start `start` raises it. Later it is tried again, and each cause is told once: not that of
        the first attempt, which a process that just died or hangs may spoil."""
        if not isinstance(error, PacelineError):
            error = EngineError(f"{self._host.name} cannot be started: {error.strerror or error}.")
        if not self._first.done():
            self._first.set_exception(error)
            return
        self._failures += 1
        if self._failures > 1 and str(error) not in self._causes and not self._closing.is_set():
            self._causes.add(str(error))
            logger.warning("%s is not back, and is tried again: %s", self._host.name, error)
        self._host.end()

    def _await_ready(self, attachment: Attachment, load_s: float) -> DrafterNeeds:
        """load_s: until it must have given a sign of life.

        Raises PacelineError with the reason why it does not become ready.
        """
        line, name = attachment.line, self._host.name
        while not self._closing.is_set():
            for message in self._read(attachment):
                if isinstance(message, Refused):
                    self._refused(attachment, message)
                elif isinstance(message, Ready):
                    if self._needs not in (None, message.needs):
                        raise EngineError(f"{name} has another drafter than before: restart the engine.")
                    return message.needs
            waited = time.perf_counter() - attachment.began
            if (gone := self._gone(line)) is not None:
                raise EngineError(f"{name} {gone}. It was not ready yet; its own messages may say more.")
            if not line.made and waited > self._host.connect_s:
                raise EngineError(
                    f"{name} cannot be reached: {line.trouble or 'nobody listens there'}. Start `paceline "
                    "draft` there, or correct the address."
                )
            limit_s = self._patience.load_s if attachment.allow_s else load_s
            if waited > limit_s:
                raise EngineError(f"{name} was not ready within {limit_s:g} s.")
        raise EngineError("the engine is being closed.")

    def _refused(self, attachment: Attachment, refused: Refused) -> None:
        """Asks again where the other engine may just have ended without a word; else raises."""
        if refused.busy and time.perf_counter() - attachment.began < _OTHER_ENGINE_S:
            self._closing.wait(_ASK_AGAIN_S)
            attachment.tell(self._hello)
            return
        kind = getattr(errors, refused.error, EngineError)
        if not (isinstance(kind, type) and issubclass(kind, PacelineError)):
            kind = EngineError
        raise kind(f"{self._host.name}: {refused.reason}")

    def _read(self, attachment: Attachment) -> list[Any]:
        """Messages of this attachment. Raises EngineError for one that is none."""
        messages = []
        for frame in attachment.line.receive(_POLL_S):
            try:
                number, _, message = self._codec.decode(frame)
            except Malformed as problem:
                raise EngineError(f"sent {problem}") from None
            if number != attachment.number:
                continue
            if isinstance(message, Beat):
                attachment.take(message)
            else:
                messages.append(message)
        return messages

    def _serve(self, attachment: Attachment) -> str | None:
        """Passes on what the worker says for as long as it can be trusted to; why no longer, None when this
        side is closed."""
        before = replace(self.stats)
        while not self._closing.is_set():
            try:
                messages = self._read(attachment)
            except EngineError as error:
                return str(error)
            for message in messages:
                if isinstance(message, Fault):
                    return f"failed: {message.reason}"
                if isinstance(message, DraftDone) and not attachment.is_answer(message):
                    return f"answers round {message.round}, which it was not asked for"
                if isinstance(message, DraftDone | NodesDrafted):
                    self._events.put(message)
            self.stats.busy_s = before.busy_s + attachment.beat.busy_s
            self.stats.by_distance = attachment.beat.by_distance
            self.stats.up_s = before.up_s + attachment.beat.up_s
            if (problem := self._problem(attachment)) is not None:
                return problem
            attachment.ping()
        return None

    def _gone(self, line: Line) -> str | None:
        if line.broken is not None:
            self._closing.wait(_POLL_S)  # a process that ends closes its connections first
        if (ended := self._host.ended()) is not None:
            return ended
        return f"cannot be used: {line.broken}" if line.broken is not None else None

    def _problem(self, attachment: Attachment) -> str | None:
        line = attachment.line
        if (gone := self._gone(line)) is not None:
            return gone
        limit_s = max(self._patience.silence_s, attachment.allow_s)
        silent_s = time.perf_counter() - line.heard_at
        if silent_s > limit_s:
            return f"has given no sign of life for {silent_s:.1f} s"
        if attachment.problem is not None:
            return attachment.problem
        if self._events.qsize() > _MOST_WAITING:
            return f"floods the engine: more than {_MOST_WAITING} messages wait"
        return None
