"""Shares of a decoder: together they are the whole, whatever the layout of heads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.errors import EngineError, KernelError, ModelError
from paceline.kernels.cpu.shared_group import GroupShape, NativeGroup, new_memory
from paceline.models.native_decoder import NativeDecoder
from paceline.models.shard import shard, share_of
from paceline.models.spec import DecoderSpec, DecoderWeights, LayerSpec
from paceline.models.torch_decoder import TorchDecoder

from .worlds import Chunk, Decoder, Piece, Tree, World, make_rope, make_spec, make_weights

LAYOUTS: dict[str, dict[str, Any]] = {
    "9 heads, 3 kv heads": {"num_heads": 9, "num_kv_heads": 3},
    "4 heads, 4 kv heads": {"num_heads": 4, "num_kv_heads": 4},
    "8 heads, 2 kv heads": {"num_heads": 8, "num_kv_heads": 2},
    "4 heads, 1 kv head": {"num_heads": 4, "num_kv_heads": 1},
    "9 heads, 1 kv head, odd width": {"num_heads": 9, "num_kv_heads": 1, "intermediate_size": 37},
    "wide": {"intermediate_size": 300, "hidden_size": 70, "vocab_size": 33},
    "gemma": {
        "qk_norm": True,
        "post_norms": True,
        "activation": "gelu_tanh",
        "embed_scale": 8.5,
        "layers": (LayerSpec(window=7), LayerSpec(rope=1), LayerSpec(window=300)),
        "ropes": (make_rope(64, 10_000.0), make_rope(64, 1e6, 1.2)),
    },
}
PROMPT = np.random.default_rng(5).integers(0, 33, 150).tolist()
STEPS: list[list[Piece]] = [
    [Chunk(0, PROMPT[:40])],
    [Chunk(0, PROMPT[40:]), Chunk(1, PROMPT[:3])],
    [Tree(0, [1, 2, 3, 4, 5], [-1, 0, 0, 1, 3]), Chunk(1, [7])],
]
ROWS = 150


def make(layout: str) -> tuple[DecoderSpec, DecoderWeights]:
    spec = make_spec(**LAYOUTS[layout])
    return spec, make_weights(spec, biases=True, tied=layout != "wide")


class ThreadedSum:
    """Ranks as threads: each gives its part and gets the sum of all, in rank order."""

    def __init__(self, ranks: int) -> None:
        self._parts: list[Tensor] = [torch.empty(0)] * ranks
        self._barrier = threading.Barrier(ranks, timeout=60)

    def of(self, rank: int) -> Callable[[Tensor], Tensor]:
        def reduce(part: Tensor) -> Tensor:
            self._parts[rank] = part
            self._barrier.wait()
            total = self._parts[0].clone()
            for other in self._parts[1:]:
                total += other
            self._barrier.wait()
            return total

        return reduce


def run_together(decoders: list[Decoder], steps: list[list[Piece]]) -> list[list[np.ndarray]]:
    """The steps on every rank at once; each rank's logits of every piece. A rank's world is its own."""

    def run(decoder: Decoder) -> list[np.ndarray]:
        world = World(decoder, num_slots=512, seed=3)
        return [logits for step in steps for logits in world.run(*step)]

    with ThreadPoolExecutor(len(decoders)) as pool:
        return list(pool.map(run, decoders))


def native_ranks(
    spec: DecoderSpec, weights: DecoderWeights, ranks: int, dtype: Any, threads: int = 1
) -> list[Decoder]:
    shape = GroupShape(ranks, ROWS, spec.hidden_size, spec.vocab_size)
    descriptor = new_memory(shape)
    try:
        groups = [NativeGroup(descriptor, shape, rank, 60.0) for rank in range(ranks)]
    finally:
        os.close(descriptor)
    return [
        NativeDecoder(*shard(spec, weights, rank, ranks), dtype=dtype, threads=threads, group=group)
        for rank, group in enumerate(groups)
    ]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shares_cover_everything_once(layout: str, ranks: int) -> None:
    spec, _ = make(layout)
    shares = [share_of(spec, rank, ranks) for rank in range(ranks)]
    assert [head for share in shares for head in share.heads] == list(range(spec.num_heads))
    assert [column for share in shares for column in share.mlp] == list(range(spec.intermediate_size))
    group = spec.num_heads // spec.num_kv_heads
    for share in shares:
        assert share.heads
        assert share.mlp
        assert {head // group for head in share.heads} == set(share.kv_heads)
        assert len(share.heads) % len(share.kv_heads) == 0
    sizes = [len(share.kv_heads) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_shares_keep_groups_of_int8_weights_whole() -> None:
    spec = make_spec(num_heads=9, num_kv_heads=3, intermediate_size=1536)
    assert [len(share_of(spec, rank, 2).mlp) for rank in range(2)] == [768, 768]
    spec = make_spec(intermediate_size=300)
    assert [len(share_of(spec, rank, 2).mlp) for rank in range(2)] == [128, 172]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_every_branch_add_up(layout: str) -> None:
    spec, weights = make(layout)
    generator = torch.Generator().manual_seed(1)
    parts = [shard(spec, weights, rank, 3) for rank in range(3)]
    for index, layer in enumerate(weights.layers):
        own = [part.layers[index] for _, part in parts]
        attended = torch.randn(5, spec.num_heads * spec.head_dim, generator=generator)
        inner = torch.randn(5, spec.intermediate_size, generator=generator)
        for x, name, bias in ((attended, "o", "o_bias"), (inner, "down", "down_bias")):
            widths = [getattr(share, name).shape[1] for share in own]
            total = torch.zeros(5, spec.hidden_size)
            for piece, share in zip(x.split(widths, dim=1), own, strict=True):
                total += piece @ getattr(share, name).T
                total += 0 if getattr(share, bias) is None else getattr(share, bias)
            want = x @ getattr(layer, name).T + getattr(layer, bias)
            torch.testing.assert_close(total, want, rtol=1e-4, atol=1e-4)
        for name in ("q", "gate", "up", "q_bias", "gate_bias", "up_bias"):
            torch.testing.assert_close(torch.cat([getattr(s, name) for s in own]), getattr(layer, name))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_ranks_give_the_logits_of_one(layout: str, ranks: int) -> None:
    spec, weights = make(layout)
    total = ThreadedSum(ranks)
    decoders: list[Decoder] = [
        TorchDecoder(*shard(spec, weights, rank, ranks), reduce=total.of(rank)) for rank in range(ranks)
    ]
    (want,) = run_together([TorchDecoder(spec, weights)], STEPS)
    got = run_together(decoders, STEPS)
    for one, other in zip(want, got[0], strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-4)
    for other in got[1:]:
        for one, same in zip(got[0], other, strict=True):
            np.testing.assert_array_equal(same, one)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.05), ("int8", 0.05)])
def test_native_ranks_give_the_logits_of_one(layout: str, ranks: int, dtype: Any, tolerance: float) -> None:
    spec, weights = make(layout)
    (want,) = run_together([NativeDecoder(spec, weights, dtype=dtype, threads=1)], STEPS)
    got = run_together(native_ranks(spec, weights, ranks, dtype), STEPS)[0]
    for one, other in zip(want, got, strict=True):
        assert np.abs(other - one).max() < tolerance * max(1.0, float(one.std()))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_native_ranks_keep_the_bits_however_the_prompt_is_cut(dtype: Any) -> None:
    spec, weights = make("9 heads, 3 kv heads")
    cuts = [(0, 17), (17, 18), (18, 99), (99, 150)]
    whole = run_together(native_ranks(spec, weights, 3, dtype, threads=2), [[Chunk(0, PROMPT)]])[0]
    steps: list[list[Piece]] = [[Chunk(0, PROMPT[a:b])] for a, b in cuts]
    pieces = run_together(native_ranks(spec, weights, 3, dtype), steps)[0]
    np.testing.assert_array_equal(np.concatenate(pieces), whole[0])
    tree: list[list[Piece]] = [[Chunk(0, PROMPT[:99])], [Tree(0, PROMPT[99:104], [-1, 0, 1, 2, 3])]]
    nodes = run_together(native_ranks(spec, weights, 3, dtype), tree)[0][1]
    np.testing.assert_array_equal(nodes, whole[0][99:104])


def test_a_rank_that_does_not_come_ends_the_pass() -> None:
    spec, weights = make("4 heads, 4 kv heads")
    shape = GroupShape(2, ROWS, spec.hidden_size, spec.vocab_size)
    descriptor = new_memory(shape)
    patient, other = (NativeGroup(descriptor, shape, rank, patience) for rank, patience in [(0, 0.3), (1, 0)])
    os.close(descriptor)
    decoders = [
        NativeDecoder(*shard(spec, weights, rank, 2), dtype="float32", threads=2, group=group)
        for rank, group in enumerate((patient, other))
    ]
    started = time.monotonic()
    for decoder in decoders:
        with pytest.raises(EngineError, match="did not come"):
            World(decoder, num_slots=64).run(Chunk(0, [1, 2]))
    assert time.monotonic() - started < 10


def test_an_abandoned_group_frees_who_waits() -> None:
    spec, weights = make("4 heads, 4 kv heads")
    shape = GroupShape(2, ROWS, spec.hidden_size, spec.vocab_size)
    descriptor = new_memory(shape)
    group, other = (NativeGroup(descriptor, shape, rank, 0) for rank in range(2))
    os.close(descriptor)
    decoder = NativeDecoder(*shard(spec, weights, 0, 2), dtype="float32", threads=2, group=group)
    timer = threading.Timer(0.2, other.abandon)
    timer.start()
    with pytest.raises(EngineError, match="did not come"):
        World(decoder, num_slots=64).run(Chunk(0, [1, 2]))
    timer.join()


def test_more_than_a_group_can_do_is_refused() -> None:
    spec, weights = make("4 heads, 1 kv head")
    with pytest.raises(ModelError, match="4 attention heads cannot be split over 5 ranks"):
        shard(spec, weights, 0, 5)
    with pytest.raises(ModelError, match="evenly"):
        share_of(make_spec(num_heads=5, num_kv_heads=2), 0, 2)
    with pytest.raises(KernelError, match="at most"):
        new_memory(GroupShape(1000, 1, 64, 64))
    with pytest.raises(ValueError, match="a group made for 150"):
        World(native_ranks(spec, weights, 2, "float32")[0], num_slots=512).run(Chunk(0, [*PROMPT, 1]))
