"""Rows of tensors, moved by the thread that asks: torch would wake threads of its own for many of them, which
then wait busily where the next pass wants to run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def taken(source: Tensor, index: Any) -> Tensor:
    """A copy of what `index`, as of a numpy array, says."""
    if source.device.type != "cpu":
        return source[torch.from_numpy(index) if isinstance(index, np.ndarray) else index]
    return torch.from_numpy(_bits(source)[index]).view(source.dtype)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """One after the other; of a single one itself."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].device.type != "cpu":
        return torch.cat(list(parts))
    return torch.from_numpy(np.concatenate([_bits(part) for part in parts])).view(parts[0].dtype)


def _bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    """numpy has no bfloat16."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
