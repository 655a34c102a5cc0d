"""Ctrl-C that comes after what must not stop half-way."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Hold:
    """handler: who gets the signal in the end.  noted: signals that it has not got yet."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self.handler = handler
        self.noted: list[FrameType | None] = []

    def note(self, _: int, frame: FrameType | None) -> None:
        self.noted.append(frame)

    def pass_on(self) -> None:
        signal.signal(signal.SIGINT, self.handler)
        if self.noted:
            frame = self.noted[-1]
            self.noted.clear()
            self.handler(signal.SIGINT, frame)


_holds: list[_Hold] = []
"""Of the main thread, the innermost last."""


def _in_main_thread() -> bool:
    """Python runs handlers there alone: in another thread nothing has to be done."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within, SIGINT is only noted; afterwards the handler that was there gets it."""
    handler = signal.getsignal(signal.SIGINT)
    if not _in_main_thread() or not callable(handler):
        yield
        return
    hold = _Hold(handler)
    signal.signal(signal.SIGINT, hold.note)
    _holds.append(hold)
    try:
        yield
    finally:
        _holds.remove(hold)
        hold.pass_on()


@contextmanager
def interruptible() -> Iterator[None]:
    """A stretch within `uninterrupted` that SIGINT may end, also one that was noted before."""
    if not _holds or not _in_main_thread():
        yield
        return
    hold = _holds[-1]
    try:
        hold.pass_on()
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, hold.note)
    except BaseException:
        signal.signal(signal.SIGINT, hold.note)  # the signal may have come before the line above
        raise


def pending() -> bool:
    """Whether a noted SIGINT waits for the end of `uninterrupted`."""
    return _in_main_thread() and any(hold.noted for hold in _holds)
