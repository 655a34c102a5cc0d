"""First in, first out, within a memory that is known beforehand; tenants do not see each other."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.suffix_cache import SuffixCache
from paceline.core.suffix_index import Context

MIB = 2**20


def following(cache: SuffixCache, context: list[int], tenant: str = "") -> list[int]:
    """What is known to have followed the last token of `context`, for the tenant, the latest first."""
    owner = cache.owner(tenant)
    if owner is None:
        return []
    found = cache.index.places(Context.of(context, cache.index.depth), 0, 10**6, owner)
    return found.next if found is not None else []


def filled(cache: SuffixCache, *texts: list[int], tenant: str = "") -> SuffixCache:
    for text in texts:
        cache.add(text, tenant)
        while cache.catch_up(10**6):
            pass
    return cache


def test_the_oldest_output_goes_first() -> None:
    cache = filled(SuffixCache(8, 2, MIB), [1, 2], [1, 3], [1, 4])
    assert following(cache, [1]) == [4, 3]
    assert [text.tolist() for text, _ in cache.texts()] == [[1, 3], [1, 4]]


def test_what_is_learnt_for_one_tenant_is_no_others() -> None:
    cache = SuffixCache(8, 10, MIB)
    filled(cache, [5, 6, 7], tenant="a")
    filled(cache, [5, 6, 8], tenant="b")
    assert following(cache, [5, 6], "a") == [7]
    assert following(cache, [5, 6], "b") == [8]
    assert cache.owner("c") is None


def test_a_tenant_whose_outputs_are_gone_is_forgotten_and_may_return() -> None:
    cache = SuffixCache(8, 1, MIB)
    filled(cache, [1, 2], tenant="a")
    filled(cache, [1, 3], tenant="b")
    assert cache.owner("a") is None
    filled(cache, [1, 4], tenant="a")
    assert following(cache, [1], "a") == [4]


def test_an_output_too_long_is_kept_from_its_end() -> None:
    cache = SuffixCache(4, 4, 2**13)
    whole = list(range(1, 5000))
    filled(cache, whole)
    ((text, _),) = cache.texts()
    assert 2 < len(text) < len(whole)
    assert text.tolist() == whole[-len(text) :]
    filled(cache, [7, 8, 9])
    assert following(cache, [7, 8]) == [9]


def test_an_output_of_one_token_teaches_nothing() -> None:
    assert len(filled(SuffixCache(8, 4, MIB), [3], [])) == 0


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=30), st.sampled_from("ab")), max_size=30),
    st.integers(1, 5),
)
def test_it_holds_the_latest_outputs_that_fit(texts: list[tuple[list[int], str]], most: int) -> None:
    """With counts equal to those of the texts it still has, whatever was dropped before."""
    cache = SuffixCache(6, most, 2**13)
    for tokens, tenant in texts:
        cache.add(tokens, tenant)
        cache.catch_up(20)
        assert len(cache) <= most
    while cache.catch_up(10**6):
        pass
    kept = [(text.tolist(), tenant) for text, tenant in cache.texts()]
    worthy = [(tokens, tenant) for tokens, tenant in texts if len(tokens) > 1]
    assert kept == worthy[len(worthy) - len(kept) :]
    for tenant in "ab":
        for token in range(3):
            after = [b for text, who in kept if who == tenant for a, b in pairwise(text) if a == token]
            assert following(cache, [token], tenant) == after[::-1]


def test_ten_thousand_outputs_fit_the_memory_promised() -> None:
    """Of 500 tokens each, in the default bound; more of them do not make it larger."""
    limit = 256 * MIB
    cache = SuffixCache(24, 10_000, limit)
    arrays = cache.index.nbytes
    rng = np.random.default_rng(0)
    text = rng.integers(0, 128_000, 500, dtype=np.int32)
    for number in range(10_200):
        text[rng.integers(0, 500, 8)] = number
        cache.add(text.copy())
        cache.catch_up(2048)
    assert len(cache) == 10_000
    assert cache.num_tokens == 5_000_000
    assert cache.max_bytes <= limit
    assert cache.index.nbytes == arrays
    found = cache.index.places(Context.of(text[:300].tolist(), 24), 2, 32, cache.owner("") or 0)
    assert found is not None
    assert found.next[0] == text[300]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 64), st.integers(1, 10**5), st.integers(2**20, 2**28))
def test_the_bound_holds_for_any_size(depth: int, texts: int, limit: int) -> None:
    cache = SuffixCache(depth, min(texts, limit // 1000), limit)
    assert cache.max_bytes <= limit
