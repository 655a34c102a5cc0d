"""Everything in a layer but attention."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, in float32; x and the result share a dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after a branch, `x + branch`, and its `rms_norm`; all of one shape and dtype."""
    total = x + branch
    return total, rms_norm(total, weight, eps)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x `[T, in]` times weight `[out, in]` transposed, in the weight's dtype; float32 `[T, out]`."""
    out = F.linear(x.to(weight.dtype), weight).float()
    return out if bias is None else out + bias.float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of x `[T, H, D]`; cos, sin `[T, D / 2]` (a RopeSpec's scale already in them)."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def store_kv(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Writes k, v `[T, H, D]` into one layer's cache `[S, H, D]` at slots `[T]`, in place."""
    keys[slots] = k.to(keys.dtype)
    values[slots] = v.to(values.dtype)


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
    """Rotates q `[T, heads, D]` and k `[T, kv_heads, D]` as `apply_rope`, stores k and v as `store_kv`, and
    returns q in the cache's dtype."""
    store_kv(keys, values, slots, apply_rope(k, cos, sin), v)
    return apply_rope(q, cos, sin).to(keys.dtype)


def gated_activation(gate: Tensor, up: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
    """`activation(gate) * up` in float32."""
    gate = gate.float()
    act = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return act * up.float()


def gated_linear(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: Literal["silu", "gelu_tanh"],
) -> Tensor:
    """`gated_activation` of two `linear`s of x `[T, in]`, gate and up `[out, in]`; float32 `[T, out]`."""
    return gated_activation(linear(x, gate, gate_bias), linear(x, up, up_bias), activation)
