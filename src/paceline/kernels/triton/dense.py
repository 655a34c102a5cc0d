"""Norms, rotation and gates: what lies between the matrix products of a small pass."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels import reference

_MOST_GEMV_ROWS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.dense.rms_norm`."""
    x = x.contiguous()
    normed = torch.empty_like(x)
    _launch_norm(x, None, weight, None, normed, eps)
    return normed


def add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.dense.add_rms_norm`. One launch."""
    x = x.contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, branch.contiguous(), weight, total, normed, eps)
    return total, normed


def _launch_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, total: Tensor | None, normed: Tensor, eps: float
) -> None:
    size = x.shape[-1]
    rows = x.numel() // size
    if rows:
        with torch.cuda.device_of(x):
            norm_kernel[(rows,)](
                *(x, branch, weight, total, normed, eps),
                SIZE=size,
                PAD=triton.next_power_of_2(size),
                HAS_BRANCH=branch is not None,
                enable_fp_fusion=True,
            )


@triton.jit
def norm_kernel(
    x_ptr,
    branch_ptr,
    weight_ptr,
    total_ptr,
    out_ptr,
    eps,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
):
    columns = tl.arange(0, PAD)
    inside = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    x = tl.load(x_ptr + at, inside, 0.0)
    if HAS_BRANCH:
        wide = x.to(tl.float32) + tl.load(branch_ptr + at, inside, 0.0).to(tl.float32)
        x = wide.to(x.dtype)
        tl.store(total_ptr + at, x, inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + at, (wide * scale * weight).to(x.dtype), inside)


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """See `reference.dense.rope_store`. One launch. The last two dimensions of q, k and v are contiguous, and
    the cache is."""
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    out = torch.empty((tokens, heads, dim), dtype=keys.dtype, device=q.device)
    if tokens:
        group = heads // kv_heads
        with torch.cuda.device_of(q):
            rope_store_kernel[(tokens, kv_heads)](
                *(q, k, v, cos, sin, keys, values, slots, out, q.stride(0), k.stride(0), v.stride(0)),
                HALF=dim // 2,
                HALF_PAD=triton.next_power_of_2(dim // 2),
                GROUP=group,
                GROUP_PAD=triton.next_power_of_2(group),
                enable_fp_fusion=True,
            )
    return out


@triton.jit
def _rotated(x_ptr, at, inside, cos, sin, HALF: tl.constexpr):
    a = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
    b = tl.load(x_ptr + at + HALF, inside, 0.0).to(tl.float32)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _store_halves(out_ptr, at, inside, low, high, HALF: tl.constexpr):
    tl.store(out_ptr + at, low.to(out_ptr.dtype.element_ty), inside)
    tl.store(out_ptr + at + HALF, high.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def rope_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    out_ptr,
    q_stride,
    k_stride,
    v_stride,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
):
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kv_heads = tl.num_programs(1)
    half = tl.arange(0, HALF_PAD)
    inside = half < HALF
    cos = tl.load(cos_ptr + token * HALF + half, inside, 0.0)
    sin = tl.load(sin_ptr + token * HALF + half, inside, 0.0)
    member = tl.arange(0, GROUP_PAD)[:, None]
    q_head = (kv_head * GROUP + member) * (2 * HALF) + half
    live = (member < GROUP) & inside
    low, high = _rotated(q_ptr, token * q_stride + q_head, live, cos, sin, HALF)
    _store_halves(out_ptr, token * kv_heads * GROUP * 2 * HALF + q_head, live, low, high, HALF)
    head = kv_head * (2 * HALF) + half
    cache = tl.load(slots_ptr + token).to(tl.int64) * kv_heads * (2 * HALF) + head
    low, high = _rotated(k_ptr, token * k_stride + head, inside, cos, sin, HALF)
    _store_halves(keys_ptr, cache, inside, low, high, HALF)
    low = tl.load(v_ptr + token * v_stride + head, inside, 0.0)
    high = tl.load(v_ptr + token * v_stride + head + HALF, inside, 0.0)
    _store_halves(values_ptr, cache, inside, low, high, HALF)


@triton.jit
def _gated(gate, up, SILU: tl.constexpr):
    """The tanh form of GELU is x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    slope = gate if SILU else gate * (1.5957691216 + gate * gate * 0.0713548162)
    return gate / (1.0 + tl.exp(-slope)) * up


def gated_activation(gate: Tensor, up: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
    """See `reference.dense.gated_activation`. One launch."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty(gate.shape, dtype=torch.float32, device=gate.device)
    if count := out.numel():
        block = 1024
        with torch.cuda.device_of(gate):
            gate_kernel[(triton.cdiv(count, block),)](
                gate, up, out, count, SILU=activation == "silu", BLOCK=block, enable_fp_fusion=True
            )
    return out


@triton.jit
def gate_kernel(gate_ptr, up_ptr, out_ptr, count, SILU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + at, at < count, 0.0).to(tl.float32)
    up = tl.load(up_ptr + at, at < count, 0.0).to(tl.float32)
    tl.store(out_ptr + at, _gated(gate, up, SILU), at < count)


def gated_linear(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: Literal["silu", "gelu_tanh"],
) -> Tensor:
    """See `reference.dense.gated_linear`. Up to 16 tokens in one launch that reads each weight once and does
    not round the products to the weights' dtype; beyond that the library's products and `gated_activation`.
    """
    if not 0 < len(x) <= _MOST_GEMV_ROWS:
        gated = reference.linear(x, gate, gate_bias), reference.linear(x, up, up_bias)
        return gated_activation(*gated, activation)
    rows, inputs, outputs = len(x), gate.shape[1], gate.shape[0]
    out = torch.empty((rows, outputs), dtype=torch.float32, device=x.device)
    block = 32
    with torch.cuda.device_of(x):
        gated_linear_kernel[(triton.cdiv(outputs, block),)](
            *(x.to(gate.dtype).contiguous(), gate.contiguous(), up.contiguous(), gate_bias, up_bias, out),
            *(rows, inputs, outputs),
            HAS_GATE_BIAS=gate_bias is not None,
            HAS_UP_BIAS=up_bias is not None,
            SILU=activation == "silu",
            ROWS=_MOST_GEMV_ROWS,
            OUTPUTS=block,
            INPUTS=128,
            enable_fp_fusion=True,
        )
    return out


@triton.jit
def gated_linear_kernel(
    x_ptr,
    gate_ptr,
    up_ptr,
    gate_bias_ptr,
    up_bias_ptr,
    out_ptr,
    rows,
    inputs,
    outputs,
    HAS_GATE_BIAS: tl.constexpr,
    HAS_UP_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    row = tl.arange(0, ROWS)[:, None]
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    gate = tl.zeros((ROWS, OUTPUTS), tl.float32)
    up = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, inputs, INPUTS):
        at = start + tl.arange(0, INPUTS)
        x = tl.load(x_ptr + row * inputs + at, (row < rows) & (at < inputs), 0.0)
        weight_at = column[:, None].to(tl.int64) * inputs + at
        inside = (column < outputs)[:, None] & (at < inputs)
        gate_weight = tl.load(gate_ptr + weight_at, inside, 0.0)
        up_weight = tl.load(up_ptr + weight_at, inside, 0.0)
        gate = tl.dot(x, tl.trans(gate_weight), gate, input_precision="ieee")
        up = tl.dot(x, tl.trans(up_weight), up, input_precision="ieee")
    if HAS_GATE_BIAS:
        gate += tl.load(gate_bias_ptr + column, column < outputs, 0.0).to(tl.float32)
    if HAS_UP_BIAS:
        up += tl.load(up_bias_ptr + column, column < outputs, 0.0).to(tl.float32)
    tl.store(out_ptr + row * outputs + column, _gated(gate, up, SILU), (row < rows) & (column < outputs))
