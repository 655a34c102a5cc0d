"""The draft worker: a process that keeps a drafter busy for an engine elsewhere.

`main` is what an engine starts on its own machine, with a `Start` on standard input, which stays open for as
long as the engine lives. `paceline draft` serves a worker to other hosts.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from types import FrameType
from typing import IO

import msgspec

from paceline import __version__
from paceline.drafters.base import Drafter
from paceline.engine.channel import Listener
from paceline.engine.draft_messages import (
    FOR_WORKER,
    MOST_ALLOWED_S,
    PROTOCOL,
    Beat,
    Bye,
    Codec,
    DraftGroupSpec,
    Fault,
    Hello,
    Malformed,
    Ping,
    Ready,
    Refused,
)
from paceline.engine.draft_service import DraftService, DraftWork, is_long, merged
from paceline.errors import PacelineError

logger = logging.getLogger(__name__)

DrafterFactory = Callable[[DraftGroupSpec], Drafter]

BEAT_S = 0.25
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_ENGINE_SILENCE_S = 10.0
"""After which an engine that says nothing is gone, and the next may have the worker."""


class Start(msgspec.Struct, frozen=True):
    """What an engine hands to a worker of its own. factory: "module:function". folder: of the endpoint, to
    be removed when the engine dies. parent: its process."""

    endpoint: str
    secret: bytes
    engine_public: bytes
    factory: str
    folder: str
    parent: int


@dataclass(frozen=True, slots=True)
class _Built:
    """engine: that it was made for."""

    spec: DraftGroupSpec
    engine: int
    drafter: Drafter


class _Attachment:
    """One engine's, from its Hello on."""

    def __init__(self, address: bytes, number: int, engine: int, service: DraftService) -> None:
        self.address, self.number, self.engine, self.service = address, number, engine, service
        self.began = self.heard_at = time.perf_counter()
        self.expected = 0


