"""The device that CUDA calls without one in their arguments mean: streams, events, recordings, memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def current(device: torch.device | str) -> AbstractContextManager[object]:
    """Within, a CUDA device is this thread's current one: a recording of what another one does is empty.
    Other devices need no such thing."""
    device = torch.device(device)
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
