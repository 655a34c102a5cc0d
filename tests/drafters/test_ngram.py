"""Prompt lookup: which continuation is offered, and that the index knows what a scan would find."""

from __future__ import annotations

from math import log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.core.text_index import IndexedText
from paceline.core.token_tree import TokenTree
from paceline.core.work import Announcement, DraftItem
from paceline.drafters.ngram import NgramDrafter
from paceline.errors import ConfigError


def scan(tokens: list[int], min_match: int, max_match: int, count: int) -> list[int]:
    """The definition: longest suffix that occurred before, earliest occurrence, what followed it."""
    for length in range(min(max_match, len(tokens) - 1), min_match - 1, -1):
        suffix = tokens[len(tokens) - length :]
        for end in range(length, len(tokens)):
            if tokens[end - length : end] == suffix:
                return tokens[end : end + count]
    return []


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 6),
    st.lists(st.integers(0, 40), max_size=5),
)
def test_the_index_finds_what_a_scan_finds(
    tokens: list[int], min_match: int, more: int, count: int, cuts: list[int]
) -> None:
    text = IndexedText(min_match, min_match + more)
    at = 0
    for cut in [*sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]:
        text.extend(tokens[at:cut])
        at = cut
        assert text.continuation(count) == scan(tokens[:cut], min_match, min_match + more, count)


def test_the_longest_match_wins_and_then_the_earliest() -> None:
    text = IndexedText(1, 3)
    text.extend([1, 2, 3, 9, 7, 3, 8, 2, 3, 5, 1, 2, 3])
    assert text.continuation(2) == [9, 7]
    text.extend([8])
    assert text.continuation(3) == [2, 3, 5]


def test_nothing_is_offered_without_a_match_or_after_the_end() -> None:
    text = IndexedText(2, 3)
    text.extend([1, 2, 3, 2])
    assert text.continuation(4) == []
    repeated = IndexedText(1, 3)
    repeated.extend([4, 4])
    assert repeated.continuation(4) == [4]


def test_requests_do_not_see_each_other() -> None:
    drafter = NgramDrafter(1, 3)
    told = Announcement(3, SamplingParams().resolved())
    drafter.advance([DraftItem("a", 0, (1, 2, 3, 1), 0, 0, told)])
    drafter.advance([DraftItem("b", 0, (5, 6, 1), 0, 0, told)])
    (mine,) = drafter.grow([DraftItem("a", 4, (2,), 3, 3)])
    (other,) = drafter.grow([DraftItem("b", 3, (), 3, 3)])
    assert (mine.tokens, mine.num_tokens) == ((3, 1, 2), 5)
    assert other.tokens == ()
    drafter.release(["a", "b", "unknown"])


def test_longer_matches_have_better_scores_that_learn() -> None:
    drafter = NgramDrafter(1, 3)
    told = Announcement(3, SamplingParams().resolved())
    scores = {}
    for matched in (1, 2, 3):
        text = (1, 2, 3, 4, 5, 9, *(1, 2, 3)[3 - matched :])
        (found,) = drafter.grow([DraftItem(f"m{matched}", 0, text, 2, 2, told)])
        assert found.tokens == (4, 5)
        (scores[matched],) = set(found.scores)
        assert scores[matched] == pytest.approx(log(matched / (matched + 1)))
    assert scores[1] < scores[2] < scores[3] < 0.0
    (later,) = drafter.grow([DraftItem("m3", 9, (4, 5, 9, 1, 2, 3), 2, 2)])
    assert later.scores == pytest.approx([log((2 + 8 * 3 / 4) / (2 + 8))] * 2), "both were right"


def places(tokens: list[int], min_match: int, max_match: int, most: int) -> list[tuple[int, int]]:
    """Of each length, longest first, the earliest place and the latest: (place, length)."""
    found: dict[int, int] = {}
    for length in range(min(max_match, len(tokens) - 1), min_match - 1, -1):
        suffix = tokens[len(tokens) - length :]
        ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == suffix]
        for end in (ends[0], ends[-1]) if ends else ():
            found.setdefault(end, length)
    return list(found.items())[:most]


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 3), st.integers(0, 3), st.integers(1, 5))
def test_branches_are_the_earliest_and_latest_places_of_every_length(
    tokens: list[int], min_match: int, more: int, most: int
) -> None:
    text = IndexedText(min_match, min_match + more, latest=True)
    for token in tokens:
        text.extend([token])
    expected = [
        (tokens[end : end + 3], length) for end, length in places(tokens, min_match, min_match + more, most)
    ]
    assert text.continuations(3, most) == expected


def test_branches_are_one_tree_whose_scores_learn() -> None:
    drafter = NgramDrafter(1, 2, branches=2)
    told = Announcement(3, SamplingParams().resolved())
    (first,) = drafter.grow([DraftItem("a", 0, (7, 1, 5, 7, 2, 5, 9, 7), 4, 4, told)])
    tree = TokenTree.build(first.tokens, first.parents, first.scores)
    paths = [[tree.tokens[node] for node in tree.path(leaf)] for leaf in range(len(tree))]
    assert sorted(paths) == [[1], [1, 5], [2], [2, 5]]
    (second,) = drafter.grow([DraftItem("a", 8, (2, 6, 7), 4, 4)])
    scores = dict(zip(second.tokens, second.scores, strict=True))
    assert scores[1] == scores[2], "places of one length have one chance"
    # The first branch failed at once, the second with its second token: one hit in three.
    assert scores[1] == pytest.approx(log((1 + 8 / 2) / (3 + 8)))


@pytest.mark.parametrize("max_nodes", [1, 3, 8])
def test_branches_keep_within_what_is_asked_for(max_nodes: int) -> None:
    drafter = NgramDrafter(1, 3, branches=6)
    told = Announcement(3, SamplingParams().resolved())
    (found,) = drafter.grow([DraftItem("a", 0, tuple([1, 2, 1, 3, 1, 2, 4] * 3 + [1]), max_nodes, 2, told)])
    assert 0 < len(found.tokens) <= max_nodes
    assert max(TokenTree.build(found.tokens, found.parents).depths) <= 2


def test_there_is_at_least_one_branch() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        NgramDrafter(1, 3, branches=0)


def test_lengths_must_be_in_order() -> None:
    with pytest.raises(ConfigError, match="smaller must be"):
        NgramDrafter(4, 3)
