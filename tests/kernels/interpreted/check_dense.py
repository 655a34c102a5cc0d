from __future__ import annotations

from typing import Literal

import pytest
import torch

from paceline.kernels import reference, triton
from paceline.kernels.kv_cache import KVCache


@pytest.mark.parametrize("shape", [(1, 1), (3, 72), (0, 16), (2, 3, 20), (5, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, branch = (10 * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1])
    tolerance = {"rtol": 1e-5 if dtype == torch.float32 else 1e-3, "atol": 1e-6}
    total, normed = triton.add_rms_norm(x, branch, weight, 1e-5)
    want_total, want_normed = reference.add_rms_norm(x, branch, weight, 1e-5)
    assert torch.equal(total, want_total)
    torch.testing.assert_close(normed, want_normed, **tolerance)
    torch.testing.assert_close(
        triton.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **tolerance
    )


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 2), (4, 2, 64), (6, 2, 20), (8, 1, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 5])
def test_rope_and_store(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, tokens: int) -> None:
    joined = torch.randn(tokens, heads + 2 * kv_heads, dim)
    q, k, v = joined.split([heads, kv_heads, kv_heads], dim=1)
    angles = torch.randn(tokens, dim // 2)
    slots = torch.randperm(9)[:tokens]
    caches = [KVCache(1, 9, kv_heads, dim, dtype) for _ in range(2)]
    outputs = [
        module.rope_store(q, k, v, angles.cos(), angles.sin(), cache.keys[0], cache.values[0], slots)
        for module, cache in zip((triton, reference), caches, strict=True)
    ]
    assert outputs[0].dtype == dtype
    # The interpreter cuts bfloat16 off where a GPU rounds.
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    pairs = [outputs, [cache.keys for cache in caches], [cache.values for cache in caches]]
    for got, want in pairs:
        torch.testing.assert_close(got, want, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 1), (0, 8), (3, 1000)])
def test_gates(activation: Literal["silu", "gelu_tanh"], shape: tuple[int, int]) -> None:
    gate, up = 5 * torch.randn(shape), torch.randn(shape)
    got, want = (module.gated_activation(gate, up, activation) for module in (triton, reference))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [0, 1, 16, 17])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (72, 104), (300, 33)])
@pytest.mark.parametrize(("gate_bias", "up_bias"), [(False, False), (True, False), (True, True)])
def test_gated_products(rows: int, inputs: int, outputs: int, gate_bias: bool, up_bias: bool) -> None:
    x, gate, up = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs, inputs)
    biases = [torch.randn(outputs) if there else None for there in (gate_bias, up_bias)]
    activation: Literal["silu", "gelu_tanh"] = "silu" if gate_bias else "gelu_tanh"
    got, want = (module.gated_linear(x, gate, up, *biases, activation) for module in (triton, reference))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_gated_products_in_half_precision() -> None:
    x, gate, up = torch.randn(4, 200), torch.randn(50, 200).half(), torch.randn(50, 200).half()
    got, want = (module.gated_linear(x, gate, up, None, None, "silu") for module in (triton, reference))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=0.05)
