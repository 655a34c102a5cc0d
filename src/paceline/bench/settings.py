"""What is the same for every cell of a benchmark."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.bench.matrix import Load
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Settings:
    """requests: per cell, more where a batch is larger.  longest: tokens of a prompt; longer ones are left
    out.  warm_up: tokens decoded before the clock starts.  raw: prompts go without the chat template.
    seed: of arrivals."""

    params: SamplingParams
    requests: int = 16
    longest: int = 1500
    warm_up: int = 16
    raw: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for option, value, least in (
            ("--requests", self.requests, 1),
            ("--longest", self.longest, 1),
            ("--warm-up", self.warm_up, 0),
        ):
            if value < least:
                raise ConfigError(f"{option} is {value}: give a whole number from {least}.")

    def count(self, load: Load) -> int:
        return max(self.requests, load.batch or 0)

    @property
    def description(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "machine": machine(),
            "params": asdict(self.params),
            "requests": self.requests,
            "longest": self.longest,
            "warm_up": self.warm_up,
            "raw": self.raw,
            "seed": self.seed,
        }


def machine() -> str:
    """Processor and number of cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{_processor()}, {cores} cores, {platform.system()}, Python {platform.python_version()}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
