"""One model on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.execution.devices import current
from paceline.execution.forward_batch import Segment, SlotTables, build_batch
from paceline.kernels.batch import TokenBatch
from paceline.kernels.kv_cache import KVCache
from paceline.models.spec import DecoderSpec


class Decoder(Protocol):
    """A model's forward pass. The logits may live in a buffer that the next call overwrites.

    capture: the places in the residual stream that it writes to the cache's features.
    """

    spec: DecoderSpec
    capture: tuple[int, ...]

    @property
    def kv_dtype(self) -> torch.dtype:
        """What its KV cache holds."""
        ...

    def forward(self, batch: TokenBatch, kv: KVCache, layers: int | None = None) -> Tensor:
        """layers: only the first so many run, then the final norm and the head; None = all."""
        ...


class ModelRunner:
    """A decoder with its KV and slot tables; target and draft model alike."""

    def __init__(self, decoder: Decoder, kv: KVCache, *, num_rows: int, context_length: int) -> None:
        self.decoder = decoder
        self.kv = kv
        self.tables = SlotTables(num_rows, context_length)

    @property
    def vocab_size(self) -> int:
        return self.decoder.spec.vocab_size

    def forward(self, segments: Sequence[Segment], layers: int | None = None) -> Tensor:
        """Float32 logits `[wanted tokens, vocab]`: per wanted segment the root's row, then each guess's.

        layers: only the first so many run, then the final norm and the head; None = all. Keys and values of
        those layers are written, and nothing is captured."""
        batch = build_batch(segments, self.tables)
        with current(self.kv.keys.device):
            return self.decoder.forward(batch, self.kv, layers)

    def close(self) -> None:
        """Ends what the runner keeps beside this process; no pass may follow."""
