from __future__ import annotations

import pytest
import torch

from paceline.kernels.kv_cache import KVCache


@pytest.mark.parametrize("slots", [4, 40_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_holds_zeros_of_the_asked_shape(slots: int, dtype: torch.dtype) -> None:
    cache = KVCache(3, slots, 2, 64, dtype)
    for tensor in (cache.keys, cache.values):
        assert tensor.shape == (3, slots, 2, 64)
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert not tensor.any()
    assert cache.num_slots == slots
    assert cache.bytes_per_token == 2 * 3 * 2 * 64 * dtype.itemsize


def test_keys_and_values_are_separate() -> None:
    cache = KVCache(1, 40_000, 2, 64, torch.float32)
    cache.keys.fill_(1)
    assert not cache.values.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_kept_one_per_slot(dtype: torch.dtype) -> None:
    cache = KVCache(3, 5, 2, 64, dtype, num_captured=2, hidden_size=24)
    assert cache.features is not None
    assert cache.features.shape == (5, 2, 24)
    assert cache.features.dtype == dtype
    assert not cache.features.any()
    assert cache.bytes_per_token == (2 * 3 * 2 * 64 + 2 * 24) * dtype.itemsize
    assert KVCache(3, 5, 2, 64, dtype, hidden_size=24).features is None
