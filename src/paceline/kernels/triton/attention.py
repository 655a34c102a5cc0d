"""tree_attention: split over positions, then combined by a second launch.

The unit of work is up to eight tokens of one row, one key-value head and one stretch of positions. Positions
in which all those tokens read the same slots are loaded once for all of them; from the first block of
positions that holds a path on, each token's slots are loaded for it alone. Both go through products of one
shape, and stretches and blocks are aligned to absolute positions, so that what a token adds up, and in which
order, follows from its position alone. Keys and values are read where they lie.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.batch import TokenBatch
from paceline.kernels.reference.tree import BLOCK_TOKENS, TreePlan

SPLIT = 256
"""Positions of one unit of work."""
BLOCK = 64
"""Positions of one product."""
_MOST_STATES = 8192
_LOG2_E = 1.4426950408889634
_INFINITY = tl.constexpr(float("inf"))
_NEVER = tl.constexpr(2**31 - 1)


def takes_tree(batch: TokenBatch) -> bool:
    """Whether the partial results of a pass are small beside its keys and values; prompts are not."""
    splits = triton.cdiv(int(batch.positions.max(initial=0)) + 1, SPLIT)
    return bool(0 < len(batch) * splits <= _MOST_STATES)


def tree_attention(
    q: Tensor, keys: Tensor, values: Tensor, plan: TreePlan, scale: float, window: int
) -> Tensor:
    """See `reference.tree.tree_attention`. Two launches. Weights are rounded to the cache's dtype.

    q: in the cache's dtype. keys, values: contiguous.
    """
    tokens, heads, dim = q.shape
    kv_heads = keys.shape[1]
    splits = triton.cdiv(plan.tables.shape[1], SPLIT)
    sums = torch.empty((tokens, heads, splits, dim), dtype=torch.float32, device=q.device)
    stats = torch.empty((tokens, heads, splits, 2), dtype=torch.float32, device=q.device)
    out = torch.empty((tokens, heads, dim), dtype=torch.float32, device=q.device)
    shape = {"WINDOW": window, "DIM": dim, "DIM_PAD": max(16, triton.next_power_of_2(dim)), "SPLIT": SPLIT}
    group = heads // kv_heads
    with torch.cuda.device_of(q):
        attend_kernel[(len(plan.blocks), kv_heads, splits)](
            *(q.contiguous(), keys, values, sums, stats, plan.blocks, plan.rows, plan.positions),
            *(plan.prefix_len, plan.path_start, plan.path_len, plan.path_slots, plan.tables),
            *(plan.tables.shape[1], scale * _LOG2_E),
            **shape,
            TOKENS=BLOCK_TOKENS,
            GROUP=group,
            GROUP_PAD=max(2, triton.next_power_of_2(group)),
            BLOCK=BLOCK,
            enable_fp_fusion=True,
        )
        combine_kernel[(tokens, heads)](
            sums, stats, plan.positions, out, splits, **shape, enable_fp_fusion=True
        )
    return out


@triton.jit
def _absorb(q, k, v, visible, scale, acc, top, total):
    """One block of positions into the running softmax. A row that sees none of them keeps its bits."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, -_INFINITY)
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == -_INFINITY, 0.0, higher)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    moved = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    # A weight of zero does not silence a value that is not finite, and siblings must not hear of it.
    acc = tl.where((tl.max(visible.to(tl.int32), 1) > 0)[:, None], moved, acc)
    return acc, higher, total * decay + tl.sum(weights, 1)


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr):
    return tl.maximum(position - (WINDOW - 1), 0) if WINDOW > 0 else position * 0


@triton.jit
def _list(i, blocks_ptr, positions_ptr, prefix_ptr, start_ptr, shared, begin, end):
    """The stretch that pass i over the positions reads, and by whose list: 0 is what all share, from the
    table; i > 0 the rest of token i - 1, which is empty where there is no token."""
    who = tl.load(blocks_ptr + i - 1, i > 0, -1)
    prefix = tl.load(prefix_ptr + who, who >= 0, _NEVER)
    start = tl.load(start_ptr + who, who >= 0, 0)
    own_end = tl.minimum(end, tl.load(positions_ptr + who, who >= 0, -1) + 1)
    return prefix, start, tl.where(i > 0, shared, begin), tl.where(i > 0, own_end, shared)


