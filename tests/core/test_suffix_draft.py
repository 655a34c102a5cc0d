"""The draft is the best by the paper's rule, as a definition without an index finds it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.suffix_draft import Draft, SuffixRule, best_draft
from paceline.core.suffix_index import Context, SuffixIndex
from paceline.core.token_tree import ROOT


def index_of(texts: list[list[int]], depth: int = 6) -> SuffixIndex:
    index = SuffixIndex(256, depth, 64, growing=True)
    for text in texts:
        index.begin()
        index.write(text)
        index.catch_up(10**6)
    return index


def draft(texts: list[list[int]], context: list[int], rule: SuffixRule, nodes: int, depth: int = 99) -> Draft:
    index = index_of(texts)
    return best_draft([(index, 0)], Context.of(context, index.depth), rule, nodes, depth)


def count(texts: list[list[int]], string: list[int], following: list[int]) -> int:
    """Places where `string` stands with something after it, and that is `following` as far as it goes."""
    whole, least = [*string, *following], len(string) + max(1, len(following))
    return sum(
        text[at : at + len(whole)] == whole and at + least <= len(text)
        for text in texts
        for at in range(len(text))
    )


def defined(
    texts: list[list[int]], string: list[int], rule: SuffixRule, most: int, depth: int
) -> list[float]:
    """Chances of the likeliest nodes after `string`, the likeliest first."""
    tokens = {token for text in texts for token in text}
    open_ = [([], 1.0)]
    found: list[float] = []
    while open_ and len(found) < most:
        open_.sort(key=lambda node: -node[1])
        path, chance = open_.pop(0)
        if path:
            found.append(chance)
        places = count(texts, string, path) + (not path)
        children = [([*path, t], chance * count(texts, string, [*path, t]) / places) for t in tokens]
        children = [child for child in children if child[1] >= rule.min_token_prob and child[1] > 0]
        if not rule.branching:
            children = sorted(children, key=lambda child: -child[1])[:1]
        open_ += children if len(path) < depth else []
    return found


small_texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=4)


@settings(deadline=None, max_examples=40)
@given(
    small_texts,
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.sampled_from([0.01, 0.1, 0.4]),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_the_likeliest_nodes_of_the_best_match(
    texts: list[list[int]],
    context: list[int],
    factor: float,
    offset: float,
    least: float,
    nodes: int,
    depth: int,
) -> None:
    rule = SuffixRule(factor, offset, least)
    best = 0.0
    for length in range(1, len(context) + 1):
        most = min(nodes, int(factor * length + offset))
        if count(texts, context[-length:], []):
            best = max(best, sum(defined(texts, context[-length:], rule, most, depth)))
    found = draft(texts, context, rule, nodes, depth)
    assert found.score == pytest.approx(best)
    assert found.score == pytest.approx(sum(found.reached))
    if found.tokens:
        string = context[-found.matched :]
        for node in range(len(found.tokens)):
            path = path_of(found, node)
            chance = count(texts, string, path) / (count(texts, string, path[:-1]) + (len(path) == 1))
            above = found.reached[found.parents[node]] if found.parents[node] != ROOT else 1.0
            assert found.reached[node] == pytest.approx(above * chance)
            assert len(path) <= depth
        tree = found.tree()
        assert tree.tokens == found.tokens
        assert len(found.tokens) <= min(nodes, int(factor * found.matched + offset))


def path_of(found: Draft, node: int) -> list[int]:
    path = []
    while node != ROOT:
        path.append(found.tokens[node])
        node = found.parents[node]
    return path[::-1]


@settings(deadline=None, max_examples=40)
@given(small_texts, st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 8))
def test_a_chain_is_the_greedy_path(texts: list[list[int]], context: list[int], nodes: int) -> None:
    """Equal counts may go either way, so that only its own steps are checked."""
    found = draft(texts, context, SuffixRule(1.0, 1.0, 0.05, branching=False), nodes)
    assert found.parents == list(range(-1, len(found.tokens) - 1))
    string = context[-found.matched :]
    for at, token in enumerate(found.tokens):
        path = found.tokens[:at]
        counts = {t: count(texts, string, [*path, t]) for t in range(3)}
        assert counts[token] == max(counts.values())


def test_equal_scores_go_to_the_longer_match_and_then_to_the_first_source() -> None:
    rule = SuffixRule(0.0, 1.0)
    one, other = index_of([[1, 2, 3, 4]]), index_of([[1, 2, 3, 9]])
    context = Context.of([1, 2, 3], one.depth)
    both = best_draft([(one, 0), (other, 0)], context, rule, 4, 4)
    assert (both.tokens, both.matched) == ([4], 3)
    assert best_draft([(other, 0), (one, 0)], context, rule, 4, 4).tokens == [9]


def test_a_longer_match_that_is_surer_wins_over_more_places() -> None:
    found = draft([[5, 1, 7], [5, 1, 7], [5, 1, 7], [6, 1, 8], [6, 1, 8]], [6, 1], SuffixRule(0.0, 1.0), 4)
    assert (found.tokens, found.matched) == ([8], 2)
    assert found.score == pytest.approx(2 / 3)


def test_nothing_is_guessed_of_a_context_that_nothing_followed() -> None:
    assert not draft([[1, 2, 3]], [3], SuffixRule(), 8).tokens
    assert not draft([[1, 2, 3]], [9], SuffixRule(), 8).tokens
