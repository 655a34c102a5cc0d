"""Growth rules, each by name, over candidates that a script knows beforehand."""

from __future__ import annotations

import random
from itertools import pairwise
from math import log

import pytest

from paceline.core.acceptance import AcceptanceModel
from paceline.core.growth import BestFirst, Calibrated, Chain, DraftTree, FixedShape, GrowthRule, Layers
from paceline.core.outcomes import OutcomeCache
from paceline.core.token_tree import ROOT
from tests.core.scripted import best_tokens, scripted

DEEP = 1000


class Grown:
    """A draft tree, grown pass by pass as a drafter does. `passes[i]`: what pass i expanded."""

    def __init__(self, rule: GrowthRule, max_depth: int = DEEP, *, asked: bool = False) -> None:
        self.rule, self.max_depth, self.asked = rule, max_depth, asked
        self.known: tuple[int, ...] = (1, 2, 3)
        self.draft = DraftTree()
        self.passes: list[list[int]] = []

    def one_pass(self) -> bool:
        draft, rule = self.draft, self.rule
        leaves = rule.leaves(draft, self.max_depth, asked=self.asked)
        assert len(set(leaves)) == len(leaves)
        assert not set(leaves) & draft.expanded
        for leaf in leaves:
            depth = draft.tree.depth(leaf)
            assert depth < self.max_depth
            text = self.known + tuple(draft.tree.tokens[node] for node in draft.tree.path(leaf))
            for rank, (token, confidence) in enumerate(scripted(text)[: rule.breadth(depth)]):
                draft.add(leaf, token, confidence, rank, rule.score(confidence, rank, depth + 1))
            draft.expanded.add(leaf)
        draft.passes += bool(leaves)
        if leaves:
            self.passes.append(leaves)
        return bool(leaves)

    def grow(self, most_passes: int = 1000) -> Grown:
        for _ in range(most_passes):
            if not self.one_pass():
                break
        return self

    def commit(self, node: int) -> Grown:
        """The target accepted the path down to `node`."""
        tree = self.draft.tree
        self.known += tuple(tree.tokens[other] for other in tree.path(node))
        self.draft, _ = self.draft.rerooted(node)
        self.passes = []
        return self


# ---------------------------------------------------------------- chains and fixed shapes


@pytest.mark.parametrize(("depth", "room", "grown"), [(4, DEEP, 4), (4, 2, 2), (1, 9, 1), (4, 0, 0)])
def test_a_chain_is_the_likeliest_tokens_one_by_one(depth: int, room: int, grown: int) -> None:
    chain = Grown(Chain(depth), room).grow()
    assert chain.draft.tree.tokens == best_tokens(chain.known, grown)
    assert chain.draft.tree.parents == list(range(-1, grown - 1))
    assert chain.passes == [[node] for node in range(-1, grown - 1)]


def test_a_chain_grows_on_where_the_target_agreed() -> None:
    chain = Grown(Chain(4)).grow().commit(1).grow()
    assert chain.draft.tree.tokens == best_tokens(chain.known, 4)
    assert len(chain.passes) == 2, "the two that were left are kept"


@pytest.mark.parametrize("widths", [(3, 2, 1, 1), (1, 1), (4,), (2, 3, 2)])
def test_a_fixed_shape_has_the_same_counts_every_time(widths: tuple[int, ...]) -> None:
    for known in ((1, 2), (7,), (9, 9, 9)):
        shape = Grown(FixedShape(widths))
        shape.known = known
        depths = shape.grow().draft.tree.depths
        expected, count = {}, 1
        for depth, width in enumerate(widths, 1):
            count *= width
            expected[depth] = count
        assert {depth: depths.count(depth) for depth in set(depths)} == expected
        assert len(shape.passes) == len(widths), "one pass per level"


def test_a_fixed_shape_ends_where_there_is_no_room() -> None:
    assert max(Grown(FixedShape((2, 2, 2, 2)), 2).grow().draft.tree.depths) == 2


