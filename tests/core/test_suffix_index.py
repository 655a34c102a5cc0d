"""The places that the chains name are those that a scan of all texts finds."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.suffix_index import Context, SuffixIndex, tokens_of

ALL = 10**6
Text = tuple[int, list[int], int]  # position of the first token, tokens, owner


@dataclass
class Scan:
    """The definition: all texts, looked through."""

    texts: list[Text] = field(default_factory=list)

    def places(self, context: list[int], owner: int) -> list[tuple[int, int]]:
        """Where something follows at least the last token of `context`, the latest first, with how much."""
        found = []
        for start, tokens, whose in self.texts:
            for at in range(1, len(tokens)):
                matched = 0
                while matched < min(at, len(context)) and tokens[at - 1 - matched] == context[-1 - matched]:
                    matched += 1
                if whose == owner and matched:
                    found.append((start + at, matched))
        return found[::-1]


def known(index: SuffixIndex, context: list[int], owner: int, most: int = ALL) -> list[list[tuple[int, int]]]:
    """By level."""
    found = [
        index.places(Context.of(context, index.depth), level, most, owner)
        for level in range(len(index.grams))
    ]
    return [list(zip(f.places.tolist(), f.matched, strict=True)) if f is not None else [] for f in found]


def check(index: SuffixIndex, scan: Scan, context: list[int], owner: int) -> None:
    expected = scan.places(context[-index.depth :], owner)
    found = known(index, context, owner)
    for level, gram in enumerate(index.grams):
        here = [(at, min(m, index.longest(level))) for at, m in expected if m >= gram]
        assert found[level] == here
        places = index.places(Context.of(context, index.depth), level, ALL, owner)
        assert places is None or places.next == [
            tokens_of(row)[0] for row in index.following(places.places, 1)
        ]
    for matched in range(1, index.depth + 1):  # what a suffix tree keeps as counts
        level = max(level for level, gram in enumerate(index.grams) if gram <= matched)
        count = sum(m >= matched for _, m in found[level])
        assert count == sum(m >= matched for _, m in expected)


texts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(0, 2)),
    min_size=1,
    max_size=12,
)


@settings(deadline=None, max_examples=40)
@given(texts, st.integers(1, 20), st.sampled_from([16, 1024]), st.integers(1, 70), st.data())
def test_the_ring_knows_what_a_scan_of_the_texts_in_it_finds(
    texts: list[tuple[list[int], int]], depth: int, buckets: int, most_at_once: int, data: st.DataObject
) -> None:
    index = SuffixIndex(100 + depth, depth, buckets, owned=True)
    scan = Scan()
    for tokens, owner in texts:
        while scan.texts and (index.room <= len(tokens) or data.draw(st.integers(0, 9)) == 0):
            scan.texts.pop(0)
            index.forget(scan.texts[0][0] if scan.texts else index.end)
        index.begin(owner)
        scan.texts.append((index.end, tokens, owner))
        index.write(tokens)
        while index.catch_up(most_at_once):
            pass
    for start, tokens, _ in scan.texts:
        assert index.text(start, start + len(tokens)).tolist() == tokens
    for owner in range(3):
        check(index, scan, data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=30)), owner)
        check(index, scan, scan.texts[-1][1], owner)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 1), max_size=50), min_size=1, max_size=8), st.integers(1, 24))
def test_one_growing_text_knows_what_a_scan_finds(pieces: list[list[int]], depth: int) -> None:
    """However it comes: token by token, or many at once."""
    index = SuffixIndex(depth + 8, depth, 64, growing=True)
    index.begin()
    start, text = index.end, []
    for piece in pieces:
        text += piece
        index.write(piece)
        while index.catch_up(40):
            pass
        if text:
            check(index, Scan([(start, text, 0)]), text, 0)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 1), min_size=1, max_size=80), st.integers(1, 9))
def test_of_many_places_the_latest_are_looked_at(text: list[int], most: int) -> None:
    index = SuffixIndex(200, 8, 2**16, growing=True)
    index.begin()
    index.write(text)
    index.catch_up(ALL)
    for all_, latest in zip(known(index, text, 0), known(index, text, 0, most), strict=True):
        assert latest == all_[: len(latest)]
        assert len(latest) == min(most, len(all_)), "tokens share a bucket where there are more than enough"


def test_what_has_not_been_caught_up_with_is_not_found_and_costs_nothing() -> None:
    index = SuffixIndex(8192, 24, 2**10, growing=True)
    index.begin()
    text = np.random.default_rng(0).integers(0, 50, 5000)
    index.write(text)
    assert index.catch_up(1000) >= 1000
    early = known(index, text[:900].tolist(), 0)
    late = known(index, text[3000:4000].tolist(), 0)
    assert early[-1]
    assert not late[-1]
    while index.catch_up(1000):
        pass
    assert known(index, text[3000:4000].tolist(), 0)[-1]
    assert index.catch_up(1000) == 0


def test_positions_outlive_thirty_two_bits() -> None:
    """Heads keep the lower half of a position only."""
    index = SuffixIndex(256, 4, 64, owned=True)
    index.end = index.floor = 2**32 - 40
    index._tokens[:] = -1
    scan = Scan()
    for owner in range(20):
        while index.room <= 12:
            scan.texts.pop(0)
            index.forget(scan.texts[0][0])
        index.begin(owner % 2)
        tokens = np.random.default_rng(owner).integers(0, 3, 12).tolist()
        scan.texts.append((index.end, tokens, owner % 2))
        index.write(tokens)
        index.catch_up(ALL)
    assert index.end > 2**32
    for owner in (0, 1):
        check(index, scan, scan.texts[-1][1], owner)
