"""Laws of the small structures: trees, slots, the prefix cache, parameters."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.core.prefix_cache import PrefixCache
from paceline.core.slots import SlotPool
from paceline.core.token_tree import ROOT, TokenTree
from paceline.errors import RequestError


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    tree = TokenTree()
    for _ in range(draw(st.integers(0, 20))):
        tree.add(draw(st.integers(ROOT, len(tree) - 1)), draw(st.integers(0, 3)), -draw(st.floats(0, 3)))
    return tree


@given(trees(), st.integers(0, 12), st.integers(0, 6))
def test_selection_is_connected_bounded_and_best(tree: TokenTree, nodes: int, depth: int) -> None:
    chosen = tree.select(nodes, depth)
    assert len(chosen) <= nodes
    assert all(d <= depth for d in chosen.depths)
    allowed = sorted((v for v, d in zip(tree.values, tree.depths, strict=True) if d <= depth), reverse=True)
    assert sorted(chosen.values, reverse=True) == pytest.approx(allowed[:nodes])


@given(trees())
def test_equal_siblings_merge_and_paths_lead_to_the_root(tree: TokenTree) -> None:
    assert len({(p, t) for p, t in zip(tree.parents, tree.tokens, strict=True)}) == len(tree)
    for node in range(len(tree)):
        path = tree.path(node)
        assert path[-1] == node
        assert tree.parents[path[0]] == ROOT
        assert len(path) == tree.depths[node]
        assert all(tree.parents[below] == above for above, below in itertools.pairwise(path))


@given(trees(), st.randoms())
def test_walk_commits_accepted_tokens_and_one_more(tree: TokenTree, rng: random.Random) -> None:
    wanted = {node: rng.randrange(4) for node in range(ROOT, len(tree))}
    path, tokens = tree.walk(lambda node: wanted[node])
    assert len(tokens) == len(path) + 1
    assert [tree.tokens[node] for node in path] == tokens[:-1]
    assert tree.child(path[-1] if path else ROOT, tokens[-1]) is None


def test_a_parent_that_is_no_earlier_node_is_refused() -> None:
    with pytest.raises(ValueError, match="not an earlier node"):
        TokenTree.build([1, 2], [-1, 5])


def test_slots_cannot_be_freed_twice_or_invented() -> None:
    pool = SlotPool(4)
    slots = pool.allocate(3)
    assert slots == [0, 1, 2]
    assert pool.allocate(2) is None
    pool.release([1])
    with pytest.raises(ValueError, match="not owned"):
        pool.release([1])
    with pytest.raises(ValueError, match="not owned"):
        pool.release([9])


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=200))
def test_slot_pool_gives_each_slot_to_one_owner(moves: list[tuple[bool, int]]) -> None:
    pool, held = SlotPool(40), []
    for take, count in moves:
        if take:
            slots = pool.allocate(count)
            assert (slots is None) == (count > 40 - len(held))
            held.extend(slots or [])
        else:
            pool.release(held[:count])
            held = held[count:]
        assert len(set(held)) == len(held)
        assert pool.num_free == 40 - len(held)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=30), st.randoms())
def test_prefix_cache_finds_the_longest_prefix_and_leaks_nothing(
    texts: list[list[int]], rng: random.Random
) -> None:
    """Against a plain list of what was inserted; slots are checked by the token they were filled with."""
    pool = SlotPool(500)
    cache = PrefixCache(pool)
    content: dict[int, int] = {}
    known: list[list[int]] = []
    for text in texts:
        node, found = cache.match(text)
        best = max((_shared(text, other) for other in known), default=0)
        assert len(found) == best
        assert [content[slot] for slot in found] == text[:best]
        own = pool.allocate(len(text) - best)
        assert own is not None
        content |= dict(zip(own, text[best:], strict=True))
        node, slots, owned = cache.insert(text, [*found, *own], node, best)
        assert owned == len(text)
        assert [content[slot] for slot in slots] == text
        cache.unlock(node)
        known.append(text)
        if rng.random() < 0.1:
            cache.clear()
            known.clear()
        assert pool.num_free + cache.size == 500
    assert cache.num_evictable == cache.size
    cache.evict(1)
    cache.clear()
    assert pool.num_free == 500


def _shared(one: list[int], other: list[int]) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_locked_prefixes_are_never_evicted() -> None:
    pool = SlotPool(10)
    cache = PrefixCache(pool)
    node, _ = cache.match([1, 2, 3])
    node, slots, _ = cache.insert([1, 2, 3], pool.allocate(3) or [], node, 0)
    cache.evict(10)
    assert cache.match([1, 2, 3])[1] == slots


def test_duplicate_work_goes_back_to_the_pool() -> None:
    pool = SlotPool(10)
    cache = PrefixCache(pool)
    one, _ = cache.match([1, 2])
    other, _ = cache.match([1, 2])
    _, first, _ = cache.insert([1, 2], pool.allocate(2) or [], one, 0)
    _, second, _ = cache.insert([1, 2], pool.allocate(2) or [], other, 0)
    assert first == second
    assert pool.num_free == 8


BAD = [
    {"temperature": -1},
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"top_p": 0},
    {"top_p": 1.5},
    {"top_k": -1},
    {"top_k": 1.5},
    {"min_p": 2},
    {"repetition_penalty": 0},
    {"presence_penalty": 3},
    {"frequency_penalty": "x"},
    {"max_tokens": 0},
    {"min_tokens": 9, "max_tokens": 3},
    {"stop": [""]},
    {"stop": 5},
    {"stop_token_ids": ["x"]},
    {"stop_token_ids": [-1]},
    {"bad_words": "word"},
    {"bad_words": [[]]},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {1: 1000}},
    {"logprobs": -1},
    {"n": 0},
    {"seed": 1.5},
    {"num_speculative_tokens": -1},
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_parameter_is_named_with_its_remedy(bad: dict[str, object]) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**bad)  # type: ignore[arg-type]
    message = str(caught.value)
    assert next(iter(bad)).split("[")[0] in message
    assert any(word in message for word in ("must be", "give", "lower", "remove", "keys are"))


@given(st.lists(st.tuples(st.integers(-1, 30), st.integers(0, 2)), max_size=30))
def test_a_chain_that_starts_to_branch_is_the_tree_it_would_have_been(nodes: list[tuple[int, int]]) -> None:
    tree, below = TokenTree(), {ROOT: list[int]()}
    for parent, token in nodes:
        parent = min(parent, len(tree) - 1)
        known = next((node for node in below[parent] if tree.tokens[node] == token), None)
        assert tree.child(parent, token) == known
        node = tree.add(parent, token, -0.5)
        if known is None:
            below[parent].append(node)
            below[node] = []
        assert node == (known if known is not None else len(tree) - 1)
        assert {each: tree.children(each) for each in below} == below
    assert tree.best_below(ROOT, 5, 3) == TokenTree.build(tree.tokens, tree.parents, tree.scores).best_below(
        ROOT, 5, 3
    )
