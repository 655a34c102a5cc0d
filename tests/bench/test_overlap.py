from __future__ import annotations

import pytest

from paceline.bench.overlap import overlap


def test_overlap_by_hand() -> None:
    """Of a b c d x: 4 of 5 words, 3 of 4 pairs, 2 of 3 triples, 1 of 2 quadruples."""
    expected = (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert overlap("abcdefg", "abcdx") == pytest.approx(expected)


def test_ends_of_the_scale() -> None:
    assert overlap("abcdef", "bcde") == 1.0
    assert overlap("abcdef", "xyzw") == 0.0
    assert overlap("abcdef", "abc") is None


def test_a_word_counts_as_often_as_the_prompt_has_it() -> None:
    assert overlap("aaaa", "aaaaaaaa") == pytest.approx((4 / 8 * 3 / 7 * 2 / 6 * 1 / 5) ** 0.25)
