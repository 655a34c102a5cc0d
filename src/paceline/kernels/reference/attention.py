"""Attention of new tokens over cached slots, and the index tensors one pass needs for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.kernels.batch import TokenBatch


@dataclass(frozen=True)
class Bucket:
    """B rows with N new tokens each, over U slots.

    tokens `[B, N]`: indices into the batch. slots `[B, U]`: a row's slots, padded with one of its own.
    masks: for each window of the model, bool `[B, 1, N, U]`, True where the token sees the slot.
    """

    tokens: Tensor
    slots: Tensor
    masks: dict[int, Tensor]


SlotPlan = list[Bucket]


def plan_slots(
    batch: TokenBatch,
    windows: Sequence[int],
    device: torch.device,
    *,
    separate: bool,
    pad_slots_to: int = 1,
) -> SlotPlan:
    """Index tensors for all layers of a pass. separate: a bucket per token, shaped by its position alone.
    pad_slots_to: U is rounded up to a multiple of this."""
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(batch.rows.tolist()):
        groups.setdefault(i if separate else row, []).append(i)
    by_size: dict[int, list[list[int]]] = {}
    for members in groups.values():
        by_size.setdefault(len(members), []).append(members)
    if separate:
        return [_bucket(batch, [members], windows, device, pad_slots_to) for members in groups.values()]
    return [_bucket(batch, same, windows, device, pad_slots_to) for same in by_size.values()]


def _bucket(
    batch: TokenBatch, members: list[list[int]], windows: Sequence[int], device: torch.device, pad_to: int
) -> Bucket:
    seen = [_row_view(batch, tokens) for tokens in members]
    width = -(-max(len(slots) for slots, _ in seen) // pad_to) * pad_to
    slots = np.empty((len(members), width), dtype=np.int64)
    offsets = np.full((len(members), len(members[0]), width), -1, dtype=np.int64)
    for i, (row_slots, row_offsets) in enumerate(seen):
        slots[i, : len(row_slots)] = row_slots
        slots[i, len(row_slots) :] = row_slots[-1]
        offsets[i, :, : len(row_slots)] = row_offsets
    masks = {w: torch.from_numpy(_visible(offsets, w)[:, None]).to(device) for w in sorted(set(windows))}
    return Bucket(torch.tensor(members, device=device), torch.from_numpy(slots).to(device), masks)


def _row_view(batch: TokenBatch, tokens: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The slots that a row's tokens see between them, and each token's distance to each (-1: not seen)."""
    prefix = int(batch.prefix_len[tokens].max())
    paths = [_path(batch, t) for t in tokens]
    extra = {
        int(slot): i for i, slot in enumerate(dict.fromkeys(s for p in paths for s in p.tolist()), prefix)
    }
    table = batch.tables[batch.rows[tokens[0]], :prefix]
    slots = np.concatenate((table, np.fromiter(extra, np.int64, len(extra)))).astype(np.int64)
    distance = np.full((len(tokens), len(slots)), -1, dtype=np.int64)
    for i, (t, path) in enumerate(zip(tokens, paths, strict=True)):
        length = int(batch.prefix_len[t])
        distance[i, :length] = int(batch.positions[t]) - np.arange(length)
        distance[i, [extra[s] for s in path.tolist()]] = np.arange(len(path))[::-1]
    return slots, distance


def _path(batch: TokenBatch, token: int) -> NDArray[np.int32]:
    start = int(batch.path_start[token])
    return batch.path_slots[start : start + int(batch.path_len[token])]


def _visible(distance: NDArray[np.int64], window: int) -> NDArray[np.bool_]:
    seen = distance >= 0
    return seen & (distance < window) if window else seen


def slot_attention(
    q: Tensor, keys: Tensor, values: Tensor, plan: SlotPlan, scale: float, window: int
) -> Tensor:
    """q `[T, heads, D]` over one layer's cache `[S, kv_heads, D]`; float32 `[T, heads, D]`.

    Scores and softmax are float32. Query head h reads key-value head `h // (heads / kv_heads)`.
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for bucket in plan:
        out[bucket.tokens] = _bucket_attention(q, keys, values, bucket, scale, window)
    return out


def _bucket_attention(
    q: Tensor, keys: Tensor, values: Tensor, bucket: Bucket, scale: float, window: int
) -> Tensor:
    group = q.shape[1] // keys.shape[1]
    query = q[bucket.tokens].transpose(1, 2).float()
    k = keys[bucket.slots].transpose(1, 2).float().repeat_interleave(group, dim=1)
    v = values[bucket.slots].transpose(1, 2).float().repeat_interleave(group, dim=1)
    scores = (query @ k.transpose(-1, -2)) * scale
    scores = scores.masked_fill(~bucket.masks[window], float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)
