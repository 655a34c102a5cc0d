"""Laws of the token tree, and of the coordinator's copy of one that somebody else grows."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.core.mirror import _MOST_PLACES, MOST_NODES, DraftMirror
from paceline.core.token_tree import ROOT, Landing, TokenTree
from paceline.core.work import DraftNodes

VOCAB = 4
# Sums of these are exact, so that an order by value means the same wherever the sum begins.
SCORES = st.integers(0, 16).map(lambda eighths: -eighths / 8)
TOKENS = st.integers(0, VOCAB - 1)

Text = tuple[int, ...]


@st.composite
def trees(draw: st.DrawFn, most: int = 25) -> TokenTree:
    tree = TokenTree()
    for _ in range(draw(st.integers(0, most))):
        tree.add(draw(st.integers(ROOT, len(tree) - 1)), draw(TOKENS), draw(SCORES))
    return tree


def texts_of(tree: TokenTree, root: int = ROOT) -> dict[Text, tuple[float, int]]:
    """Every node below `root` by the tokens that lead to it: its value below `root` and its depth."""
    found = {}
    for node in range(len(tree)):
        path = [node]
        while path[0] not in (root, ROOT):
            path.insert(0, tree.parents[path[0]])
        if path[0] == root and node != root:
            below = path[1:]
            value = sum(tree.scores[other] for other in below)
            found[tuple(tree.tokens[other] for other in below)] = (value, len(below))
    return found


# ---------------------------------------------------------------- the tree


@given(trees(), st.data(), st.integers(0, 15), st.integers(0, 6))
def test_the_best_below_a_root_are_connected_and_none_better_is_left(
    tree: TokenTree, data: st.DataObject, most: int, depth: int
) -> None:
    root = data.draw(st.integers(ROOT, len(tree) - 1))
    best = tree.best_below(root, most, depth)
    seen = {root}
    for node in best:
        assert tree.parents[node] in seen
        seen.add(node)
    keys = [(-tree.values[node], node) for node in best]
    assert keys == sorted(keys)
    deepest = tree.depth(root) + depth
    allowed = [
        (-tree.values[node], node)
        for node in range(len(tree))
        if tree.depths[node] <= deepest and root in (ROOT, *tree.path(node)) and node != root
    ]
    assert keys == sorted(allowed)[:most]


@given(trees(), st.data())
def test_rerooting_keeps_the_descendants_and_nothing_else(tree: TokenTree, data: st.DataObject) -> None:
    root = data.draw(st.integers(ROOT, len(tree) - 1))
    moved, place = tree.rerooted(root)
    assert texts_of(moved) == texts_of(tree, root)
    assert sorted(place.values()) == list(range(len(moved)))
    for old, new in place.items():
        assert tree.tokens[old] == moved.tokens[new]
        assert tree.scores[old] == moved.scores[new]
        assert moved.values[new] == tree.values[old] - tree.value(root)
        assert moved.depths[new] == tree.depths[old] - tree.depth(root)
        parent = tree.parents[old]
        assert moved.parents[new] == (ROOT if parent == root else place[parent])
    assert sorted(place) == list(place), "the order of making is kept"


def best_of(tree: TokenTree, root: int, most: int, depth: int) -> TokenTree:
    return tree.subtree(sorted(tree.best_below(root, most, depth)), root)[0]


def chosen_of(mirror: DraftMirror, most: int = 9, depth: int = 9) -> TokenTree:
    return best_of(mirror.tree, mirror.root, most, depth)


@given(trees(), st.data(), st.integers(0, 15), st.integers(0, 6))
def test_selecting_at_a_root_is_selecting_from_the_rerooted_tree(
    tree: TokenTree, data: st.DataObject, most: int, depth: int
) -> None:
    root = data.draw(st.integers(ROOT, len(tree) - 1))
    here, there = best_of(tree, root, most, depth), tree.rerooted(root)[0].select(most, depth)
    assert (here.tokens, here.parents, here.scores) == (there.tokens, there.parents, there.scores)
    assert here.values == there.values


@given(trees(), st.data(), TOKENS, SCORES)
def test_equal_siblings_merge_at_the_better_score(
    tree: TokenTree, data: st.DataObject, token: int, score: float
) -> None:
    parent = data.draw(st.integers(ROOT, len(tree) - 1))
    before, size = tree.child(parent, token), len(tree)
    old = tree.scores[before] if before is not None else -math.inf
    node = tree.add(parent, token, score)
    assert node == (before if before is not None else size)
    assert len(tree) == size + (before is None)
    assert tree.scores[node] == max(old, score)
    for other in range(len(tree)):
        assert tree.values[other] == sum(tree.scores[above] for above in tree.path(other))


# ---------------------------------------------------------------- the mirror against a model of it


class MirrorMachine(RuleBasedStateMachine):
    """The model knows every node by the whole text that leads to it: it lives if that text goes on where the
    committed one ends. The drafter hears of commits late, and its nodes are under way for any time."""

    @initialize(prompt=st.lists(TOKENS, min_size=1, max_size=3))
    def begin(self, prompt: list[int]) -> None:
        self.text: Text = tuple(prompt)
        self.mirror = DraftMirror(1, len(prompt))
        self.delivered: dict[Text, float] = {}  # in the order of arrival
        self.by_number: list[Text | None] = []  # None for what was refused
        self.drafted: list[Text] = []  # the drafter's own view, by number
        self.known = self.text  # what the drafter has heard
        self.under_way: deque[tuple[DraftNodes, bool]] = deque()

    # ------------------------------------------------------------ the drafter

    @rule(
        picks=st.lists(st.tuples(st.integers(0, 10**6), TOKENS, SCORES), min_size=1, max_size=5),
    )
    def the_drafter_grows(self, picks: list[tuple[int, int, float]]) -> None:
        first = len(self.drafted)
        parents = []
        for pick, token, _ in picks:
            own = [
                number
                for number, text in enumerate(self.drafted)
                if text[: len(self.known)] == self.known and len(text) > len(self.known)
            ]
            parent = [-len(self.known), *own][pick % (len(own) + 1)]
            parents.append(parent)
            self.drafted.append((*(self.drafted[parent] if parent >= 0 else self.known), token))
        tokens, scores = [token for _, token, _ in picks], [score for _, _, score in picks]
        self._send(first, tokens, parents, scores)

    def _send(
        self, first: int, tokens: list[int], parents: list[int], scores: list[float], sound: bool = True
    ) -> None:
        nodes = DraftNodes("r", 1, len(self.known), first, tuple(tokens), tuple(parents), tuple(scores))
        self.under_way.append((nodes, sound))

    @rule()
    def the_drafter_hears_what_is_committed(self) -> None:
        self.known = self.text

    @rule(
        kind=st.sampled_from(
            ["token", "negative", "nan", "positive", "infinite", "later parent", "uneven", "text"]
        ),
        size=st.integers(1, 3),
        at=st.integers(0, 2),
    )
    def the_drafter_sends_junk(self, kind: str, size: int, at: int) -> None:
        first, at = len(self.drafted), at % size
        tokens, parents, scores = [0] * size, [-len(self.known)] * size, [0.0] * size
        if kind in ("token", "negative"):
            tokens[at] = VOCAB if kind == "token" else -1
        elif kind in ("nan", "positive", "infinite"):
            scores[at] = {"nan": math.nan, "positive": 0.5, "infinite": -math.inf}[kind]
        elif kind == "later parent":
            parents[at] = first + at
        elif kind == "text":
            tokens[at] = "0"  # type: ignore[call-overload]
        else:
            scores.append(0.0)
        self.drafted += [(-1,)] * size  # of no text: nothing hangs below it
        self._send(first, tokens, parents, scores, sound=False)

    # ------------------------------------------------------------ the coordinator

    @precondition(lambda self: self.under_way)
    @rule()
    def nodes_arrive(self) -> None:
        nodes, sound = self.under_way.popleft()
        if not sound:
            self.by_number += [None] * len(nodes.tokens)
            with pytest.raises((ValueError, TypeError)):
                self.mirror.extend(nodes, VOCAB)
            return
        alive = 0
        for token, parent, score in zip(nodes.tokens, nodes.parents, nodes.scores, strict=True):
            above = self.by_number[parent] if parent >= 0 else self.text[:-parent]
            text = (*above, token) if above is not None else None
            self.by_number.append(text)
            if text is not None:
                alive += text[: len(self.text)] == self.text[: len(text)]
                self.delivered[text] = max(score, self.delivered.get(text, -math.inf))
        assert alive <= self.mirror.extend(nodes, VOCAB) <= len(nodes.tokens)

    @rule(first=st.sampled_from([-1, 1]))
    def nodes_out_of_order_arrive(self, first: int) -> None:
        nodes = DraftNodes(
            "r", 1, len(self.text), len(self.by_number) + first, (0,), (-len(self.text),), (0.0,)
        )
        with pytest.raises(ValueError, match="expected"):
            self.mirror.extend(nodes, VOCAB)

    @rule(path=st.lists(TOKENS, max_size=2), chain=st.lists(TOKENS, max_size=3))
    def guesses_come_from_elsewhere(self, path: list[int], chain: list[int]) -> None:
        """Below a path that is there; below one that is not there is nothing to hang them on."""
        self.mirror.tree.graft(self.mirror.root, path, chain, -0.5, MOST_NODES)
        above = (*self.text, *path)
        if path and above not in self.delivered:
            return
        for length in range(1, len(chain) + 1):
            text = (*above, *chain[:length])
            self.delivered[text] = max(-0.5, self.delivered.get(text, -math.inf))

    @precondition(lambda self: len(self.text) < 50)  # the mirror need not know what is long gone
    @rule(follow=st.integers(0, 3), pick=st.integers(0, 10**6), bonus=st.none() | TOKENS)
    def a_verdict_comes(self, follow: int, pick: int, bonus: int | None) -> None:
        """`follow` nodes deep into the tree, then a token of any kind."""
        text = self.text
        for _ in range(follow):
            below = [other for other in self.delivered if other[:-1] == text]
            if below:
                text = below[pick % len(below)]
        if bonus is not None or text == self.text:
            text = (*text, bonus or 0)
        landing = self.mirror.commit(text[len(self.text) :])
        if text not in self.delivered:
            assert landing is Landing.MISS
        elif any(other[:-1] == text for other in self.delivered):
            assert landing is Landing.HIT
        else:
            assert landing is Landing.LEAF_HIT
        self.text = text

    @rule()
    def there_is_time_to_sweep(self) -> None:
        size = len(self.mirror.tree)
        self.mirror.sweep()
        assert len(self.mirror.tree) <= size

    # ------------------------------------------------------------ what must hold

    @invariant()
    def the_best_that_live_are_chosen(self) -> None:
        if not hasattr(self, "text"):
            return
        size = len(self.text)
        assert self.mirror.num_tokens == size
        values: dict[Text, float] = {self.text: 0.0}
        alive = []
        for order, text in enumerate(self.delivered):
            if len(text) > size and text[:size] == self.text:
                values[text] = values[text[:-1]] + self.delivered[text]
                alive.append((-values[text], order, text))
        alive.sort()
        for most, depth in ((1, 9), (4, 2), (7, 99), (1000, 99)):
            wanted = [text[size:] for _, _, text in alive if len(text) <= size + depth][:most]
            chosen = texts_of(chosen_of(self.mirror, most, depth))
            assert set(chosen) == set(wanted)
            for tokens, (value, _) in chosen.items():
                assert value == values[(*self.text, *tokens)]


TestMirrorMachine = MirrorMachine.TestCase
TestMirrorMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


# ---------------------------------------------------------------- the mirror, case by case


def nodes(first: int, *each: tuple[int, int], known: int = 2, score: float = -1.0) -> DraftNodes:
    """each: (token, parent)."""
    tokens, parents = zip(*each, strict=True)
    return DraftNodes("r", 1, known, first, tokens, parents, (score,) * len(each))


def test_a_late_node_below_a_token_that_was_missed_finds_its_place() -> None:
    """The verdict named 3 before the drafter's 3 arrived; what the drafter hung below it counts."""
    mirror = DraftMirror(1, 2)
    mirror.extend(nodes(0, (1, -2)), VOCAB)
    assert mirror.commit([3]) is Landing.MISS
    assert mirror.extend(nodes(1, (3, -2), (0, 1), (2, 2)), VOCAB) == 3
    assert chosen_of(mirror).tokens == [0, 2]


