"""Where a draft worker lives: a process of the engine's own, or another host's `paceline draft`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paceline.engine.channel import Address, Keys, check_endpoint, read_key_file
from paceline.engine.draft_worker import Start, write_start
from paceline.errors import ConfigError, EngineError

_LONGEST_SOCKET_FOLDER = 80
"""A Unix socket's path has at most 107 characters (unix(7))."""


class DraftHost(Protocol):
    """Used from one thread, which must live as long as the worker is wanted."""

    name: str
    connect_s: float
    """How long a connection may take to come about."""

    def ensure(self) -> Address:
        """Where the worker listens; one that has ended is started anew. Raises EngineError or ConfigError."""
        ...

    def ended(self) -> str | None:
        """How the process ended, if it is ours and did."""
        ...

    def end(self) -> None:
        """Ends the process, if it is ours, and leaves nothing of it behind."""
        ...


@dataclass
class LocalHost:
    """A child process, in a folder that only this user enters, with keys made for this start.

    factory: "module:function" that makes the drafter from a DraftGroupSpec.  cores: to be pinned to.
    """

    factory: str
    cores: tuple[int, ...] = ()
    name: str = "the draft worker"
    connect_s: float = 300.0
    """Python, torch and the drafter's modules are imported before a worker listens."""

    def __post_init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""
        self._address: Address | None = None

    def ensure(self) -> Address:
        if self._process is not None and self._process.poll() is None and self._address is not None:
            return self._address
        self.end()
        self._folder = _private_folder()
        self._address = Address(f"ipc://{self._folder}/draft", Keys.new())
        try:
            self._process = self._spawn()
        except OSError as error:
            self.end()
            raise EngineError(f"cannot start the draft worker: {error.strerror}.") from error
        keys = self._address.keys
        start = Start(
            self._address.endpoint, keys.worker, keys.engine_public, self.factory, self._folder, os.getpid()
        )
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(OSError):  # it ended already: `ended` says how
            write_start(pipe, start)
        return self._address

    def ended(self) -> str | None:
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return None
        return f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # also where it is stopped; it holds nothing that must be saved
            with suppress(subprocess.TimeoutExpired):  # the kernel may hold on to it, as with a dead disk
                process.wait(timeout=10)
            if process.stdin is not None:
                process.stdin.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    def _spawn(self) -> subprocess.Popen[bytes]:
        """The child takes its cores from the thread that starts it, so that every library it loads sees
        only those; its own process group keeps the terminal's Ctrl-C from it."""
        command = [sys.executable, "-P", "-c", "from paceline.engine.draft_worker import main; main()"]
        # As here, and nothing besides: `-P` keeps the working directory out.
        paths = [os.path.abspath(path) for path in sys.path]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        before = _pin(self.cores)
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env=environment,
                process_group=0,
            )
        finally:
            if before:
                os.sched_setaffinity(0, before)


@dataclass
class RemoteHost:
    """endpoint: tcp://HOST:PORT, where `paceline draft --listen` runs with the same key file."""

    endpoint: str
    key_file: Path
    connect_s: float = 10.0

    def __post_init__(self) -> None:
        check_endpoint(self.endpoint, "the draft worker's address")
        self.name = f"the draft worker at {self.endpoint}"
        self._address = Address(self.endpoint, read_key_file(self.key_file))

    def ensure(self) -> Address:
        return self._address

    def ended(self) -> str | None:
        return None

    def end(self) -> None:
        """It serves others after us."""


def _private_folder() -> str:
    folder = tempfile.mkdtemp(prefix="paceline-")  # mode 0700
    if len(folder) > _LONGEST_SOCKET_FOLDER and os.path.isdir("/tmp"):
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="paceline-", dir="/tmp")
    return folder


def _pin(cores: tuple[int, ...]) -> set[int]:
    """Pins this thread, and returns where it was allowed to run before; empty if nothing was changed."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return set()
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        raise ConfigError(
            f"the draft worker's cores are {sorted(cores)} but this process may use {sorted(before)}: "
            "choose among those."
        ) from None
    return before
