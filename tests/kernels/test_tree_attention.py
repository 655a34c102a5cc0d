"""The specification of tree_attention against the gathering kernel and the native decoder, and its plan."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.kernels import reference
from paceline.kernels.kv_cache import KVCache
from paceline.models.native_decoder import NativeDecoder
from paceline.models.spec import LayerSpec
from paceline.models.torch_decoder import TorchDecoder

from ..models.worlds import make_spec, make_weights
from .trees import BUSHY, CHAIN, NUM_SLOTS, PASSES, STAR, Chunk, Tree, make_layer, make_pass

CPU = torch.device("cpu")
LARGE = {"long contexts": [Tree(4000, BUSHY), Tree(2047, CHAIN), Chunk(1000, 40)]}


@pytest.mark.parametrize("name", [*PASSES, *LARGE])
@pytest.mark.parametrize("window", [0, 1, 300])
def test_agrees_with_gathered_slots(name: str, window: int) -> None:
    batch = make_pass((PASSES | LARGE)[name])
    layer = make_layer(batch, 4, 2, 20)
    got = reference.tree_attention(*layer, reference.plan_tree(batch, CPU), 0.2, window)
    for separate in (False, True):
        plan = reference.plan_slots(batch, [window], CPU, separate=separate)
        want = reference.slot_attention(*layer, plan, 0.2, window)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pad", [1, 256])
def test_blocks_hold_every_token_once_and_one_row_each(pad: int) -> None:
    batch = make_pass([*PASSES["mixed"], Chunk(2, 30)])
    plan = reference.plan_tree(batch, CPU, pad_slots_to=pad)
    members = [[t for t in block if t >= 0] for block in plan.blocks.tolist()]
    assert sorted(t for block in members for t in block) == list(range(len(batch)))
    for block in members:
        assert len({int(batch.rows[t]) for t in block}) == 1
    assert plan.tables.shape[1] % pad == plan.path_slots.shape[0] % pad == 0
    assert plan.tables.shape[1] > batch.positions.max()
    assert {tensor.dtype for tensor in plan.tensors()} == {torch.int32}


def test_a_pass_without_paths_or_with_a_wide_table_has_a_plan() -> None:
    batch = make_pass([Chunk(4, 2), Chunk(90, 1)])
    plan = reference.plan_tree(batch, CPU)
    assert plan.tables.shape == (2, 91)
    assert plan.path_slots.shape == (1,)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 64), (8, 1, 64), (4, 2, 128), (5, 5, 20)])
@pytest.mark.parametrize("window", [0, 5])
def test_the_native_decoder_agrees_and_gathers_nothing(
    heads: int, kv_heads: int, dim: int, window: int
) -> None:
    """One layer over a random cache: where the specification copies, `kernels/cpu/attention.cpp` walks the
    slots."""
    changes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "context_length": 5000}
    spec = make_spec(**changes, layers=(LayerSpec(window=window),))
    weights = make_weights(spec)
    generator = torch.Generator().manual_seed(1)
    caches = [KVCache(1, NUM_SLOTS, kv_heads, dim, torch.float32) for _ in range(2)]
    for one, other in zip(*((cache.keys, cache.values) for cache in caches), strict=True):
        other.copy_(one.normal_(generator=generator))
    decoders = TorchDecoder(spec, weights), NativeDecoder(spec, weights, dtype="float32", threads=2)
    for name, members in (PASSES | LARGE).items():
        batch = make_pass(members)
        want, got = (d.forward(batch, c).numpy() for d, c in zip(decoders, caches, strict=True))
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=2e-4, err_msg=name)


def test_a_star_needs_no_more_than_its_own_slots() -> None:
    """Siblings do not see each other: with one removed, the others' results keep their bits."""
    batch = make_pass([Tree(40, STAR)])
    q, keys, values = make_layer(batch, 2, 1, 64)
    plan = reference.plan_tree(batch, CPU)
    before = reference.tree_attention(q, keys, values, plan, 0.1, 0)
    keys[batch.slots[3]] += 1
    after = reference.tree_attention(q, keys, values, plan, 0.1, 0)
    assert [bool(torch.equal(a, b)) for a, b in zip(before, after, strict=True)] == [
        i != 3 for i in range(len(batch))
    ]