def test_sweeping_loses_nothing_that_is_under_way_to_what_lives() -> None:
    """The drafter may still name the root by its number, and what is above it by its position."""
    mirror = DraftMirror(1, 2)
    mirror.extend(nodes(0, (1, -2), (2, 0)), VOCAB)
    mirror.commit([1, 2])
    mirror.sweep()
    assert mirror.extend(nodes(2, (3, 1), (0, -4)), VOCAB) == 2
    assert chosen_of(mirror).tokens == [3, 0]
    assert mirror.extend(nodes(4, (1, -2), (2, 4), (1, 5), (3, 4), (2, 7)), VOCAB) == 3
    assert chosen_of(mirror).tokens == [3, 0, 1]


def test_a_subtree_is_one_of_its_own() -> None:
    """What arrives while it is being verified is no part of it."""
    mirror = DraftMirror(1, 2)
    mirror.extend(nodes(0, (1, -2)), VOCAB)
    chosen = chosen_of(mirror)
    mirror.extend(nodes(1, (2, 0)), VOCAB)
    assert chosen.tokens == [1]


def test_a_message_of_uneven_lists_leaves_nothing_behind() -> None:
    mirror = DraftMirror(1, 2)
    broken = replace(nodes(0, (1, -2), (2, 0)), parents=(-2,))
    with pytest.raises(ValueError):
        mirror.extend(broken, VOCAB)
    assert len(mirror.tree) == 0
    assert mirror.extend(nodes(2, (3, -2)), VOCAB) == 1