# ---------------------------------------------------------------- best first, layers


def open_by_value(grown: Grown) -> list[int]:
    tree, done = grown.draft.tree, grown.draft.expanded
    leaves = [node for node in range(len(tree)) if node not in done and tree.depths[node] < grown.max_depth]
    return sorted(leaves, key=lambda node: (-tree.values[node], node))


@pytest.mark.parametrize("width", [1, 3, 8])
def test_best_first_expands_the_leaves_of_largest_value(width: int) -> None:
    best = Grown(BestFirst(width), 6)
    best.one_pass()
    assert best.passes == [[ROOT]]
    for _ in range(8):
        wanted = open_by_value(best)[:width]
        assert best.one_pass()
        assert best.passes[-1] == wanted


def test_best_first_ends_after_its_passes_and_counts_anew_at_a_new_root() -> None:
    best = Grown(BestFirst(4, passes=3)).grow()
    assert len(best.passes) == 3
    node = max(best.draft.expanded)
    best.commit(node).grow()
    assert len(best.passes) == 3
    assert ROOT in best.draft.expanded


def test_without_a_number_of_passes_best_first_ends_at_the_depth_there_is_room_for() -> None:
    best = Grown(BestFirst(50, candidates=2), 4).grow()
    assert len(best.draft.tree) == 2 + 4 + 8 + 16
    assert max(best.draft.tree.depths) == 4


def test_what_is_verified_are_the_nodes_of_largest_value() -> None:
    for rule in (BestFirst(3, passes=4), Layers(3, 4), Calibrated(3, passes=4)):
        grown = Grown(rule).grow()
        answer = grown.rule.answer(grown.draft, 6, 3)
        values = [
            value
            for value, depth in zip(grown.draft.tree.values, grown.draft.tree.depths, strict=True)
            if depth <= 3
        ]
        assert sorted(answer.values) == pytest.approx(sorted(values, reverse=True)[:6][::-1])


@pytest.mark.parametrize("width", [1, 2, 5])
def test_layers_expand_the_best_of_the_newest_level(width: int) -> None:
    layers = Grown(Layers(width, 5))
    for level in range(5):
        tree = layers.draft.tree
        newest = [node for node in range(len(tree)) if tree.depths[node] == level] if level else [ROOT]
        wanted = sorted(newest, key=lambda node: (-tree.value(node), node))[:width]
        assert layers.one_pass()
        assert layers.passes[-1] == wanted
    assert not layers.one_pass()
    assert max(layers.draft.tree.depths) == 5


def test_layers_go_on_below_a_new_root_whether_it_was_expanded_or_not() -> None:
    for expanded in (True, False):
        layers = Grown(Layers(2, 4), 9).grow(3)
        tree = layers.draft.tree
        node = next(
            node
            for node in range(len(tree))
            if (node in layers.draft.expanded) == expanded and tree.depths[node] == 1
        )
        layers.commit(node)
        had = max(layers.draft.tree.depths, default=0)
        layers.grow()
        depths = [{layers.draft.tree.depth(leaf) for leaf in leaves} for leaves in layers.passes]
        assert depths == [{level} for level in range(had, 4)]
        assert max(layers.draft.tree.depths) == 4
        assert all(len(leaves) <= 2 for leaves in layers.passes)


# ---------------------------------------------------------------- calibrated


def taught(accepted_rank: int) -> AcceptanceModel:
    """What is learnt from a target that always takes the drafter's choice of this rank."""
    model = AcceptanceModel()
    rng = random.Random(1)
    for _ in range(3000):
        for rank in range(4):
            model.learn(-rng.random() - rank, rank, rng.randrange(1, 6), accepted=rank == accepted_rank)
    return model


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_calibrated_order_follows_what_was_accepted(rank: int) -> None:
    grown = Grown(Calibrated(1, candidates=4, model=taught(rank))).grow(5)
    draft = grown.draft
    expanded = sorted(draft.expanded)[1:]
    assert [draft.rank[node] for node in expanded] == [rank] * 4
    assert all(draft.tree.parents[below] == above for above, below in pairwise(expanded))


