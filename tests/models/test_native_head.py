"""The native head against the plain-torch specification, and bit for bit against itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.errors import KernelError
from paceline.kernels.kv_cache import KVCache
from paceline.models.head_chain import draft_chain
from paceline.models.native_head import NativeHead
from paceline.models.torch_head import TorchHead

from .heads import VARIANTS, HeadWorld, make_head, make_head_spec, make_head_weights
from .worlds import Chunk, Tree

DTYPES = ("float32", "bfloat16", "int8")
TOLERANCES = [("float32", 2e-5), ("bfloat16", 0.02), ("int8", 0.05)]
TEXT = np.random.default_rng(5).integers(0, 131, 330).tolist()


def states(count: int, width: int, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def native(variant: str, dtype: Any, threads: int = 1) -> NativeHead:
    spec, weights = make_head(variant)
    return NativeHead(spec, weights, dtype=dtype, threads=threads)


def near(got: Tensor, want: Tensor, tolerance: float) -> None:
    error = (got - want).abs() / max(1.0, float(want.std()))
    assert got.isfinite().all()
    assert error.max() < 6 * tolerance
    assert error.square().mean().sqrt() < tolerance


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
def test_agrees_with_torch(variant: str, dtype: Any, tolerance: float) -> None:
    spec, weights = make_head(variant)
    reference = HeadWorld(TorchHead(spec, weights))
    world = HeadWorld(NativeHead(spec, weights, dtype=dtype, threads=2), seed=3)
    width = spec.hidden_size
    steps = [
        [(Chunk(0, TEXT[:40]), states(40, width, 1))],
        [(Chunk(0, TEXT[40:310]), states(270, width, 2)), (Chunk(1, TEXT[:3]), states(3, width, 3))],
        [
            (Tree(0, [1, 2, 3, 4, 5], [-1, 0, 0, 1, 3]), states(5, width, 4)),
            (Chunk(1, [7]), states(1, width, 5)),
            (Tree(2, [9], [-1]), states(1, width, 6)),
        ],
    ]
    for module in range(spec.num_modules):
        for step in steps if module == 0 else steps[2:]:
            for got, want in zip(
                world.step(*step, module=module), reference.step(*step, module=module), strict=True
            ):
                near(got[0], want[0], tolerance)
                near(got[1], want[1], tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_fuse(variant: str, dtype: Any, tolerance: float, kind: torch.dtype) -> None:
    spec, weights = make_head(variant)
    head = NativeHead(spec, weights, dtype=dtype, threads=2)
    features = 3 * torch.randn(
        (300, len(spec.capture), spec.target_hidden_size), generator=torch.manual_seed(1)
    ).to(kind)
    got = head.fuse(features).clone()
    assert got.shape == (300, spec.hidden_size)
    near(got, TorchHead(spec, weights).fuse(features), tolerance)
    for row in (0, 1, 255, 256, 299):
        assert torch.equal(head.fuse(features[row : row + 1])[0], got[row])


def test_a_vocabulary_matrix_that_is_the_embedding() -> None:
    spec = make_head_spec(draft_vocab_size=131)
    weights = replace(make_head_weights(spec), lm_head=None, target_ids=None)
    hidden = states(5, spec.hidden_size)
    got, want = (
        HeadWorld(head).step((Chunk(0, [1, 2, 3, 4, 5]), hidden))[0][0]
        for head in (NativeHead(spec, weights, dtype="float32", threads=1), TorchHead(spec, weights))
    )
    near(got, want, 2e-5)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_weights_of_half_size(kind: torch.dtype) -> None:
    spec, weights = make_head("eagle3")
    module = weights.modules[0]
    layer = replace(
        module.layer,
        **{name: part.to(kind) for name, part in vars(module.layer).items() if part is not None},
    )
    assert weights.lm_head is not None
    assert weights.fc is not None
    halved = replace(
        weights,
        embed=weights.embed.to(kind),
        lm_head=weights.lm_head.to(kind),
        fc=weights.fc.to(kind),
        modules=[replace(module, layer=layer)],
    )
    hidden = states(5, spec.hidden_size)
    got, want = (
        HeadWorld(head).step((Chunk(0, [1, 2, 3, 4, 5]), hidden))[0][0]
        for head in (NativeHead(spec, halved, dtype="float32", threads=1), TorchHead(spec, halved))
    )
    near(got, want, 2e-5)


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_however_the_text_is_cut(variant: str, dtype: Any) -> None:
    head = native(variant, dtype)
    hidden = states(330, head.spec.hidden_size)
    ((whole, fed),) = HeadWorld(head).step((Chunk(0, TEXT), hidden))
    cut = HeadWorld(head, seed=2)
    pieces = [
        cut.step((Chunk(0, TEXT[a:b]), hidden[a:b]))[0] for a, b in [(0, 17), (17, 18), (18, 259), (259, 330)]
    ]
    assert torch.equal(torch.cat([logits for logits, _ in pieces]), whole)
    assert torch.equal(torch.cat([out for _, out in pieces]), fed)


@pytest.mark.parametrize("variant", ["eagle3", "odd sizes", "mtp"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefix", [1, 29, 255])
def test_tree_nodes_equal_a_committed_chain(variant: str, dtype: Any, prefix: int) -> None:
    head = native(variant, dtype)
    width = head.spec.hidden_size
    tokens, parents = [3, 4, 5, 6, 7, 8, 9, 10, 11], [-1, 0, 0, 1, 3, 2, 4, 6, -1]
    known, guessed = states(prefix, width, 1), states(9, width, 2)
    world = HeadWorld(head, seed=4)
    world.step((Chunk(0, TEXT[:prefix]), known))
    others = states(3, width, 3)
    result = world.step(
        (Chunk(1, [5, 6]), others[:2]), (Tree(0, tokens, parents), guessed), (Chunk(2, [9]), others[2:])
    )[1]
    for node in range(len(tokens)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        text = TEXT[:prefix] + [tokens[i] for i in path]
        ((logits, fed),) = HeadWorld(head).step((Chunk(0, text), torch.cat((known, guessed[path]))))
        assert torch.equal(result[0][node], logits[-1])
        assert torch.equal(result[1][node], fed[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_strangers_in_the_pass_change_nothing(dtype: Any, data: st.DataObject) -> None:
    head = native("everything", dtype, threads=data.draw(st.integers(1, 3)))
    width = head.spec.hidden_size
    texts = data.draw(
        st.lists(st.lists(st.integers(0, 130), min_size=1, max_size=70), min_size=1, max_size=4)
    )
    hidden = [states(len(text), width, seed) for seed, text in enumerate(texts)]
    alone = [HeadWorld(head).step((Chunk(0, text), h))[0] for text, h in zip(texts, hidden, strict=True)]
    world = HeadWorld(head, seed=data.draw(st.integers(0, 99)))
    cuts = [data.draw(st.integers(0, len(text))) for text in texts]
    got: dict[int, list[tuple[Tensor, Tensor]]] = {i: [] for i in range(len(texts))}
    for part in (slice(None, 1), slice(1, None)):
        pieces = []
        for i, (text, cut) in enumerate(zip(texts, cuts, strict=True)):
            a, b = (0, cut) if part.start is None else (cut, len(text))
            if a < b:
                pieces.append((Chunk(i, text[a:b]), hidden[i][a:b]))
        for (chunk, _), result in zip(pieces, world.step(*pieces) if pieces else [], strict=True):
            got[chunk.row].append(result)
    for i, (logits, fed) in enumerate(alone):
        assert torch.equal(torch.cat([one for one, _ in got[i]]), logits)
        assert torch.equal(torch.cat([one for _, one in got[i]]), fed)


def test_a_state_that_is_not_finite_breaks_its_own_text_only() -> None:
    head = native("eagle3", "float32")
    width = head.spec.hidden_size
    broken = states(3, width, 1)
    broken[1, 7] = float("nan")
    good = states(3, width, 2)
    world = HeadWorld(head)
    bad, fine = world.step((Chunk(0, [1, 2, 3]), broken), (Chunk(1, [4, 5, 6]), good))
    assert bad[0][0].isfinite().all()
    assert not bad[0][1:].isfinite().any()
    ((alone, _),) = HeadWorld(head).step((Chunk(0, [4, 5, 6]), good))
    assert torch.equal(fine[0], alone)


# ---------------------------------------------------------------- chains


@pytest.mark.parametrize("variant", ["eagle3", "eagle 3.1", "odd sizes", "mtp", "two modules"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("steps", [1, 2, 6])
def test_a_chain_is_its_steps_one_by_one(variant: str, dtype: Any, steps: int) -> None:
    head = native(variant, dtype)
    width = head.spec.hidden_size
    heats, seeds, positions = [0.0, 0.7, 1.0], [1, 2, 2**64 - 1], [300, 9, 4]
    results = []
    for run in (head.chain, lambda *args, **kwargs: draft_chain(head, *args, **kwargs)):
        world = HeadWorld(head, seed=6)
        world.step((Chunk(0, TEXT[:299]), states(299, width, 1)))
        batch, _ = world.batch(Chunk(0, [1]), Chunk(1, TEXT[:9]), Tree(2, [5, 6, 7], [-1, 0, 0]))
        object.__setattr__(batch, "logit_rows", np.array([0, 9, 12], dtype=np.int32))
        slots = np.array([[world.take() for _ in range(steps - 1)] for _ in range(3)], dtype=np.int32)
        tokens, scores, fed = run(
            *(batch, states(13, width, 2), world.cache),
            slots=slots.reshape(3, steps - 1),
            temperatures=heats,
            seeds=seeds,
            positions=positions,
            count=3,
        )
        results.append((tokens, scores, fed, world.cache.keys.clone()))
    assert results[0][0].shape == (3, steps, 3)
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_a_chain_of_nothing_goes_on_for_the_others() -> None:
    head = native("eagle3", "float32")
    width = head.spec.hidden_size
    hidden = states(2, width)
    hidden[0, 3] = float("inf")
    world = HeadWorld(head)
    batch, _ = world.batch(Chunk(0, [1]), Chunk(1, [2]))
    slots = np.array([[10, 11], [12, 13]], dtype=np.int32)
    options: dict[str, Any] = {"temperatures": [0.0] * 2, "seeds": [0] * 2, "positions": [1] * 2, "count": 2}
    tokens, scores, _ = head.chain(batch, hidden, world.cache, slots=slots, **options)
    assert (tokens[0] == -1).all()
    assert (scores[0] == -torch.inf).all()
    assert (tokens[1] >= 0).all()
    want, _, _ = TorchHead(*make_head("eagle3")).chain(
        batch, hidden, HeadWorld(TorchHead(*make_head("eagle3"))).cache, slots=slots, **options
    )
    assert tokens.tolist() == want.tolist()


def test_no_wanted_rows_and_no_tokens() -> None:
    head = native("eagle3", "float32")
    world = HeadWorld(head)
    batch, _ = world.batch(Chunk(0, [1, 2]))
    object.__setattr__(batch, "logit_rows", np.zeros(0, dtype=np.int32))
    logits, fed = head.forward(batch, states(2, head.spec.hidden_size), world.cache)
    assert (logits.shape, fed.shape) == ((0, 61), (0, 72))
    assert world.cache.keys[0, world.tables[0, :2]].abs().sum() > 0
    assert head.fuse(torch.zeros(0, 3, 48)).shape == (0, 72)
    tokens, _, fed = head.chain(
        *(batch, states(2, head.spec.hidden_size), world.cache),
        slots=np.zeros((0, 3), dtype=np.int32),
        temperatures=[],
        seeds=[],
        positions=[],
        count=2,
    )
    assert (tokens.shape, fed.shape) == ((0, 4, 2), (0, 4, 72))


# ---------------------------------------------------------------- what is refused


def test_calls_that_cannot_be_are_refused() -> None:
    head = native("eagle3", "float32")
    world = HeadWorld(head)
    batch, _ = world.batch(Chunk(0, [1, 2]))
    hidden = states(2, 72)
    with pytest.raises(ValueError, match="hidden states"):
        head.forward(batch, hidden[:1], world.cache)
    with pytest.raises(ValueError, match="hidden states"):
        head.forward(batch, hidden[:, :70], world.cache)
    with pytest.raises(ValueError, match="the cache holds"):
        head.forward(batch, hidden, KVCache(1, 8, 2, 64, torch.bfloat16))
    with pytest.raises(ValueError, match="the cache holds"):
        head.forward(batch, hidden, KVCache(1, 8, 2, 32, torch.float32))
    with pytest.raises(ValueError, match="module 1"):
        head.forward(batch, hidden, world.cache, 1)
    with pytest.raises(ValueError, match="2 modules"):
        native("two modules", "float32").forward(batch, hidden, KVCache(1, 8, 2, 64, torch.float32), 1)
    with pytest.raises(ValueError, match="this head reads"):
        head.fuse(torch.zeros(1, 2, 48))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        head.forward(replace(batch, tokens=np.array([1, 131], dtype=np.int32)), hidden, world.cache)
    # A token of the target that no row of the logits stands for is read all the same.
    head.forward(replace(batch, tokens=np.array([1, 130], dtype=np.int32)), hidden, world.cache)
    one: dict[str, Any] = {"temperatures": [0.0] * 2, "seeds": [0] * 2, "positions": [0] * 2, "count": 1}
    with pytest.raises(ValueError, match="slot"):
        head.chain(batch, hidden, world.cache, slots=np.full((2, 1), 9999, dtype=np.int32), **one)
    with pytest.raises(ValueError, match="2 chains"):
        head.chain(batch, hidden, world.cache, slots=np.zeros((1, 1), dtype=np.int32), **one)


def test_shapes_the_kernels_do_not_have() -> None:
    spec = make_head_spec(num_heads=3, num_kv_heads=2)
    with pytest.raises(KernelError, match="cannot share"):
        NativeHead(spec, make_head_weights(spec), dtype="float32", threads=1)
    spec = make_head_spec(joined=True, fused=False)
    with pytest.raises(KernelError, match="no fc"):
        NativeHead(spec, make_head_weights(spec), dtype="float32", threads=1)