def test_a_flood_is_cut_and_the_mirror_goes_on() -> None:
    mirror = DraftMirror(1, 2)
    chain = [(0, at - 1 if at else -2) for at in range(MOST_NODES + 50)]
    size = len(chain)
    assert mirror.extend(nodes(0, *chain[:600]), VOCAB) == 600
    assert mirror.extend(nodes(600, *chain[600:]), VOCAB) == MOST_NODES - 600
    assert mirror.extend(nodes(size, (1, -2), (1, size - 1)), VOCAB) == 0
    mirror.tree.graft(mirror.root, [0], [0, 3, 3], -1.0, MOST_NODES)
    assert len(mirror.tree) == MOST_NODES
    mirror.commit([0, 0, 2])
    mirror.sweep()
    assert len(mirror.tree) == 0
    assert mirror.extend(nodes(size + 2, (1, -5), known=5), VOCAB) == 1
    assert chosen_of(mirror).tokens == [1]


def test_a_message_that_is_too_large_is_refused_and_its_numbers_count() -> None:
    mirror, size = DraftMirror(1, 2), MOST_NODES + 1
    with pytest.raises(ValueError, match="at once"):
        mirror.extend(nodes(0, *((0, -2) for _ in range(size))), VOCAB)
    assert len(mirror.tree) == 0
    assert mirror.extend(nodes(size, (1, -2)), VOCAB) == 1


