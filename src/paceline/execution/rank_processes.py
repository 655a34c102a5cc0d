"""The processes of a group's ranks but the first: started, fed, watched and ended by rank 0."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import BinaryIO, cast

import msgspec

from paceline.errors import EngineError
from paceline.execution.rank_model import RankSetup

_START_SECONDS = 900.0
_END_SECONDS = 2.0
_EXIT_SECONDS = 0.5
_TAIL_LINES = 12
_TAIL_BYTES = 8192


@dataclass(slots=True)
class _Rank:
    index: int
    process: subprocess.Popen[bytes]
    connection: Connection
    stderr: BinaryIO
    watcher: threading.Thread | None = None

    def end(self) -> str:
        """How the process ended, and the last it had to say."""
        code = self.process.returncode
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with status {code}"
        size = self.stderr.seek(0, os.SEEK_END)
        self.stderr.seek(max(0, size - _TAIL_BYTES))
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
        said = ": " + "\n".join(lines) if lines else ""
        return f"rank {self.index} (process {self.process.pid}) {how}{said}"


class RankProcesses:
    """Once one of them has gone the group is lost: the others are killed, and everything raises what `check`
    raises. Nothing outlives `close`, and each process ends by itself when this one is gone.
    """

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []
        self._on_loss: list[Callable[[], None]] = []
        self._cause = ""
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._lost: str | None = None
        self._closed = False

    def start(self, setups: Sequence[RankSetup]) -> None:
        """A process for each setup. Raises EngineError when the system refuses one."""
        for setup in setups:
            try:
                rank = _start(setup)
            except OSError as error:
                raise EngineError(
                    f"the system refuses a process for rank {setup.rank}: {error}. Raise the limit on "
                    "processes or open files, or give the model fewer ranks."
                ) from error
            self._ranks.append(rank)
            rank.watcher = threading.Thread(target=self._watch, args=(rank,), daemon=True)
            rank.watcher.start()

    def wait_ready(self) -> None:
        """Returns when every rank has loaded its share. Raises EngineError when one cannot."""
        pending = {rank.connection: rank for rank in self._ranks}
        deadline = time.monotonic() + _START_SECONDS
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise EngineError(
                    f"{len(pending)} ranks were not ready after {_START_SECONDS:.0f} s. Look for what keeps "
                    "the disk or the network busy, or give the model one rank."
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                del pending[connection]
                try:
                    connection.recv_bytes()
                except (EOFError, OSError) as error:
                    # The first to end is the one to tell of: it ended the others.
                    if not self._ended.wait(_END_SECONDS):
                        self._lose(f"{type(error).__name__}: {error}")
                    raise EngineError(
                        f"{self._cause}\nIt could not start: correct that, or give the model one rank."
                    ) from error

    def on_loss(self, callback: Callable[[], None]) -> None:
        """Calls it when the group is lost: once, from any thread."""
        with self._lock:
            self._on_loss.append(callback)
        if self._lost is not None:
            callback()

    def send(self, message: bytes) -> None:
        """To every rank. Raises OSError when one takes nothing."""
        for rank in self._ranks:
            rank.connection.send_bytes(message)

    def check(self) -> None:
        """Raises EngineError when the group is lost or closed."""
        if self._lost is not None:
            raise EngineError(self._lost)

    def lose(self, error: BaseException) -> EngineError:
        """Ends the group because a pass did not; what to raise."""
        # A rank's end is the better reason, and is known a moment after its effects.
        self._ended.wait(_EXIT_SECONDS)
        self._lose(f"{type(error).__name__}: {error}")
        assert self._lost is not None
        return EngineError(self._lost)

    def close(self) -> None:
        """Ends the processes, within seconds; any number of times."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lost = self._lost or "the group of ranks is closed."
        for rank in self._ranks:
            rank.connection.close()
        deadline = time.monotonic() + _END_SECONDS
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            rank.process.kill()
            rank.process.wait()
            if rank.watcher is not None:
                rank.watcher.join()
            rank.stderr.close()

    def _watch(self, rank: _Rank) -> None:
        rank.process.wait()
        with self._lock:
            if not self._closed:
                self._lose(rank.end())
        self._ended.set()

    def _lose(self, cause: str) -> None:
        with self._lock:
            if self._lost is not None:
                return
            self._cause = cause
            self._lost = (
                f"the group of {len(self._ranks) + 1} ranks that share the model is lost: {cause}\n"
                "Restart to serve again."
            )
            for rank in self._ranks:
                rank.process.kill()
            callbacks = list(self._on_loss)
        for callback in callbacks:
            callback()


def _start(setup: RankSetup) -> _Rank:
    with ExitStack() as on_failure:
        ours, theirs = socket.socketpair()
        stderr = cast(BinaryIO, on_failure.enter_context(tempfile.TemporaryFile()))
        # A rank that takes nothing must not stop rank 0: a send waits no longer than a sum.
        seconds, rest = divmod(setup.group.timeout_s, 1)
        patience = struct.pack("ll", int(seconds), int(rest * 1e6))
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        connection = Connection(ours.detach())
        on_failure.callback(connection.close)
        with theirs:
            process = subprocess.Popen(
                # -P: a file in the working directory must not stand in for a module.
                [sys.executable, "-P", "-m", "paceline.execution.rank", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=stderr,
                stderr=stderr,
                pass_fds=[theirs.fileno(), *([setup.group.memory] if setup.group.memory >= 0 else [])],
                env={**os.environ, "PYTHONPATH": _search_path()},
                start_new_session=True,  # Ctrl-C and Ctrl-Z at the terminal are for rank 0 alone
            )
        on_failure.pop_all()
    with suppress(OSError):  # it has ended already, and is known to have
        connection.send_bytes(msgspec.msgpack.encode(setup))
    return _Rank(setup.rank, process, connection, stderr)


def _search_path() -> str:
    return os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, sys.path)])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
