"""What an engine with two lanes changes of the whole process, for as long as there is one."""

from __future__ import annotations

import gc
import sys
import threading

_SWITCH_S = 0.0005
"""How long a thread that is handling an event may keep the target's from going on once its native pass is
over (sys.setswitchinterval); Python's own 5 ms are as long as a pass."""
_GC_OBJECTS = 50_000
"""Objects made and still there, after which the collector looks for cycles (gc.set_threshold). Python's own
some hundreds come together every few steps, and looking holds a pass up; this many take a host program that
makes cycles of its own, whose memory still comes back."""

_lock = threading.Lock()
_users = 0
_before: tuple[float, tuple[int, int, int]] = (0.0, (0, 0, 0))


def enter() -> None:
    """The first one in changes the process. What was loaded by then is never looked at for garbage again."""
    global _users, _before
    with _lock:
        _users += 1
        if _users > 1:
            return
        _before = sys.getswitchinterval(), gc.get_threshold()
        sys.setswitchinterval(min(_before[0], _SWITCH_S))
        gc.collect()  # or what is garbage now would be kept
        gc.freeze()
        gc.set_threshold(max(_GC_OBJECTS, _before[1][0]), *_before[1][1:])


def leave() -> None:
    """The last one out puts everything back."""
    global _users
    with _lock:
        _users -= 1
        if _users:
            return
        sys.setswitchinterval(_before[0])
        gc.set_threshold(*_before[1])
        gc.unfreeze()