def test_a_verdict_teaches_the_candidates_of_the_place_it_passed() -> None:
    rule = Calibrated(2, candidates=4)
    grown = Grown(rule).grow(2)
    tree = grown.draft.tree
    first, second = tree.children(ROOT)[:2]
    before = [tuple(rule.score(-1.0, rank, 1) for rank in range(4))]
    for _ in range(50):
        rule.learn(grown.draft, ROOT, tree.tokens[second])
    before.append(tuple(rule.score(-1.0, rank, 1) for rank in range(4)))
    assert before[1][1] > before[0][1]
    assert before[1][0] < before[0][0]
    assert grown.draft.rank[first] == 0


def test_what_is_hardly_ever_reached_is_not_expanded() -> None:
    rule = Calibrated(50, floor=log(0.05))
    grown = Grown(rule, 30).grow()
    tree = grown.draft.tree
    assert grown.draft.expanded - {ROOT}
    for node in range(len(tree)):
        assert (node in grown.draft.expanded) == (tree.values[node] > log(0.05) and tree.depths[node] < 30)


# ---------------------------------------------------------------- chains for outcomes


@pytest.mark.parametrize(("length", "fan_out"), [(1, 1), (3, 2), (4, 3)])
def test_the_outcome_cache_has_a_chain_ready_for_every_likely_verdict(length: int, fan_out: int) -> None:
    known = (1, 2, 3)
    cache = Grown(OutcomeCache(length, fan_out)).grow()
    chain = best_tokens(known, length)
    assert cache.rule.answer(cache.draft, length, length).tokens == chain
    for accepted in range(length + 1):
        text = (*known, *chain[:accepted])
        others = [token for token, _ in scripted(text) if token not in chain[accepted : accepted + 1]]
        for bonus in others[:fan_out]:
            tree, node = cache.draft.tree, ROOT
            for token in (*chain[:accepted], bonus):
                node = tree.child(node, token) or 0
                assert tree.tokens[node] == token, f"no node for {bonus} after {accepted} accepted"
            after = Grown(cache.rule)
            after.draft = cache.draft
            after.commit(node)
            ready = after.rule.answer(after.draft, length, length)
            assert ready.tokens == best_tokens(after.known, length)


def test_the_chain_to_be_verified_comes_first_and_alone_where_it_is_waited_for() -> None:
    cache = Grown(OutcomeCache(3, 2), 3, asked=True).grow()
    assert cache.passes == [[ROOT], [0], [cache.draft.tree.children(0)[0]]]
    assert cache.rule.answer(cache.draft, 3, 3).tokens == best_tokens(cache.known, 3)
    assert cache.rule.answer(cache.draft, 2, 3).tokens == best_tokens(cache.known, 2)
    cache.max_depth, cache.asked = DEEP, False
    cache.grow()
    assert len(cache.passes) > 3


@pytest.mark.parametrize("length", [2, 3, 6])
def test_while_the_target_waits_a_chain_as_long_as_asked_is_drafted_and_no_outcomes(length: int) -> None:
    cache = Grown(OutcomeCache(3, 2), length, asked=True).grow()
    assert len(cache.passes) == length
    assert cache.rule.answer(cache.draft, length, length).tokens == best_tokens(cache.known, length)


def test_what_is_asked_for_is_not_bounded_by_the_depth_that_holds_ahead() -> None:
    for rule in (Chain(4), Layers(1, 4, candidates=1)):
        assert Grown(rule, 9, asked=True).grow().draft.tree.tokens == best_tokens((1, 2, 3), 9)
        assert len(Grown(rule, 9).grow().draft.tree) == 4


def test_the_outcome_cache_stays_within_the_room_there_is() -> None:
    cache = Grown(OutcomeCache(3, 2), 5).grow()
    assert max(cache.draft.tree.depths) == 5
