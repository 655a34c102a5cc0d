"""Guesses from a request's own text: what is found, and how far it is trusted."""

from __future__ import annotations

import math

from paceline.core.lookup import Lookup, LookupOdds
from paceline.core.text_index import IndexedText


def lookup_in(tokens: list[int]) -> Lookup:
    lookup = Lookup(IndexedText(2, 4))
    lookup.read(tokens)
    return lookup


def test_a_continuation_is_found_after_guesses_too() -> None:
    lookup = lookup_in([1, 2, 3, 4, 5, 6, 7, 1, 2])
    found = lookup.find([], 3)
    assert found is not None
    assert (found.tokens, found.matched) == ([3, 4, 5], 2)
    below = lookup.find([3, 4], 3)
    assert below is not None
    assert (below.path, below.tokens, below.matched) == ([3, 4], [5, 6, 7], 4)
    assert lookup.find([9], 3) is None


def test_guesses_are_not_taken_in_as_text() -> None:
    lookup = lookup_in([1, 2, 3])
    assert lookup.find([9, 8, 7, 9, 8], 3) is None
    lookup.read([1, 2, 3, 1, 2])
    found = lookup.find([], 9)
    assert found is not None
    assert found.tokens == [3, 1, 2]


def test_only_what_was_reached_is_judged() -> None:
    odds, lookup = LookupOdds(), lookup_in([1, 2, 3, 4, 5, 6, 1, 2])
    before = odds.log_probability(2)
    lookup.find([], 4)  # 3 4 5 6
    lookup.find([9], 4)  # nothing there
    lookup.judge([3, 9], odds)
    assert not lookup.open
    fresh = LookupOdds()
    fresh.count(2, hit=True)
    fresh.count(2, hit=False)
    assert odds.log_probability(2) == fresh.log_probability(2) != before


def test_guesses_below_a_path_that_was_not_taken_are_not_judged() -> None:
    odds, lookup = LookupOdds(), lookup_in([1, 2, 3, 4, 5, 6, 1, 2])
    before = odds.log_probability(4)
    assert lookup.find([3, 4], 2) is not None
    lookup.judge([7], odds)
    assert odds.log_probability(4) == before


def test_odds_follow_what_happens() -> None:
    odds = LookupOdds()
    assert odds.log_probability(2) < odds.log_probability(4) < 0.0
    for _ in range(200):
        odds.count(2, hit=False)
        odds.count(3, hit=True)
    assert math.exp(odds.log_probability(2)) < 0.05
    assert math.exp(odds.log_probability(3)) > 0.95
