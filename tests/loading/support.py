"""Running what was loaded."""

from __future__ import annotations

import numpy as np
import torch

from paceline.kernels.batch import TokenBatch
from paceline.kernels.kv_cache import KVCache
from paceline.models.spec import DecoderSpec, DecoderWeights
from paceline.models.torch_decoder import TorchDecoder


def logits(spec: DecoderSpec, weights: DecoderWeights, ids: list[int]) -> torch.Tensor:
    """Logits `[len(ids), vocab]` in float32 of one sequence, in one pass."""
    decoder = TorchDecoder(spec, weights)
    length = len(ids)
    cache = KVCache(spec.num_layers, length, spec.num_kv_heads, spec.head_dim, torch.float32)
    place = np.arange(length, dtype=np.int32)
    zeros = np.zeros(length, dtype=np.int32)
    batch = TokenBatch(
        tokens=np.array(ids, dtype=np.int32),
        positions=place,
        slots=place,
        rows=zeros,
        prefix_len=place + 1,
        path_start=zeros,
        path_len=zeros,
        path_slots=np.zeros(0, dtype=np.int32),
        tables=place[None, :],
        logit_rows=place,
    )
    return decoder.forward(batch, cache)