class DraftWorker:
    """Everything happens on the calling thread: all waiting messages, then one pass, and so on."""

    def __init__(self, listener: Listener, factory: DrafterFactory) -> None:
        self._listener = listener
        self._factory = factory
        self._codec = Codec(FOR_WORKER)
        self._attachment: _Attachment | None = None
        self._built: _Built | None = None
        self._beat_at = self._told_s = 0.0
        self._complained = False

    def run(self, stop: threading.Event) -> None:
        """Serves until `stop` is set; engines may come and go."""
        while not stop.is_set():
            self.turn()

    def turn(self) -> None:
        attachment = self._attachment
        idle = attachment is None or not attachment.service.wants_work
        frames = self._listener.receive(BEAT_S if idle else 0.0)
        work = self._sort(frames)
        attachment = self._attachment
        if attachment is None:
            return
        if time.perf_counter() - attachment.heard_at > _ENGINE_SILENCE_S:
            self._end()
            return
        try:
            self._work(attachment, work)
        except Exception as error:
            logger.exception("the drafter failed; it is made anew for the next attachment")
            self._built = None
            self._end(Fault(f"{type(error).__name__}: {error}"))
            return
        settled = self._told_s == MOST_ALLOWED_S and attachment.service.settled
        if settled or time.perf_counter() - self._beat_at >= BEAT_S:
            self._beat(attachment)

    # ------------------------------------------------------------ messages

    def _sort(self, frames: Iterable[tuple[bytes, bytes]]) -> list[DraftWork]:
        """Sees to attachments at once; what is left is the present attachment's work."""
        work: list[DraftWork] = []
        for address, frame in frames:
            try:
                number, at, message = self._codec.decode(frame)
            except Malformed as problem:
                if not self._complained:
                    logger.warning("dropped %s; further ones are dropped without a word", problem)
                self._complained = True
                continue
            if isinstance(message, Hello):
                if self._hello(address, number, message):
                    work = []
                continue
            attachment = self._attachment
            if attachment is None or number != attachment.number:
                continue
            attachment.heard_at = time.perf_counter()
            if isinstance(message, Bye):
                self._end()
            elif not isinstance(message, Ping):
                if at != attachment.expected:
                    self._end(Fault(f"message {attachment.expected} was lost on the way"))
                    continue
                attachment.expected += 1
                work.append(message)
        return work if self._attachment is not None else []

    def _hello(self, address: bytes, number: int, hello: Hello) -> bool:
        """Whether a new attachment began."""
        attachment = self._attachment
        if attachment is not None and attachment.engine != hello.engine:
            self._refuse(address, number, Refused("EngineError", "it works for another engine", busy=True))
            return False
        self._end()
        if hello.protocol != PROTOCOL:
            mine, other = (
                f"{PROTOCOL} (paceline {__version__})",
                f"{hello.protocol} (paceline {hello.version})",
            )
            reason = f"it speaks protocol {mine}, the engine {other}: install the same version on both."
            self._refuse(address, number, Refused("ConfigError", reason))
            return False
        self._send(address, Beat(MOST_ALLOWED_S, 0, 0.0, 0.0), number)
        try:
            spec = msgspec.msgpack.decode(hello.spec, type=DraftGroupSpec)
            drafter = self._drafter(spec, hello.engine)
            service = DraftService(drafter, spec.ahead, spec.ahead_passes)
        except PacelineError as error:
            self._refuse(address, number, Refused(type(error).__name__, str(error)))
            return False
        except Exception as error:
            logger.exception("the drafter cannot be made")
            self._refuse(address, number, Refused("EngineError", f"{type(error).__name__}: {error}"))
            return False
        self._attachment = _Attachment(address, number, hello.engine, service)
        self._send(address, Ready(drafter.needs), number)
        self._beat(self._attachment)
        return True

    def _drafter(self, spec: DraftGroupSpec, engine: int) -> Drafter:
        """The one there is, if it is what this engine wants. What one engine's outputs taught is not for
        another."""
        built = self._built
        if (
            built is None
            or built.spec != spec
            or (built.drafter.needs.learns_outputs and built.engine != engine)
        ):
            self._built = None
            self._built = built = _Built(spec, engine, self._factory(spec))
        return built.drafter

    def _refuse(self, address: bytes, number: int, refused: Refused) -> None:
        self._send(address, refused, number)

    # ------------------------------------------------------------ work

    def _work(self, attachment: _Attachment, work: list[DraftWork]) -> None:
        for message in merged(work):
            if is_long(message):
                self._beat(attachment, MOST_ALLOWED_S)
            done = attachment.service.apply(message)
            if done is not None:
                self._answer(attachment, done)
        nodes = attachment.service.work_ahead()
        if nodes is not None:
            self._answer(attachment, nodes)

    def _answer(self, attachment: _Attachment, message: object) -> None:
        """An engine that does not read is as good as gone: it begins anew when it does."""
        if self._attachment is attachment and not self._send(attachment.address, message, attachment.number):
            self._end()

    def _beat(self, attachment: _Attachment, allow_s: float | None = None) -> None:
        if allow_s is None:
            service = attachment.service
            allow_s = min(10 * service.slowest_s, MOST_ALLOWED_S / 2) if service.settled else MOST_ALLOWED_S
        self._beat_at, self._told_s = time.perf_counter(), allow_s
        up_s = self._beat_at - attachment.began
        service = attachment.service
        self._answer(
            attachment, Beat(allow_s, attachment.expected, service.busy_s, up_s, service.by_distance)
        )

    def _send(self, address: bytes, message: object, number: int) -> bool:
        return self._listener.send(address, self._codec.encode(message, number))

    def _end(self, farewell: Fault | None = None) -> None:
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        if farewell is not None:
            self._send(attachment.address, farewell, attachment.number)
        if self._built is not None:
            try:
                attachment.service.reset()
            except Exception:
                logger.exception("the drafter failed; it is made anew for the next attachment")
                self._built = None


# ---------------------------------------------------------------- a process of its own


def _factory(path: str) -> DrafterFactory:
    module, _, name = path.partition(":")
    factory: DrafterFactory = getattr(import_module(module), name)
    return factory


def _read_start(pipe: IO[bytes]) -> Start:
    size = int.from_bytes(pipe.read(4), "big")
    return msgspec.msgpack.decode(pipe.read(size), type=Start)


def write_start(pipe: IO[bytes], start: Start) -> None:
    frame = msgspec.msgpack.encode(start)
    pipe.write(len(frame).to_bytes(4, "big") + frame)
    pipe.flush()


def _die_with(parent: int, farewell: Callable[[], None]) -> None:
    """The pipe closes when the engine's process ends, however it ends; on Linux the kernel tells us too,
    should another child of the engine still hold the pipe."""

    def leave(signum: int = 0, frame: FrameType | None = None) -> None:  # noqa: ARG001
        farewell()
        os._exit(0)

    def watch() -> None:
        while os.read(0, 1):
            pass
        leave()

    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, leave)
    # Ctrl-C is the engine's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch, name="paceline-parent", daemon=True).start()
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:  # it died before we could ask
        leave()


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="paceline draft worker: %(message)s")
    with open(0, "rb", closefd=False) as pipe:
        start = _read_start(pipe)
    _die_with(start.parent, lambda: shutil.rmtree(start.folder, ignore_errors=True))
    listener = Listener(start.endpoint, start.secret, start.engine_public)
    DraftWorker(listener, _factory(start.factory)).run(threading.Event())