def test_scores_add_up_to_a_number() -> None:
    """Sums that were infinite would leave no order among the nodes below."""
    mirror = DraftMirror(1, 2)
    with pytest.raises(ValueError, match="log-probability"):
        mirror.extend(nodes(0, (1, -2), (1, 0), score=-1.7e308), VOCAB)


def test_numbers_of_one_and_the_same_node_are_bounded_too() -> None:
    mirror, size = DraftMirror(1, 2), 1000
    for first in range(0, 5 * size, size):
        mirror.extend(nodes(first, *((0, -2) for _ in range(size))), VOCAB)
    assert len(mirror.tree) == 1
    assert len(mirror._places) == _MOST_PLACES
    assert mirror.crowded
    mirror.commit([1])
    mirror.sweep()
    assert not mirror.crowded
    assert mirror.extend(nodes(5 * size, (2, -3)), VOCAB) == 1
    assert chosen_of(mirror).tokens == [2]


@pytest.mark.parametrize("length", [0, 1, 4, 100])
def test_a_committed_token_that_never_was_is_no_place(length: int) -> None:
    mirror = DraftMirror(1, 2)
    mirror.commit([1])
    assert mirror.extend(nodes(0, (1, -length if length else -9)), VOCAB) == 0
    assert len(chosen_of(mirror)) == 0
