"""What this machine offers: device, arithmetic, cores and memory, within the limits set for this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import psutil
import torch

from paceline.config import Config
from paceline.errors import ConfigError

Precision = Literal["float32", "bfloat16", "int8"]

_CGROUP = Path("/sys/fs/cgroup")


def resolve_device(config: Config) -> str:
    """`cpu` or `cuda`. Raises ConfigError for a device or a precision on it that is not to be had."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError(
            "device is cuda but torch sees no CUDA device: choose device = cpu, or fix the driver."
        )
    device = ("cuda" if has_cuda else "cpu") if config.device == "auto" else config.device
    if device == "cuda" and "int8" in (config.dtype, config.speculation.draft_dtype):
        raise ConfigError("int8 weights run on the CPU only: choose dtype = bfloat16, or device = cpu.")
    return device


def resolve_precision(asked: str, device: str) -> Precision:
    """As asked; `auto` is bfloat16 where the device multiplies in it, float32 elsewhere."""
    if asked in ("float32", "bfloat16", "int8"):
        return asked  # type: ignore[return-value]
    return "bfloat16" if device == "cuda" or _has_bf16_arithmetic() else "float32"


def _has_bf16_arithmetic() -> bool:
    flags = _read(Path("/proc/cpuinfo"))
    return "avx512_bf16" in flags or "amx_bf16" in flags


def num_threads(configured: int) -> int:
    """As configured, else the cores this process may use: its affinity, within its CPU quota."""
    if configured:
        return configured
    usable = len(usable_cores())
    quota, _, period = _read(_CGROUP / "cpu.max").strip().partition(" ")
    if quota.isdecimal() and period.isdecimal():
        usable = min(usable, max(1, int(quota) // int(period)))
    return usable


def usable_cores() -> list[int]:
    """Numbers of the cores that this process may use; all of them where the system does not say."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def free_memory(device: str) -> int:
    """Bytes that can be had without swapping, within this process's memory limit. device: `cpu`, or a CUDA
    device with or without its number."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(None if device == "cuda" else torch.device(device))[0]
    free: int = psutil.virtual_memory().available
    limit, used = (_read(_CGROUP / name).strip() for name in ("memory.max", "memory.current"))
    return max(0, min(free, int(limit) - int(used))) if limit.isdecimal() and used.isdecimal() else free


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="ignore")
    except OSError:
        return ""
