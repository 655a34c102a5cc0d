"""A chain of guesses below each of several rows: the specification of `HeadDecoder.chain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paceline.kernels import ops
from paceline.kernels.batch import IntArray, TokenBatch

if TYPE_CHECKING:
    from paceline.kernels.kv_cache import KVCache
    from paceline.models.head import HeadDecoder


def draft_chain(
    head: HeadDecoder,
    batch: TokenBatch,
    hidden: Tensor,
    kv: KVCache,
    *,
    slots: IntArray,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `HeadDecoder.chain`."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for step in range(slots.shape[1] + 1):
        if step:
            batch = _next(batch, found[-1][0][:, 0], slots[:, step - 1])
        logits, fed = head.forward(batch, hidden, kv, step % head.spec.num_modules)
        hidden = fed.clone()
        places = [position + step for position in positions]
        tokens, scores = ops.top_candidates(logits, temperatures, seeds, places, count, head.target_ids)
        found.append((tokens.cpu(), scores.cpu(), hidden))
    tokens, scores, fed = (torch.stack(parts, 1) for parts in zip(*found, strict=True))
    return tokens, scores, fed


def _next(batch: TokenBatch, tokens: Tensor, slots: IntArray) -> TokenBatch:
    """One guess below each wanted row of `batch`. A row that has none goes on, for nothing, with token 0."""
    roots = batch.logit_rows
    lengths = batch.path_len[roots] + 1
    paths = [
        np.append(batch.path_slots[start : start + length], slot)
        for start, length, slot in zip(batch.path_start[roots], batch.path_len[roots], slots, strict=True)
    ]
    return replace(
        batch,
        tokens=tokens.clamp(min=0).numpy().astype(np.int32),
        positions=batch.positions[roots] + 1,
        slots=np.ascontiguousarray(slots, dtype=np.int32),
        rows=batch.rows[roots],
        prefix_len=batch.prefix_len[roots],
        path_start=(np.cumsum(lengths) - lengths).astype(np.int32),
        path_len=lengths,
        path_slots=np.concatenate(paths).astype(np.int32),
        logit_rows=np.arange(len(roots), dtype=np.int32),
    )
