"""What is captured of the residual stream, and passes that end early: against torch, and bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.kernels import ops
from paceline.kernels.batch import TokenBatch
from paceline.kernels.kv_cache import KVCache
from paceline.models.native_decoder import NativeDecoder
from paceline.models.spec import DecoderSpec, DecoderWeights, LayerSpec
from paceline.models.torch_decoder import TorchDecoder

from .test_native_decoder import DTYPES, PROMPT, VARIANTS
from .worlds import Chunk, Tree, World, make_spec, make_weights

TOLERANCES = [("float32", 2e-5), ("bfloat16", 0.03), ("int8", 0.06)]
THREE = (LayerSpec(), LayerSpec(), LayerSpec())
NODES, PARENTS = [3, 4, 5, 6, 7], [-1, 0, 0, 1, 3]


def parts(variant: str) -> tuple[DecoderSpec, DecoderWeights]:
    changes, options = VARIANTS[variant]
    spec = make_spec(**({"layers": THREE} | changes))
    return spec, make_weights(spec, **options)


def everywhere(spec: DecoderSpec) -> tuple[int, ...]:
    return tuple(range(spec.num_layers + 1))


def features(world: World, slots: Iterable[int]) -> np.ndarray:
    assert world.cache.features is not None
    return world.cache.features[list(slots)].float().numpy()


def of_row(world: World, row: int) -> np.ndarray:
    return features(world, world.tables[row, : world.lengths[row]].tolist())


def by_hand(spec: DecoderSpec, weights: DecoderWeights, tokens: list[int]) -> Tensor:
    """`[tokens, layers + 1, hidden]`: the residual stream of a sequence by whole-sequence attention."""
    count, heads, dim = len(tokens), spec.num_heads, spec.head_dim
    x = weights.embed[tokens] * spec.embed_scale
    found = [x]
    positions = torch.arange(count).float()
    for settings, layer in zip(spec.layers, weights.layers, strict=True):
        rope = spec.ropes[settings.rope]
        angles = positions[:, None] * torch.tensor(rope.inv_freq)
        cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale

        def turned(y: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
            a, b = y.chunk(2, dim=-1)
            c, s = cos[:, None], sin[:, None]
            return torch.cat([a * c - b * s, b * c + a * s], dim=-1)

        normed = ops.rms_norm(x, layer.attn_norm, spec.norm_eps)
        linear: Callable[..., Tensor] = torch.nn.functional.linear
        q = linear(normed, layer.q, layer.q_bias).view(count, heads, dim)
        k = linear(normed, layer.k, layer.k_bias).view(count, spec.num_kv_heads, dim)
        v = linear(normed, layer.v, layer.v_bias).view(count, spec.num_kv_heads, dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, spec.norm_eps)
            k = ops.rms_norm(k, layer.k_norm, spec.norm_eps)
        k, v = (y.repeat_interleave(heads // spec.num_kv_heads, dim=1) for y in (turned(k), v))
        scores = torch.einsum("qhd,khd->hqk", turned(q), k) * spec.attn_scale
        behind = positions[:, None] - positions
        seen = (behind >= 0) & ((behind < settings.window) | (settings.window == 0))
        weight = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        branch = linear(torch.einsum("hqk,khd->qhd", weight, v).flatten(1), layer.o, layer.o_bias)
        if layer.post_attn_norm is not None:
            branch = ops.rms_norm(branch, layer.post_attn_norm, spec.norm_eps)
        x = x + branch
        normed = ops.rms_norm(x, layer.mlp_norm, spec.norm_eps)
        act = {"silu": torch.nn.functional.silu}.get(spec.activation) or (
            lambda y: torch.nn.functional.gelu(y, approximate="tanh")
        )
        inner = act(linear(normed, layer.gate, layer.gate_bias)) * linear(normed, layer.up, layer.up_bias)
        branch = linear(inner, layer.down, layer.down_bias)
        if layer.post_mlp_norm is not None:
            branch = ops.rms_norm(branch, layer.post_mlp_norm, spec.norm_eps)
        x = x + branch
        found.append(x)
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("variant", ["plain", "gemma", "biases", "untied", "odd sizes"])
def test_torch_keeps_the_residual_stream(variant: str) -> None:
    """From the embeddings, scaled where the model scales them, to what the last layer gives."""
    spec, weights = parts(variant)
    world = World(TorchDecoder(spec, weights, capture=everywhere(spec)), seed=3)
    world.run(Chunk(0, PROMPT[:40]))
    want = by_hand(spec, weights, PROMPT[:40])
    np.testing.assert_allclose(of_row(world, 0), want.numpy(), rtol=1e-3, atol=2e-4)
    scaled = weights.embed[PROMPT[:40]] * spec.embed_scale
    np.testing.assert_allclose(of_row(world, 0)[:, 0], scaled.numpy(), rtol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_native_agrees_with_torch(variant: str, dtype: Any, tolerance: float) -> None:
    """Of every token by its slot: of prompts, of tree nodes, of passes without logits."""
    spec, weights = parts(variant)
    capture = tuple(reversed(everywhere(spec)))
    reference = World(TorchDecoder(spec, weights, capture=capture), seed=3)
    world = World(NativeDecoder(spec, weights, dtype=dtype, threads=2, capture=capture), seed=3)
    for both in (reference, world):
        both.run(Chunk(0, PROMPT[:40]))
        both.run(Chunk(0, PROMPT[40:310]), Chunk(1, PROMPT[:3]))
        both.run(Tree(0, NODES, PARENTS), Chunk(1, [7]))
        assert both.cache.features is not None
        assert both.cache.features.dtype == both.decoder.kv_dtype
    got, want = (features(each, range(world.num_slots)) for each in (world, reference))
    assert np.array_equal(want.any(axis=(1, 2)), got.any(axis=(1, 2))), "other slots were written"
    assert np.count_nonzero(want.any(axis=(1, 2))) == 310 + 4 + len(NODES)
    for column in range(len(capture)):
        error = np.abs(got[:, column] - want[:, column]) / want[:, column][want[:, column] != 0].std()
        assert error.max() < 8 * tolerance
        assert np.sqrt(np.square(error).mean()) < tolerance


@pytest.mark.parametrize("variant", ["plain", "gemma", "odd sizes"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_no_bit_depends_on_company_or_cuts(variant: str, dtype: Any, threads: int) -> None:
    spec, weights = parts(variant)
    decoder = NativeDecoder(spec, weights, dtype=dtype, threads=threads, capture=everywhere(spec))
    whole = World(decoder)
    whole.run(Chunk(0, PROMPT))
    cut = World(decoder, seed=2)
    cut.run(Chunk(0, PROMPT[:17]), Chunk(1, PROMPT[:5]))
    for start, end in [(17, 18), (18, 259), (259, 330)]:
        cut.run(Chunk(2, [5]), Chunk(0, PROMPT[start:end]), Tree(1, NODES, PARENTS))
    np.testing.assert_array_equal(of_row(cut, 0), of_row(whole, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nodes_features_are_those_of_its_text(dtype: Any) -> None:
    spec, weights = parts("gemma")
    decoder = NativeDecoder(spec, weights, dtype=dtype, threads=2, capture=everywhere(spec))
    world = World(decoder, seed=4)
    world.run(Chunk(0, PROMPT[:30]))
    tree = Tree(0, NODES, PARENTS)
    built = tree.build(world)
    tree.build = lambda _: built  # type: ignore[method-assign]
    world.run(Chunk(1, [5, 6]), tree)
    for node in range(len(NODES)):
        path = [node]
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
        chain = World(decoder)
        chain.run(Chunk(0, PROMPT[:30] + [NODES[other] for other in path]))
        np.testing.assert_array_equal(features(world, [built["slots"][node]])[0], of_row(chain, 0)[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", ["everywhere", "last", "first and middle"])
def test_capturing_changes_no_bit_of_the_logits(dtype: Any, where: str) -> None:
    spec, weights = parts("gemma")
    capture = {"everywhere": everywhere(spec), "last": (spec.num_layers,), "first and middle": (0, 2)}[where]
    plain = World(NativeDecoder(spec, weights, dtype=dtype, threads=2), seed=1)
    world = World(NativeDecoder(spec, weights, dtype=dtype, threads=2, capture=capture), seed=1)
    for step in ([Chunk(0, PROMPT[:50])], [Tree(0, NODES, PARENTS), Chunk(1, PROMPT[:9])]):
        for got, want in zip(world.run(*step), plain.run(*step), strict=True):
            np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(world.cache.keys.float().numpy(), plain.cache.keys.float().numpy())


@pytest.mark.parametrize("kind", ["torch", "native"])
@pytest.mark.parametrize("wanted", [[], [0, 3, 19], [19]])
def test_tokens_whose_logits_nobody_wants_are_captured_too(kind: str, wanted: list[int]) -> None:
    spec, weights = parts("plain")
    decoder: TorchDecoder | NativeDecoder
    if kind == "torch":
        decoder = TorchDecoder(spec, weights, capture=everywhere(spec))
    else:
        decoder = NativeDecoder(spec, weights, dtype="bfloat16", threads=2, capture=everywhere(spec))
    full, world = World(decoder), World(decoder)
    logits = full.run(Chunk(0, PROMPT[:20]))[0]
    got = run_for(world, Chunk(0, PROMPT[:20]), wanted)
    np.testing.assert_allclose(got, logits[wanted], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(of_row(world, 0), of_row(full, 0))


def run_for(world: World, chunk: Chunk, wanted: list[int]) -> np.ndarray:
    part = chunk.build(world)
    arrays = {name: np.array(values, dtype=np.int32) for name, values in part.items()}
    rows = np.array(wanted, dtype=np.int32)
    batch = TokenBatch(**arrays, tables=world.tables, logit_rows=rows)
    return world.decoder.forward(batch, world.cache).numpy().copy()


@pytest.mark.parametrize("variant", ["plain", "gemma", "untied", "odd sizes"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("kind", [*DTYPES, "torch"])
def test_a_pass_through_some_layers_is_a_model_cut_off_there(variant: str, depth: int, kind: Any) -> None:
    spec, weights = parts(variant)
    small = replace(spec, layers=spec.layers[:depth])
    cut = replace(weights, layers=weights.layers[:depth])
    capture = (0, spec.num_layers)
    decoders: list[Any]
    if kind == "torch":
        decoders = [TorchDecoder(spec, weights, capture=capture), TorchDecoder(small, cut)]
    else:
        full = NativeDecoder(spec, weights, dtype=kind, threads=2, capture=capture)
        decoders = [full, NativeDecoder(small, cut, dtype=kind, threads=2)]
    world, other = (World(decoder, seed=5) for decoder in decoders)
    world.decoder = Early(world.decoder, depth if depth < spec.num_layers else None)
    for step in ([Chunk(0, PROMPT[:50])], [Tree(0, NODES, PARENTS), Chunk(1, PROMPT[:9])]):
        for got, want in zip(world.run(*step), other.run(*step), strict=True):
            np.testing.assert_array_equal(got, want)
    for got, want in ((world.cache.keys, other.cache.keys), (world.cache.values, other.cache.values)):
        np.testing.assert_array_equal(got[:depth].float().numpy(), want.float().numpy())
        assert not got[depth:].any()
    assert world.cache.features is not None
    assert world.cache.features.any() == (depth == spec.num_layers), "a part of the model captures nothing"


class Early:
    """A decoder whose passes end after some layers."""

    def __init__(self, decoder: Any, layers: int | None) -> None:
        self.spec, self.capture, self.kv_dtype = decoder.spec, decoder.capture, decoder.kv_dtype
        self._decoder, self._layers = decoder, layers

    def forward(self, batch: TokenBatch, kv: KVCache, _: int | None = None) -> Tensor:
        logits: Tensor = self._decoder.forward(batch, kv, layers=self._layers)
        return logits


def test_places_and_depths_that_are_not_there_are_refused() -> None:
    spec, weights = parts("plain")
    for capture in [(4,), (-1,), (1, 1)]:
        with pytest.raises(ValueError, match="different places from 0 to 3"):
            TorchDecoder(spec, weights, capture=capture)
        with pytest.raises(ValueError, match="different places from 0 to 3"):
            NativeDecoder(spec, weights, dtype="float32", threads=1, capture=capture)
    for decoder in (
        TorchDecoder(spec, weights),
        NativeDecoder(spec, weights, dtype="float32", threads=1),
    ):
        for depth in (0, 4):
            with pytest.raises(ValueError, match="give 1 to 3"):
                World(Early(decoder, depth)).run(Chunk(0, [1]))


def test_a_cache_for_other_features_is_refused() -> None:
    spec, weights = parts("plain")
    some = NativeDecoder(spec, weights, dtype="float32", threads=1, capture=(1, 2))
    none = NativeDecoder(spec, weights, dtype="float32", threads=1)
    worlds = World(some, num_slots=8), World(none, num_slots=8)
    worlds[0].cache, worlds[1].cache = worlds[1].cache, worlds[0].cache
    for world in worlds:
        with pytest.raises(ValueError, match="keeps features"):
            world.run(Chunk(0, [1]))
