"""The sampling rule over the vocabulary: the best of every 1,024 tokens, then the best of those.

The noise has the bits of `paceline.core.noise`, and a value those of the reference, only if no multiplication
is fused with an addition and the division by the temperature is rounded correctly: `enable_fp_fusion=False`
and `div_rn`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.core import noise
from paceline.kernels import reference

_BLOCK = 1024
_MOST_CANDIDATES = 32
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8 = map(tl.constexpr, noise.LOG_COEFFICIENTS)
_LOG2_HIGH, _LOG2_LOW = tl.constexpr(noise.LOG2_HIGH), tl.constexpr(noise.LOG2_LOW)
_SQRT_HALF_BITS = tl.constexpr(noise.SQRT_HALF_BITS)
_FIRST_MULTIPLIER, _SECOND_MULTIPLIER = map(tl.constexpr, noise.MULTIPLIERS)
_MOST_UNIFORM = tl.constexpr(1 - 2.0**-24)
_INFINITY = tl.constexpr(float("inf"))


def coupled_argmax(
    logits: Tensor, temperatures: Sequence[float], seeds: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """See `reference.sampling.coupled_argmax`. Two launches, and the keys' way to the device."""
    tokens, _, finite = _rank(logits, temperatures, seeds, positions, 1)
    return tokens[:, 0].long().clamp(min=0), finite