@triton.jit
def _stretch(token, position, first, length_ptr, prefix_ptr, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Where this program's positions begin and end, and up to where all its tokens read the row's table: the
    block of the first position at which one of them leaves it for its path."""
    split = tl.program_id(2)
    begin = tl.maximum(split * SPLIT, tl.min(first) // BLOCK * BLOCK)
    end = tl.minimum((split + 1) * SPLIT, tl.max(position) + 1)
    branches = (token >= 0) & (tl.load(length_ptr + token, token >= 0, 0) > 0)
    fork = tl.min(tl.where(branches, tl.load(prefix_ptr + token, branches, 0), _NEVER))
    return begin, end, tl.where(fork >= end, end, tl.maximum(fork // BLOCK * BLOCK, begin))


@triton.jit
def _slots(at, end, prefix, start, table_ptr, path_ptr):
    """The slots of positions `at` in one token's list; 0 from `end` on."""
    slot = tl.load(table_ptr + at, at < tl.minimum(prefix, end), 0)
    slot += tl.load(path_ptr + start + at - prefix, (at >= prefix) & (at < end), 0)
    return slot.to(tl.int64)


@triton.jit
def attend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    sums_ptr,
    stats_ptr,
    blocks_ptr,
    rows_ptr,
    positions_ptr,
    prefix_ptr,
    start_ptr,
    length_ptr,
    path_ptr,
    tables_ptr,
    width,
    scale,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks_ptr += tl.program_id(0) * TOKENS
    # Row i of a tile: query head i % GROUP_PAD of the block's token i // GROUP_PAD.
    tile = tl.arange(0, TOKENS * GROUP_PAD)
    token = tl.load(blocks_ptr + tile // GROUP_PAD)
    position = tl.load(positions_ptr + token, token >= 0, -1)
    first = tl.where(token >= 0, _first_seen(position, WINDOW), _NEVER)
    begin, end, shared = _stretch(token, position, first, length_ptr, prefix_ptr, SPLIT, BLOCK)
    if begin >= end:
        return
    tables_ptr += tl.load(rows_ptr + tl.load(blocks_ptr)).to(tl.int64) * width
    dims = tl.arange(0, DIM_PAD)
    inside = dims < DIM
    state_at = (token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * GROUP + tile % GROUP_PAD
    live = (token >= 0) & (tile % GROUP_PAD < GROUP)
    q = tl.load(q_ptr + state_at[:, None] * DIM + dims, live[:, None] & inside, 0.0)
    acc = tl.zeros((TOKENS * GROUP_PAD, DIM_PAD), tl.float32)
    top, total = tl.sum(acc, 1) - _INFINITY, tl.sum(acc, 1)
    for i in range(TOKENS + 1):
        prefix, start, low, high = _list(
            i, blocks_ptr, positions_ptr, prefix_ptr, start_ptr, shared, begin, end
        )
        for block in range(low, high, BLOCK):
            at = block + tl.arange(0, BLOCK)
            slot = _slots(at, high, prefix, start, tables_ptr, path_ptr)
            kv_at = (slot * tl.num_programs(1) + tl.program_id(1))[:, None] * DIM + dims
            k = tl.load(k_ptr + kv_at, (at < high)[:, None] & inside, 0.0)
            v = tl.load(v_ptr + kv_at, (at < high)[:, None] & inside, 0.0)
            mine = (i == 0) | (tile // GROUP_PAD == i - 1)
            seen = (at <= position[:, None]) & (at >= first[:, None]) & mine[:, None]
            acc, top, total = _absorb(q, k, v, seen, scale, acc, top, total)
    part_at = state_at * tl.num_programs(2) + tl.program_id(2)
    tl.store(sums_ptr + part_at[:, None] * DIM + dims, acc, live[:, None] & inside)
    tl.store(stats_ptr + part_at * 2, top, live)
    tl.store(stats_ptr + part_at * 2 + 1, total, live)


@triton.jit
def combine_kernel(
    sums_ptr,
    stats_ptr,
    positions_ptr,
    out_ptr,
    splits,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Merges one token's and head's stretches, in order; only those it sees were written."""
    position = tl.load(positions_ptr + tl.program_id(0))
    state = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    dims = tl.arange(0, DIM_PAD)
    acc = tl.zeros((DIM_PAD,), tl.float32)
    top = tl.sum(acc, 0) - _INFINITY
    total = tl.sum(acc, 0)
    for split in range(_first_seen(position, WINDOW) // SPLIT, position // SPLIT + 1):
        at = state * splits + split
        part_top = tl.load(stats_ptr + at * 2)
        higher = tl.maximum(top, part_top)
        decay, share = tl.exp2(top - higher), tl.exp2(part_top - higher)
        acc = acc * decay + tl.load(sums_ptr + at * DIM + dims, dims < DIM, 0.0) * share
        total = total * decay + tl.load(stats_ptr + at * 2 + 1) * share
        top = higher
    tl.store(out_ptr + state * DIM + dims, acc / total, dims < DIM)
