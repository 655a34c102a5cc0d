"""The device that CUDA calls without one in their arguments mean: streams, events, recordings, memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def current(device: torch.device | str) -> AbstractContextManager[object]:
    """Within, a CUDA device is this thread's current one: a recording of what another one does is empty.
    Other devices need no such thing."""
    device = torch.device(device)
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def settled(tensor: Tensor) -> Tensor:
    """`tensor`, once its device has computed it: before what needs it at once and is to be timed alone."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return tensor
