"""Sums over the ranks of a group by torch.distributed: gloo on CPUs, NCCL on CUDA devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from paceline.errors import EngineError, KernelError
from paceline.execution.devices import current

_distributed: Any = torch.distributed  # its classes are bound from C++ and not declared
_CONNECT = timedelta(seconds=60)
_FOR_EVER = timedelta(days=1)
_POLL_S = 20e-6


class Collective:
    """One rank's end. The process's default group is left alone: it is the host program's, and a process may
    be rank 0 of several groups.

    store: a file that only this user can reach, through which the ranks find each other; it may go after
    `connect`. timeout_s: how long a sum may take before this rank gives up; 0 = for ever.

    Raises KernelError where this build of torch lacks the means.
    """

    def __init__(self, store: Path, rank: int, ranks: int, device: torch.device, timeout_s: float) -> None:
        if not _distributed.is_available():
            raise KernelError("this build of torch has no torch.distributed: give the model one rank.")
        self._store = store
        self._rank = rank
        self._ranks = ranks
        self._device = device
        self._timeout_s = timeout_s
        self._group: Any = None
        self._options: Any = _distributed.distributed_c10d.AllgatherOptions()
        self._options.timeout = timedelta(seconds=timeout_s) if timeout_s else _FOR_EVER

    def connect(self) -> None:
        """Meets the other ranks, which must be about to call this too, else RuntimeError is raised."""
        store = _distributed.FileStore(str(self._store), self._ranks)
        if self._device.type == "cuda":
            options: Any = _distributed.ProcessGroupNCCL.Options()
            # Its own watchdog would end the process: `settle` and `abandon` keep time instead.
            options._timeout = _FOR_EVER
            self._group = _distributed.ProcessGroupNCCL(store, self._rank, self._ranks, options)
        else:
            options = _distributed.ProcessGroupGloo._Options()
            options._timeout = _CONNECT
            # Loopback alone: the ranks share this machine, and nobody else may join.
            options._devices = [_distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            self._group = _distributed.ProcessGroupGloo(store, self._rank, self._ranks, options)
        with current(self._device):
            self.sum(torch.zeros(1, device=self._device))

    def sum(self, part: Tensor) -> Tensor:
        """The ranks' parts, added in rank order: the same bits on every rank, whatever else shares the pass.

        Raises RuntimeError when a rank does not come; on CUDA sums are only queued here, and `settle` raises.
        """
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self._ranks)]
        self._group.allgather([parts], [part], self._options).wait()
        total = parts[0]
        for other in parts[1:]:
            total += other
        return total

    def settle(self, check: Callable[[], None]) -> None:
        """Waits until the device has done what is queued; elsewhere sums are done when they return.

        check: raises when the group is lost. Raises EngineError when it takes longer than `timeout_s`.
        """
        if self._device.type != "cuda":
            return
        with current(self._device):
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        started = time.monotonic()
        while not done.query():
            check()
            if self._timeout_s and time.monotonic() - started > self._timeout_s:
                raise EngineError("a rank of the group did not come to a sum of the pass")
            time.sleep(_POLL_S)

    def abandon(self) -> None:
        """Ends what is queued on the device, so that the process can go on without the other ranks."""
        if self._device.type == "cuda" and self._group is not None:
            self._group.abort()
