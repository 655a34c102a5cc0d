from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from paceline.kernels import reference, triton
from paceline.kernels.batch import TokenBatch

from ..trees import BUSHY, CHAIN, PASSES, STAR, Chunk, Tree, make_layer, make_pass

CPU = torch.device("cpu")


def errors(
    batch: TokenBatch,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Largest difference from the specification."""
    layer = make_layer(batch, heads, kv_heads, dim, dtype)
    plan = reference.plan_tree(batch, CPU)
    got = triton.tree_attention(*layer, plan, dim**-0.5, window)
    want = reference.tree_attention(*layer, plan, dim**-0.5, window)
    return float((got - want).abs().max())


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("window", [0, 5])
def test_passes(name: str, window: int) -> None:
    assert errors(make_pass(PASSES[name]), 3, 1, 64, window) < 1e-5


@pytest.mark.parametrize("group", range(1, 9))
def test_heads_per_kv_head(group: int) -> None:
    assert errors(make_pass([Tree(70, STAR[:3]), Tree(3)]), 2 * group, 2, 64) < 1e-5


@pytest.mark.parametrize("dim", [20, 64, 80, 128])
def test_head_dims(dim: int) -> None:
    assert errors(make_pass([Tree(70, STAR)]), 1, 1, dim) < 1e-5


def test_half_precision() -> None:
    # The interpreter multiplies bfloat16 as if it were integers.
    batch = make_pass([Tree(70, STAR), Tree(300, BUSHY)])
    assert errors(batch, 4, 2, 64, dtype=torch.float16) < 2e-3


@pytest.mark.parametrize("window", [0, 300])
def test_long_contexts(window: int) -> None:
    assert errors(make_pass([Tree(4093, CHAIN[:4]), Tree(511)]), 2, 1, 64, window) < 1e-5


def test_a_row_of_the_table_may_be_padded() -> None:
    batch = make_pass(PASSES["mixed"])
    layer = make_layer(batch, 2, 1, 64)
    plans = [reference.plan_tree(batch, CPU, pad_slots_to=n) for n in (1, 512)]
    one, other = (triton.tree_attention(*layer, plan, 0.1, 0) for plan in plans)
    assert torch.equal(one, other)


def test_a_node_and_a_token_of_a_prompt_add_up_alike() -> None:
    """The same slots at the same positions, with neighbours, without, and as committed tokens."""
    batch = make_pass([Tree(250, CHAIN)])
    q, k, v = make_layer(batch, 4, 2, 64)
    chain = triton.tree_attention(q, k, v, reference.plan_tree(batch, CPU), 0.125, 0)
    longest = int(batch.positions.argmax())
    slots = [*batch.tables[1, :250], *batch.path_slots[batch.path_start[longest] :][:12]]
    committed = replace(
        batch,
        prefix_len=batch.positions + 1,
        path_len=batch.path_len * 0,
        tables=torch.tensor([[0] * 262, slots], dtype=torch.int32).numpy(),
    )
    prompt = triton.tree_attention(q, k, v, reference.plan_tree(committed, CPU), 0.125, 0)
    assert torch.equal(prompt, chain)
    for i in range(0, len(batch), 5):
        few = slice(i, i + 1)
        names = ("tokens", "positions", "slots", "rows", "prefix_len", "path_start", "path_len")
        alone = replace(batch, **{name: getattr(batch, name)[few] for name in names})
        single = triton.tree_attention(q[few], k, v, reference.plan_tree(alone, CPU), 0.125, 0)
        assert torch.equal(single, chain[few])


def test_a_broken_guess_reaches_no_sibling() -> None:
    batch = make_pass([Tree(40, STAR)])
    q, keys, values = make_layer(batch, 2, 1, 64)
    values[batch.slots[3]] = float("nan")
    out = triton.tree_attention(q, keys, values, reference.plan_tree(batch, CPU), 0.1, 0)
    assert out.isfinite().all(-1).all(-1).tolist() == [i != 3 for i in range(len(batch))]


def test_prompts_are_left_to_the_gathering_kernel() -> None:
    assert triton.takes_tree(make_pass([Tree(300, BUSHY)]))
    assert not triton.takes_tree(
        replace(make_pass([Chunk(0, 1000)]), positions=make_pass([Chunk(3000, 1000)]).positions)
    )
