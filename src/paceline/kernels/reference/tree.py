"""Attention of new tokens over the slots that each of them names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels.batch import TokenBatch

BLOCK_TOKENS = 8


@dataclass(frozen=True)
class TreePlan:
    """What every token of a pass sees, int32 on the device: the fields of `TokenBatch`, and which tokens may
    share loads.

    A token's ancestors are its path slots, in position order: no mask, no bitset. A draft whose queries are a
    few leaves of a larger tree lists its ancestors' slots like anyone else.

    tables `[R, W]`: the rows that occur, cut or filled up to W positions; W bounds every position.
    blocks `[B, BLOCK_TOKENS]`: indices of tokens of one row each, -1 where there is none; every token is in
    one block.
    """

    rows: Tensor  # [T]
    positions: Tensor  # [T]
    prefix_len: Tensor  # [T]
    path_start: Tensor  # [T]
    path_len: Tensor  # [T]
    path_slots: Tensor  # [P]
    tables: Tensor
    blocks: Tensor

    def tensors(self) -> list[Tensor]:
        return [*vars(self).values()]


def plan_tree(batch: TokenBatch, device: torch.device, *, pad_slots_to: int = 1) -> TreePlan:
    """`batch` as a `TreePlan`. pad_slots_to: W and P are rounded up to a multiple of this."""
    used, rows = np.unique(batch.rows, return_inverse=True)
    longest = int(batch.positions.max(initial=0)) + 1
    width = -(-longest // pad_slots_to) * pad_slots_to
    tables = np.zeros((len(used), width), dtype=np.int32)
    known = min(width, batch.tables.shape[1])
    tables[:, :known] = batch.tables[used, :known]
    paths = np.zeros(-(-max(len(batch.path_slots), 1) // pad_slots_to) * pad_slots_to, dtype=np.int32)
    paths[: len(batch.path_slots)] = batch.path_slots
    arrays = (batch.positions, batch.prefix_len, batch.path_start, batch.path_len, paths, tables)
    row_ids = rows.astype(np.int32)
    return TreePlan(*(torch.from_numpy(a).to(device) for a in (row_ids, *arrays, _blocks(row_ids))))


def _blocks(rows: NDArray[np.int32]) -> NDArray[np.int32]:
    order = np.argsort(rows, kind="stable")
    members = np.split(order, np.flatnonzero(np.diff(rows[order])) + 1)
    cut = [some[i : i + BLOCK_TOKENS] for some in members for i in range(0, len(some), BLOCK_TOKENS)]
    blocks = np.full((len(cut), BLOCK_TOKENS), -1, dtype=np.int32)
    for block, tokens in zip(blocks, cut, strict=True):
        block[: len(tokens)] = tokens
    return blocks


def tree_attention(
    q: Tensor, keys: Tensor, values: Tensor, plan: TreePlan, scale: float, window: int
) -> Tensor:
    """q `[T, heads, D]` over one layer's cache `[S, kv_heads, D]`; float32 `[T, heads, D]`.

    Scores and softmax are float32. Query head h reads key-value head `h // (heads / kv_heads)`. A token at
    position p sees the positions above `p - window`, or all if window is 0.
    """
    at = torch.arange(plan.tables.shape[1], device=q.device)
    start = plan.prefix_len[:, None]
    own = plan.path_start[:, None] + at - start
    slots = torch.where(
        at < start, plan.tables[plan.rows], plan.path_slots[own.clamp(0, len(plan.path_slots) - 1)]
    )
    distance = plan.positions[:, None] - at
    seen = (distance >= 0) & (distance < window) if window else distance >= 0
    group = q.shape[1] // keys.shape[1]
    k = keys[slots].float().repeat_interleave(group, dim=2)
    v = values[slots].float().repeat_interleave(group, dim=2)
    scores = torch.einsum("thd,tuhd->thu", q.float(), k) * scale
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    return torch.einsum("thu,tuhd->thd", scores.softmax(-1), v)
