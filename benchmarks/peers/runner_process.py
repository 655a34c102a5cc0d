"""One engine's runner, started once and asked for measurements over its standard input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.machine import Disturbance, Watch

HERE = Path(__file__).resolve().parent


class RunnerError(Exception):
    """The runner ended, ran out of time or could not serve what was asked."""


@dataclass(frozen=True)
class EngineConfig:
    """One `[[engine]]` table of the configuration file.

    runner: NAME of `run_NAME.py`, or a script's path.  python: the interpreter that has the engine.
    batches: the sizes it can do.  options: more options of its runner.  env: more environment, in which
    variables are expanded.
    """

    label: str
    runner: str
    python: str
    model: str
    precision: str = "bf16"
    speculation: str = "none"
    num_speculative_tokens: int = 5
    batches: Sequence[int] = (1, 8)
    options: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)

    @property
    def script(self) -> Path:
        return Path(self.runner) if self.runner.endswith(".py") else HERE / f"run_{self.runner}.py"

    def command(self, threads: int, max_batch: int) -> list[str]:
        return [
            os.path.expanduser(self.python),
            str(self.script),
            "--control",
            f"--model={os.path.expanduser(self.model)}",
            f"--threads={threads}",
            f"--precision={self.precision}",
            f"--speculation={self.speculation}",
            f"--num-speculative-tokens={self.num_speculative_tokens}",
            f"--max-batch={max_batch}",
            *map(os.path.expandvars, map(os.path.expanduser, self.options)),
        ]

    def environment(self) -> dict[str, str]:
        return os.environ | {key: os.path.expandvars(value) for key, value in self.env.items()}


class RunnerProcess:
    """A runner in a process group of its own, which lies still (SIGSTOP) except while it measures."""

    def __init__(
        self, config: EngineConfig, threads: int, max_batch: int, log: Path, patience_s: float
    ) -> None:
        self.config = config
        self._patience_s = patience_s
        with log.open("w", encoding="utf-8") as stderr:
            self._process = subprocess.Popen(
                config.command(threads, max_batch),
                env=config.environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        self.group = self._process.pid
        self.identity: dict[str, Any] = {}
        try:
            self.identity = self._read_line()
        except RunnerError as error:
            self.close()
            raise RunnerError(f"{error}; see {log}") from None
        self._signal(signal.SIGSTOP)

    def measure(self, prompts: list[list[int]], new_tokens: int) -> tuple[dict[str, Any], Disturbance]:
        """One record of `protocol.Record`, and who else used the machine meanwhile. Raises RunnerError."""
        self._signal(signal.SIGCONT)
        try:
            watch = Watch(self.group)
            record = self._ask({"prompts": prompts, "new_tokens": new_tokens})
            return record, watch.stop()
        finally:
            self._signal(signal.SIGSTOP)

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RunnerError(f"the runner ended with status {self._process.wait()}") from None
        record = self._read_line()
        if "error" in record:
            raise RunnerError(record["error"])
        return record

    def close(self) -> None:
        """End the runner and whatever it started."""
        self._signal(signal.SIGCONT)
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read_line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(self._patience_s, self._signal, (signal.SIGKILL,))
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise RunnerError(f"the runner ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self.group, number)
