"""Ctrl-C that ends an answer, or what is under way, and not the program at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Within, a first Ctrl-C only makes the yielded function true; a second one raises KeyboardInterrupt.

    The engine runs in this process: an exception in the middle of a step would leave it half done.
    """
    pending = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal pending
        if pending:
            signal.default_int_handler(signum, frame)
        pending = True

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pending
    finally:
        signal.signal(signal.SIGINT, previous)


class Stop(threading.Event):
    """exit_code: as a shell reports a command that the signal ended."""

    exit_code = 0


@contextmanager
def told_to_stop() -> Iterator[Stop]:
    """Within, the first Ctrl-C or SIGTERM sets the event, so that what is under way comes to its end; the
    second does not wait for it."""
    stop = Stop()

    def note(signum: int, frame: FrameType | None) -> None:
        if stop.is_set():
            signal.default_int_handler(signum, frame)
        stop.exit_code = 128 + signum
        stop.set()

    previous = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