def top_candidates(
    logits: Tensor,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
    count: int,
    token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.sampling.top_candidates`, which also serves counts above 32."""
    if count > _MOST_CANDIDATES:
        return reference.top_candidates(logits, temperatures, seeds, positions, count, token_ids)
    tokens, scores, _ = _rank(logits, temperatures, seeds, positions, count, token_ids)
    return tokens, scores


def _rank(
    logits: Tensor,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
    count: int,
    token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens int32 and scores float32 `[rows, count]`, finite bool `[rows]`."""
    rows, vocab = logits.shape
    device = logits.device
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    keys = [noise.noise_keys(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    key_bits = torch.tensor(keys, dtype=torch.int64).view(rows, 2).to(torch.int32).to(device)
    heat = torch.tensor(temperatures, dtype=torch.float32).to(device)
    blocks = triton.cdiv(vocab, _BLOCK)
    best = torch.empty((rows, blocks, count), dtype=torch.float32, device=device)
    ids = torch.empty((rows, blocks, count), dtype=torch.int32, device=device)
    sums = torch.empty((rows, blocks, 2), dtype=torch.float32, device=device)
    tokens = torch.empty((rows, count), dtype=torch.int32, device=device)
    scores = torch.empty((rows, count), dtype=torch.float32, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    names = key_bits if token_ids is None else token_ids.to(device, torch.int32)
    if rows:
        with torch.cuda.device_of(logits):
            rank_kernel[(rows, blocks)](
                *(logits, heat, key_bits, names, best, ids, sums, logits.stride(0), vocab),
                NAMED=token_ids is not None,
                COUNT=count,
                BLOCK=_BLOCK,
                enable_fp_fusion=False,
            )
            merge_kernel[(rows,)](
                *(best, ids, names, sums, heat, tokens, scores, finite, blocks),
                NAMED=token_ids is not None,
                COUNT=count,
                COUNT_PAD=triton.next_power_of_2(count),
                BLOCKS_PAD=triton.next_power_of_2(blocks),
                PAD=triton.next_power_of_2(blocks * count),
                enable_fp_fusion=False,
            )
    return tokens, scores, finite


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * _FIRST_MULTIPLIER
    x = (x ^ (x >> 15)) * _SECOND_MULTIPLIER
    return x ^ (x >> 15)


@triton.jit
def _log(x):
    shifted = x.to(tl.int32, bitcast=True) - _SQRT_HALF_BITS
    exponent = (shifted >> 23).to(tl.float32)
    f = ((shifted & 0x7FFFFF) + _SQRT_HALF_BITS).to(tl.float32, bitcast=True) - 1.0
    z = f * f
    y = f * _C0 + _C1
    y = y * f + _C2
    y = y * f + _C3
    y = y * f + _C4
    y = y * f + _C5
    y = y * f + _C6
    y = y * f + _C7
    y = y * f + _C8
    y = (y * f) * z
    y = y + exponent * _LOG2_LOW
    y = y + z * -0.5
    return (f + y) + exponent * _LOG2_HIGH


@triton.jit
def gumbel(ids, first, second):
    """ids, first, second: uint32."""
    bits = _mix32(_mix32(ids + first) ^ second)
    v = ((bits >> 1).to(tl.float32) + 0.5) * (2.0**-31)
    v = tl.minimum(v, _MOST_UNIFORM)
    x = 1.0 - v
    return -_log(-(_log(x) + ((1.0 - x) - v)))


@triton.jit
def rank_kernel(
    logits_ptr,
    heat_ptr,
    keys_ptr,
    names_ptr,
    best_ptr,
    ids_ptr,
    sums_ptr,
    stride,
    vocab,
    NAMED: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The COUNT best of a block of the vocabulary, its largest logit (NaN if there is a NaN) and the sum of
    e^(logit - largest). names_ptr: the token id of each place of a row, if NAMED."""
    row, block = tl.program_id(0), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row.to(tl.int64) * stride + at, at < vocab, -_INFINITY).to(tl.float32)
    part = row * tl.num_programs(1) + block
    top = tl.max(logits, 0)
    total = tl.sum(tl.exp(logits - tl.where(top == -_INFINITY, 0.0, top)), 0)
    broken = tl.sum((logits != logits).to(tl.int32), 0) > 0
    tl.store(sums_ptr + part * 2, tl.where(broken, float("nan"), top))
    tl.store(sums_ptr + part * 2 + 1, total)
    heat = tl.load(heat_ptr + row)
    values = logits
    if heat != 0.0:
        first = tl.load(keys_ptr + row * 2).to(tl.uint32, bitcast=True)
        second = tl.load(keys_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
        ids = tl.load(names_ptr + at, at < vocab, 0) if NAMED else at
        values = tl.div_rn(logits, heat) + gumbel(ids.to(tl.uint32), first, second)
    for i in range(COUNT):
        best, where = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best_ptr + part * COUNT + i, best)
        tl.store(ids_ptr + part * COUNT + i, block * BLOCK + where)
        values = tl.where(at == block * BLOCK + where, -_INFINITY, values)


@triton.jit
def merge_kernel(
    best_ptr,
    ids_ptr,
    names_ptr,
    sums_ptr,
    heat_ptr,
    tokens_ptr,
    scores_ptr,
    finite_ptr,
    blocks,
    NAMED: tl.constexpr,
    COUNT: tl.constexpr,
    COUNT_PAD: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    PAD: tl.constexpr,
):
    """Blocks lie in the order of their ids, and so do equals within one: the first equal is the lowest."""
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS_PAD)
    sums_at = (row * blocks + block) * 2
    tops = tl.load(sums_ptr + sums_at, block < blocks, -_INFINITY)
    totals = tl.load(sums_ptr + sums_at + 1, block < blocks, 0.0)
    broken = tl.sum((tops != tops).to(tl.int32), 0) > 0
    top = tl.max(tops, 0)
    finite = (tl.abs(top) < _INFINITY) & (broken == 0)
    base = tl.where(finite, top, 0.0)
    at = tl.arange(0, PAD)
    values = tl.load(best_ptr + row * blocks * COUNT + at, at < blocks * COUNT, -_INFINITY)
    place = tl.arange(0, COUNT_PAD)
    ranked = tl.full((COUNT_PAD,), -_INFINITY, tl.float32)
    tokens = tl.full((COUNT_PAD,), -1, tl.int32)
    for i in range(COUNT):
        best, where = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.load(ids_ptr + row * blocks * COUNT + where)
        real = finite & (best > -_INFINITY)
        if NAMED:
            token = tl.load(names_ptr + token, real, -1)
        ranked = tl.where(place == i, tl.where(real, best, -_INFINITY), ranked)
        tokens = tl.where(place == i, tl.where(real, token, -1), tokens)
        values = tl.where(at == where, -_INFINITY, values)
    highest = tl.max(ranked, 0)
    # Equal infinities, which a tiny temperature makes, are no distance apart.
    below = tl.where((ranked == highest) & (tokens >= 0), 0.0, ranked - highest)
    below = tl.where(tokens >= 0, below, -_INFINITY)
    whole = tl.sum(totals * tl.exp(tops - base), 0)
    own = tl.sum(tl.exp(below), 0)
    scores = below - tl.log(tl.where(tl.load(heat_ptr + row) == 0.0, whole, own))
    tl.store(tokens_ptr + row * COUNT + place, tokens, place < COUNT)
    tl.store(scores_ptr + row * COUNT + place, tl.where(tokens >= 0, scores, -_INFINITY), place < COUNT)
    tl.store(finite_ptr + row, finite)
