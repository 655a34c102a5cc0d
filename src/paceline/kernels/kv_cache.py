"""Keys and values of one decoder, one token per slot."""

from __future__ import annotations

import torch


class KVCache:
    """Storage only: who owns which slot is decided elsewhere, by id.

    keys, values: `[num_layers, num_slots, num_kv_heads, head_dim]`, zero at first (a slot that was never
    written may be read under a zero weight, so it must be finite).
    """

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]

    @property
    def bytes_per_token(self) -> int:
        """Bytes one slot takes over all layers, keys and values together."""
        layers, _, heads, dim = self.keys.shape
        return 2 * layers * heads * dim * self.keys.element_size()
