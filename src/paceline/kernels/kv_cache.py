"""Keys and values of one decoder, and what is captured of its residual stream, one token per slot."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20


class KVCache:
    """Storage only: who owns which slot is decided elsewhere, by id.

    keys, values: `[num_layers, num_slots, num_kv_heads, head_dim]`, zero at first (a slot that was never
    written may be read under a zero weight, so it must be finite).
    features: `[num_slots, num_captured, hidden_size]`, None when nothing is captured. They go wherever a
    token's slot goes, as its keys and values do.
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        num_captured: int = 0,
        hidden_size: int = 0,
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, head_dim)
        self.keys, self.values = _zeros(shape, dtype, device), _zeros(shape, dtype, device)
        self.features = (
            _zeros((num_slots, num_captured, hidden_size), dtype, device) if num_captured else None
        )

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]

    @property
    def bytes_per_token(self) -> int:
        """Bytes one slot takes over all layers, keys, values and features together."""
        layers, _, heads, dim = self.keys.shape
        captured = 0 if self.features is None else self.features[0].numel()
        return (2 * layers * heads * dim + captured) * self.keys.element_size()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if torch.device(device).type == "cpu":
        return _zeros_in_huge_pages(shape, dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


def _zeros_in_huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A decode step touches every layer once: with small pages it would miss the TLB at every turn."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if size < _HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    region = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without huge pages refuses the advice; the memory serves all the same.
    with contextlib.suppress(OSError):
        region.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(region, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    return torch.frombuffer(region, dtype=dtype, count=count, offset=start).view(shape)
