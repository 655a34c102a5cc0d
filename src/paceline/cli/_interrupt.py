"""Ctrl-C that ends an answer and not the program."""

from __future__ import annotations

import signal
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
