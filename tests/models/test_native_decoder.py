"""The native pass against the plain-torch specification, and bit for bit against itself."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import KernelError
from paceline.kernels.batch import TokenBatch
from paceline.kernels.kv_cache import KVCache
from paceline.models.native_decoder import NativeDecoder
from paceline.models.spec import DecoderWeights, LayerSpec
from paceline.models.torch_decoder import TorchDecoder

from .worlds import Chunk, Tree, World, make_rope, make_spec, make_weights

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "one head per kv head": ({"num_heads": 3, "num_kv_heads": 3}, {}),
    "eight heads per kv head": ({"num_heads": 8, "num_kv_heads": 1}, {}),
    "head_dim 80": ({"head_dim": 80, "num_heads": 6}, {}),
    "head_dim 96": ({"head_dim": 96}, {}),
    "head_dim 128": ({"head_dim": 128}, {}),
    "head_dim 20": ({"head_dim": 20, "num_heads": 3, "num_kv_heads": 1}, {}),
    "biases": ({}, {"biases": True}),
    "qk norm": ({"qk_norm": True, "head_dim": 80}, {}),
    "gemma": (
        {
            "qk_norm": True,
            "post_norms": True,
            "activation": "gelu_tanh",
            "embed_scale": 8.5,
            "layers": (LayerSpec(window=7), LayerSpec(rope=1), LayerSpec(window=300)),
            "ropes": (make_rope(64, 10_000.0), make_rope(64, 1e6, 1.2)),
            "attn_scale": 0.09,
        },
        {},
    ),
    "untied": ({"vocab_size": 77}, {"tied": False}),
    "odd sizes": ({"vocab_size": 33, "hidden_size": 70, "intermediate_size": 37}, {"biases": True}),
}
DTYPES = ("float32", "bfloat16", "int8")
PROMPT = np.random.default_rng(5).integers(0, 33, 330).tolist()


def native(dtype: Any, variant: str = "plain", threads: int = 2) -> NativeDecoder:
    changes, options = VARIANTS[variant]
    spec = make_spec(**changes)
    return NativeDecoder(spec, make_weights(spec, **options), dtype=dtype, threads=threads)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-5), ("bfloat16", 0.02), ("int8", 0.05)])
def test_agrees_with_torch(variant: str, dtype: Any, tolerance: float) -> None:
    changes, options = VARIANTS[variant]
    spec = make_spec(**changes)
    weights = make_weights(spec, **options)
    reference = World(TorchDecoder(spec, weights))
    world = World(NativeDecoder(spec, weights, dtype=dtype, threads=2), seed=3)
    steps = [[Chunk(0, PROMPT[:40])], [Chunk(0, PROMPT[40:310]), Chunk(1, PROMPT[:3])]]
    steps.append([Tree(0, [1, 2, 3, 4, 5], [-1, 0, 0, 1, 3]), Chunk(1, [7])])
    for step in steps:
        for got, want in zip(world.run(*step), reference.run(*step), strict=True):
            error = np.abs(got - want) / max(1.0, float(want.std()))
            assert error.max() < 5 * tolerance
            assert np.sqrt(np.square(error).mean()) < tolerance
            assert np.isfinite(got).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_however_the_prompt_is_cut(variant: str, dtype: Any) -> None:
    decoder = native(dtype, variant)
    whole = World(decoder).run(Chunk(0, PROMPT))[0]
    single = World(decoder, seed=1)
    one_by_one = np.concatenate([single.run(Chunk(0, [t]))[0] for t in PROMPT])
    np.testing.assert_array_equal(one_by_one, whole)
    cut = World(decoder, seed=2)
    pieces = [cut.run(Chunk(0, PROMPT[a:b]))[0] for a, b in [(0, 17), (17, 18), (18, 259), (259, 330)]]
    np.testing.assert_array_equal(np.concatenate(pieces), whole)


@pytest.mark.parametrize("variant", ["plain", "gemma", "eight heads per kv head", "odd sizes"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefix", [1, 29, 64, 255, 300])
def test_tree_nodes_equal_a_committed_chain(variant: str, dtype: Any, prefix: int) -> None:
    decoder = native(dtype, variant)
    tokens = [3, 4, 5, 6, 7, 8, 9, 10, 11]
    parents = [-1, 0, 0, 1, 3, 2, 4, 6, -1]
    world = World(decoder, seed=4)
    world.run(Chunk(0, PROMPT[:prefix]))
    tree = world.run(Chunk(1, [5, 6]), Tree(0, tokens, parents), Chunk(2, [9]))[1]
    for node in range(len(tokens)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        chain = World(decoder).run(Chunk(0, PROMPT[:prefix] + [tokens[i] for i in path]))[0]
        np.testing.assert_array_equal(tree[node], chain[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_strangers_in_the_pass_change_nothing(dtype: Any, data: st.DataObject) -> None:
    decoder = native(dtype, "gemma", threads=data.draw(st.integers(1, 3)))
    token = st.integers(0, 130)
    prompts = data.draw(st.lists(st.lists(token, min_size=1, max_size=70), min_size=1, max_size=4))
    alone = [World(decoder).run(Chunk(0, prompt))[0] for prompt in prompts]
    world = World(decoder, seed=data.draw(st.integers(0, 99)))
    cuts = [data.draw(st.integers(0, len(prompt))) for prompt in prompts]
    first = [Chunk(i, p[:c]) for i, (p, c) in enumerate(zip(prompts, cuts, strict=True)) if c]
    second = [Chunk(i, p[c:]) for i, (p, c) in enumerate(zip(prompts, cuts, strict=True)) if p[c:]]
    got: dict[int, list[np.ndarray]] = {i: [] for i in range(len(prompts))}
    for step in (first, second):
        for chunk, logits in zip(step, world.run(*step) if step else [], strict=True):
            got[chunk.row].append(logits)
    for i, want in enumerate(alone):
        np.testing.assert_array_equal(np.concatenate(got[i]), want)


BROKEN = 100  # a token whose embedding is not finite
WINDOWS = {"none": (0, 0), "short": (7, 7), "mixed": (7, 0), "long": (150, 300)}


def breakable(dtype: Any, windows: str) -> NativeDecoder:
    spec = make_spec(layers=tuple(LayerSpec(window=window) for window in WINDOWS[windows]))
    weights = make_weights(spec, tied=False)
    weights.embed[BROKEN] = torch.inf
    return NativeDecoder(spec, weights, dtype=dtype, threads=2)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [1, 20, 130, 200])
def test_what_is_not_finite_reaches_only_those_who_see_it(dtype: Any, windows: str, at: int) -> None:
    decoder = breakable(dtype, windows)
    prompt = PROMPT[:250]
    want = World(decoder).run(Chunk(0, prompt))[0]
    prompt[at] = BROKEN
    got = World(decoder, seed=1).run(Chunk(0, prompt))[0]
    sees = [window - 1 if window else len(prompt) for window in WINDOWS[windows]]
    end = at + sum(sees) + 1
    np.testing.assert_array_equal(got[:at], want[:at])
    assert not np.isfinite(got[at]).any()
    np.testing.assert_array_equal(got[end:], want[end:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_broken_node_leaves_its_siblings_alone(dtype: Any) -> None:
    decoder = breakable(dtype, "none")
    parents = [-1, 0, 0, 1, 2]
    results = []
    for tokens in ([3, 4, 5, 6, 7], [3, BROKEN, 5, 6, 7]):
        world = World(decoder)
        world.run(Chunk(0, PROMPT[:70]))
        results.append(world.run(Tree(0, tokens, parents), Chunk(1, [8]))[0])
    want, got = results
    np.testing.assert_array_equal(got[[0, 2, 4]], want[[0, 2, 4]])
    assert not np.isfinite(got[[1, 3]]).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [1, 3, 60])
def test_slots_behind_the_window_are_not_read(dtype: Any, step: int) -> None:
    decoder = breakable(dtype, "short")
    results = []
    for fill in (0.0, torch.nan):
        world = World(decoder)
        world.run(Chunk(0, PROMPT[:150]))
        behind = world.tables[0, : 150 - 6]
        world.cache.keys[:, behind] = fill
        world.cache.values[:, behind] = fill
        results.append(world.run(Chunk(0, PROMPT[150 : 150 + step]))[0])
    np.testing.assert_array_equal(results[1], results[0])
    assert np.isfinite(results[0]).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_logit_rows_select_tokens(dtype: Any) -> None:
    decoder = native(dtype)
    world = World(decoder)
    everything = world.run(Chunk(0, PROMPT[:20]))[0]
    part = Chunk(1, PROMPT[:20]).build(world)
    arrays = {name: np.array(values, dtype=np.int32) for name, values in part.items()}
    for wanted in ([0, 3, 19], []):
        rows = np.array(wanted, dtype=np.int32)
        batch = TokenBatch(**arrays, tables=world.tables, logit_rows=rows)
        logits = decoder.forward(batch, world.cache)
        assert logits.shape == (len(wanted), decoder.spec.vocab_size)
        np.testing.assert_array_equal(logits.numpy(), everything[wanted])


def test_int8_agrees_with_its_own_weights_in_full_precision() -> None:
    spec = make_spec(hidden_size=192, intermediate_size=200)
    weights = make_weights(spec)
    rounded = DecoderWeights(
        int8_rounded(weights.embed),
        weights.final_norm,
        [
            replace(
                layer,
                **{m: int8_rounded(getattr(layer, m)) for m in ("q", "k", "v", "o", "gate", "up", "down")},
            )
            for layer in weights.layers
        ],
    )
    want = World(TorchDecoder(spec, rounded)).run(Chunk(0, PROMPT[:40]))[0]
    got = World(NativeDecoder(spec, weights, dtype="int8", threads=2)).run(Chunk(0, PROMPT[:40]))[0]
    # What is left is the rounding of keys, values, queries and softmax weights to bfloat16.
    assert np.sqrt(np.square(got - want).mean()) < 0.01


def int8_rounded(weight: torch.Tensor) -> torch.Tensor:
    """Groups of 64 along the inputs, scale = peak / 127 rounded up to bfloat16."""
    out, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % 64)).view(out, -1, 64)
    exact = padded.abs().amax(-1, keepdim=True) / 127
    scale = exact.bfloat16().float()
    bumped = (scale.bfloat16().view(torch.int16) + 1).view(torch.bfloat16).float()
    scale = torch.where(scale * 127 < exact * 127, bumped, scale)
    return ((padded / scale).round().clamp(-127, 127) * scale).flatten(1)[:, :inputs].contiguous()


def test_threads_and_cores_change_nothing() -> None:
    spec = make_spec()
    weights = make_weights(spec)
    results = [
        World(NativeDecoder(spec, weights, dtype="bfloat16", threads=n, cores=cores)).run(Chunk(0, PROMPT))[0]
        for n, cores in [(1, None), (2, [0, 1]), (3, None), (5, [0])]
    ]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["plain", "gemma", "odd sizes"])
def test_exact_torch_has_the_same_bits(variant: str, dtype: torch.dtype) -> None:
    changes, options = VARIANTS[variant]
    spec = make_spec(**changes)
    decoder = TorchDecoder(spec, make_weights(spec, **options), dtype=dtype, exact=True)
    whole = World(decoder).run(Chunk(0, PROMPT[:30]))[0]
    world = World(decoder, seed=1)
    world.run(Chunk(0, PROMPT[:9]))
    tree = world.run(Chunk(1, [3]), Tree(0, PROMPT[9:15], [-1, 0, 1, 2, 3, 4]))[1]
    np.testing.assert_array_equal(tree, whole[9:15])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", 131, "token id"),
        ("tokens", -1, "token id"),
        ("slots", 5000, "slot"),
        ("rows", 9, "row"),
        ("positions", 3, "position"),
        ("prefix_len", 5000, "prefix_len"),
        ("path_len", 2, "path"),
        ("logit_rows", 1, "logit_rows"),
    ],
)
def test_a_malformed_batch_is_refused(name: str, value: int, message: str) -> None:
    world = World(native("float32"))
    arrays = {k: np.array(v, dtype=np.int32) for k, v in Chunk(0, [1]).build(world).items()}
    fields = {**arrays, "tables": world.tables, "logit_rows": np.array([0], dtype=np.int32)}
    fields[name] = np.array([value], dtype=np.int32)
    with pytest.raises(ValueError, match=message):
        world.decoder.forward(TokenBatch(**fields), world.cache)


def test_a_cache_of_another_model_is_refused() -> None:
    world = World(native("bfloat16"))
    world.cache = KVCache(2, 16, 2, 64, torch.float32)
    with pytest.raises(ValueError, match="this decoder needs"):
        world.run(Chunk(0, [1]))


def test_shapes_it_does_not_cover_are_refused() -> None:
    for changes, message in [
        ({"num_heads": 3}, "share"),
        ({"head_dim": 1200}, "head_dim"),
        ({"head_dim": 21}, "head_dim 21 is not even"),
        ({"num_heads": 98}, "heads per key-value head"),
    ]:
        spec = make_spec(**changes)
        with pytest.raises(KernelError, match=message):
            NativeDecoder(spec, make_weights(make_spec()), dtype="float32", threads=1)
    with pytest.raises(ValueError, match="threads"):
        NativeDecoder(make_spec(), make_weights(make_spec()), dtype="float32", threads=0)


@contextlib.contextmanager
def little_memory_left(size: int) -> Iterator[None]:
    """Lets this process map `size` more bytes and no more."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def check_threads_the_system_refuses() -> None:
    spec = make_spec()
    weights = make_weights(spec)
    native("float32")  # the library is built and loaded
    # A stack takes some megabytes of address space each.
    with little_memory_left(256 << 20), pytest.raises(KernelError, match="1024 threads: lower threads"):
        NativeDecoder(spec, weights, dtype="float32", threads=1024)
    assert native("float32") is not None


def check_a_pass_without_memory() -> None:
    spec = make_spec(intermediate_size=40_000)
    world = World(NativeDecoder(spec, make_weights(spec), dtype="bfloat16", threads=2))
    want = world.run(Chunk(0, PROMPT[:5]))[0]
    # One buffer takes 158 MB, more than an allocator keeps of what was freed before.
    part = Chunk(1, PROMPT * 3).build(world)
    arrays = {name: np.array(values, dtype=np.int32) for name, values in part.items()}
    batch = TokenBatch(**arrays, tables=world.tables, logit_rows=np.zeros(1, dtype=np.int32))
    with little_memory_left(4 << 20), pytest.raises(MemoryError, match="buffers of this pass"):
        world.decoder.forward(batch, world.cache)
    world.decoder.forward(batch, world.cache)
    np.testing.assert_array_equal(world.run(Chunk(2, PROMPT[:5]))[0], want)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and limits the address space")
@pytest.mark.parametrize("check", [check_threads_the_system_refuses, check_a_pass_without_memory])
def test_a_lack_of_threads_or_memory_is_an_error(check: Callable[[], None]) -> None:
    # In a process of its own: what earlier tests have freed would serve what is asked for here.
    script = f"from {__name__} import {check.__name__} as check; check()"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
