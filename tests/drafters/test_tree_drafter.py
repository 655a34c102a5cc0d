"""A tree per request, grown by a rule and kept across verdicts, over candidates that a script knows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.growth import BestFirst, Calibrated, Chain, FixedShape, GrowthRule, Layers
from paceline.core.mirror import MOST_NODES, DraftMirror
from paceline.core.outcomes import OutcomeCache
from paceline.core.token_tree import TokenTree
from paceline.drafters.tree_drafter import Candidates, Leaf, TreeDrafter
from tests.core.scripted import VOCAB, best_tokens, scripted
from tests.drafters.script_model import ScriptModel, Side, check

RULES: dict[str, GrowthRule] = {
    "chain": Chain(5),
    "fixed-shape": FixedShape((3, 2, 1)),
    "best-first": BestFirst(3, passes=3),
    "endless": BestFirst(4, candidates=4),
    "layers": Layers(3, 4),
    "outcomes": OutcomeCache(3, 2),
}


class Life:
    """A random life of several requests, some drafted for in turn, some while the target is busy."""

    def __init__(self, seed: int, rule: GrowthRule, *, keep_tree: bool, stingy: float) -> None:
        self.rng = random.Random(seed)
        self.model = ScriptModel(stingy=stingy)
        self.model.again = not keep_tree
        self.drafter = TreeDrafter(
            self.model,
            rule,
            keep_tree=keep_tree,
            top_up=self.rng.random() < 0.3,
            pass_leaves=self.rng.choice([2, 5, 64]),
            most_nodes=self.rng.choice([10, 40]),
            thrifty=self.rng.random() < 0.3,
        )
        self.sides: dict[str, Side] = {}
        self.generation = 0

    def live(self, count: int) -> None:
        moves = [self.arrive, self.told, self.asked, self.ahead, self.ahead, self.verdict, self.verdict]
        for _ in range(count):
            self.rng.choice(moves)()
            if self.rng.random() < 0.03:
                self.leave()

    def arrive(self) -> None:
        if len(self.sides) < 4:
            self.generation += 1
            name = f"r{self.rng.randrange(6)}"
            prompt = [self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(1, 12))]
            self.sides[name] = Side(name, prompt, self.generation)  # of the same name: announced anew

    def some(self) -> list[Side]:
        names = sorted(self.sides)
        return [self.sides[name] for name in self.rng.sample(names, self.rng.randint(0, len(names)))]

    def told(self) -> None:
        depth = self.rng.choice([0, 3, 20])
        self.drafter.advance([side.item(depth, depth) for side in self.some()])

    def asked(self) -> None:
        sides, nodes = self.some(), self.rng.randrange(1, 9)
        proposals = self.drafter.grow([side.item(nodes, nodes) for side in sides])
        assert len(proposals) == len(sides)
        for side, proposal in zip(sides, proposals, strict=True):
            check(side, proposal, nodes, nodes)
            side.mirror = DraftMirror(side.generation, len(side.text))

    def ahead(self) -> None:
        before = len(self.model.passes)
        grown = self.drafter.work_ahead()
        assert len(self.model.passes) <= before + 1, "one pass at most between looks for messages"
        for nodes in grown or []:
            known = self.drafter._sequences[nodes.request_id]
            assert nodes.first + len(nodes.tokens) == known.num_nodes
            assert len(known.numbers) == len(known.draft.tree)

    def verdict(self) -> None:
        """Into the tree as deep as chance has it, then any token."""
        if not self.sides:
            return
        side = self.rng.choice(list(self.sides.values()))
        for _ in range(self.rng.randrange(1, 5)):
            token = self.rng.choice([token for token, _ in scripted(side.text)[:3]])
            side.commit([token if self.rng.random() < 0.9 else self.rng.randrange(VOCAB)])

    def leave(self) -> None:
        if self.sides:
            name = self.rng.choice(sorted(self.sides))
            del self.sides[name]
            self.drafter.release([name, "unknown"])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(RULES)), st.booleans(), st.sampled_from([0.0, 0.2]))
def test_nothing_is_computed_twice_or_before_its_time(
    seed: int, name: str, keep_tree: bool, stingy: float
) -> None:
    life = Life(seed, RULES[name], keep_tree=keep_tree, stingy=stingy)
    life.live(60)
    for side in life.sides.values():
        life.drafter.release([side.name])
    assert not life.model._read
    assert life.drafter.work_ahead() is None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(["endless", "best-first", "chain"]))
def test_a_mirror_that_hears_every_node_has_the_drafters_tree(seed: int, name: str) -> None:
    rng = random.Random(seed)
    drafter = TreeDrafter(ScriptModel(), RULES[name], pass_leaves=rng.choice([3, 64]), most_nodes=20)
    side = Side("r", [1, 2, 3])
    for _ in range(40):
        draw = rng.random()
        if draw < 0.2 or not side.told:
            drafter.advance([side.item(9, 9)])
        elif draw < 0.4:
            side.commit([rng.choice(scripted(side.text)[:3])[0] for _ in range(1)])
        else:
            for nodes in drafter.work_ahead() or []:
                side.hear(nodes)
        if side.told == len(side.text):
            own = drafter._sequences["r"].draft.tree.select(7, 7)
            assert side.mirror is not None
            copy = side.mirror.tree.rerooted(side.mirror.root)[0].select(7, 7)
            assert (copy.tokens, copy.parents, copy.scores) == (own.tokens, own.parents, own.scores)


# ---------------------------------------------------------------- one request


def grow(drafter: TreeDrafter, side: Side, max_nodes: int = 8, max_depth: int = 8) -> TokenTree:
    (proposal,) = drafter.grow([side.item(max_nodes, max_depth)])
    return check(side, proposal, max_nodes, max_depth)


def ask(rule: GrowthRule, **options: object) -> tuple[TreeDrafter, ScriptModel, Side]:
    model = ScriptModel()
    return TreeDrafter(model, rule, **options), model, Side("r", [1, 2, 3])  # type: ignore[arg-type]


def test_what_a_hit_kept_is_answered_without_a_pass() -> None:
    drafter, model, side = ask(BestFirst(4, passes=3))
    tree = grow(drafter, side)
    del model.passes[:]
    side.commit([tree.tokens[0]])
    below = scripted(side.text)[0][0]
    assert (side.name, tuple(side.text)) not in model.passes
    again = grow(drafter, side)
    assert below in again.tokens
    texts = [text for leaves in model.passes for _, text in leaves]
    assert tuple(side.text) not in texts, "the root's candidates were there"


@pytest.mark.parametrize("hit", [True, False])
def test_without_keeping_trees_each_verdict_starts_anew(hit: bool) -> None:
    drafter, model, side = ask(BestFirst(4, passes=2), keep_tree=False)
    tree = grow(drafter, side)
    side.commit([tree.tokens[0] if hit else VOCAB - 1])
    model.again = True
    del model.passes[:]
    again = grow(drafter, side)
    assert model.passes[0] == [("r", tuple(side.text))]
    assert len(model.passes) == 2
    fresh, _, other = ask(BestFirst(4, passes=2))
    other.text = list(side.text)
    assert again.tokens == grow(fresh, other).tokens


def test_topping_up_ends_with_the_nodes_that_were_asked_for() -> None:
    drafter, model, side = ask(BestFirst(2, candidates=3), top_up=True, most_nodes=30)
    grow(drafter, side, max_nodes=8)
    assert len(model.passes) == 2, "3 nodes by the root's pass, 6 by that of its two best"
    drafter.advance([side.item(8, 8)])
    while drafter.work_ahead():
        pass
    side.commit([scripted(side.text)[0][0]])
    del model.passes[:]
    assert len(grow(drafter, side, max_nodes=8)) == 8
    assert not model.passes, "it had as many all along"


def test_no_more_than_so_many_nodes_are_computed() -> None:
    drafter, model, side = ask(BestFirst(4), most_nodes=10)
    drafter.advance([side.item(9, 9)])
    while drafter.work_ahead() is not None:
        assert len(model.passes) < 50
    assert sum(map(len, model.passes)) == 10


def test_depth_ends_at_the_drafters_context() -> None:
    model = ScriptModel(context=8)
    drafter = TreeDrafter(model, BestFirst(4))
    side = Side("r", [1, 2, 3])
    drafter.advance([side.item(50, 50)])
    while drafter.work_ahead() is not None:
        pass
    assert max(len(text) for leaves in model.passes for _, text in leaves) == 7
    side.commit([0] * 5)
    assert len(grow(drafter, side)) == 0


def test_a_chain_that_is_waited_for_takes_as_many_passes_as_it_has_tokens() -> None:
    """Chains for outcomes are drafted while the target is busy, and not before it can begin."""
    drafter, model, side = ask(OutcomeCache(3, 2))
    assert grow(drafter, side, 3, 3).tokens == best_tokens([1, 2, 3], 3)
    assert len(model.passes) == 3
    while drafter.work_ahead():
        pass
    side.commit([*best_tokens(side.text, 1), scripted([*side.text, *best_tokens(side.text, 1)])[1][0]])
    del model.passes[:]
    assert grow(drafter, side, 3, 3).tokens == best_tokens(side.text, 3)
    assert not model.passes, "this outcome was drafted for"


@pytest.mark.parametrize("rule", [Chain(3), Layers(1, 3, candidates=1), OutcomeCache(3, 2)], ids=str)
def test_a_request_that_asks_for_more_than_the_configuration_gets_it(rule: GrowthRule) -> None:
    """The target waits: as many passes as guesses, none for anything else. Ahead the rule has its bound."""
    drafter, model, side = ask(rule, most_nodes=5)
    assert grow(drafter, side, 12, 12).tokens == best_tokens(side.text, 12)
    assert len(model.passes) == 12
    drafter, model, side = ask(rule)
    drafter.advance([side.item(40, 40)])
    while drafter.work_ahead() is not None:
        pass
    deepest = max(drafter._sequences["r"].draft.tree.depths)
    assert deepest == (3 if not isinstance(rule, OutcomeCache) else 7)


def test_layers_end_by_their_passes_when_they_are_asked_for() -> None:
    drafter, model, side = ask(Layers(2, 5, passes=3))
    grow(drafter, side, 9, 9)
    assert max(drafter._sequences["r"].draft.tree.depths) == 3
    assert len(model.passes) == 3


def test_no_message_has_more_nodes_than_a_mirror_takes() -> None:
    class Wide(ScriptModel):
        def expand(self, leaves: Sequence[Leaf]) -> list[Candidates | None]:
            return [Candidates(range(leaf.count), [-1.0] * leaf.count) for leaf in leaves]

    drafter, mirror = TreeDrafter(Wide(), FixedShape((40, 40))), DraftMirror(1, 3)
    drafter.advance([Side("r", [1, 2, 3]).item(9, 9)])
    sizes = []
    while (grown := drafter.work_ahead()) is not None:
        for nodes in grown:
            sizes.append(len(nodes.tokens))
            mirror.extend(nodes, 64)
    assert sizes == [40, MOST_NODES, 40 * 40 - MOST_NODES]
    assert len(mirror.tree) == MOST_NODES


def test_a_token_that_a_leaf_names_twice_is_one_node_with_one_number() -> None:
    class Stutterer(ScriptModel):
        def expand(self, leaves: Sequence[Leaf]) -> list[Candidates | None]:
            return [Candidates((5, 5, 6), (-0.5, -1.0, -1.5)) for _ in leaves]

    drafter, side = TreeDrafter(Stutterer(), BestFirst(1, candidates=3)), Side("r", [1, 2, 3])
    drafter.advance([side.item(9, 9)])
    streamed = []
    while len(streamed) < 2:
        streamed += drafter.work_ahead() or []
    assert [(nodes.first, nodes.tokens) for nodes in streamed] == [(0, (5, 6)), (2, (5, 6))]
    assert [nodes.parents for nodes in streamed] == [(-3, -3), (0, 0)]


@pytest.mark.timeout(60)
def test_a_thrifty_pass_takes_a_leaf_however_unlikely() -> None:
    """Else a round would never end: a probability this small is zero in a float."""
    drafter, model, side = ask(Chain(5), thrifty=True)
    model.surprise = 1000.0
    assert grow(drafter, side, 5, 5).tokens == best_tokens(side.text, 5)


def test_what_is_accepted_teaches_the_rule() -> None:
    rule = Calibrated(2, passes=2)
    drafter, _, side = ask(rule)
    before = rule.score(-1.0, 1, 1)
    for _ in range(30):
        grow(drafter, side)
        side.commit([scripted(side.text)[1][0]])
    assert rule.score(-1.0, 1, 1) > before
    assert rule.score(-1.0, 0, 1) < -1.0


def test_candidates_that_are_hardly_ever_reached_get_no_node_but_the_first_does() -> None:
    drafter, _, side = ask(Calibrated(8, passes=6, floor=-1.5))
    grow(drafter, side)
    tree = drafter._sequences["r"].draft.tree
    ranks = drafter._sequences["r"].draft.rank
    assert any(value < -1.5 for value in tree.values)
    assert all(rank == 0 for value, rank in zip(tree.values, ranks, strict=True) if value < -1.5)


def test_a_leaf_without_room_is_left_alone_until_the_next_verdict() -> None:
    model = ScriptModel(stingy=1.0)
    drafter = TreeDrafter(model, Chain(4))
    side = Side("r", [1, 2, 3])
    assert len(grow(drafter, side)) == 0
    model._stingy = 0.0
    assert len(grow(drafter, side)) == 0
    side.commit([5])
    assert len(grow(drafter, side, 4, 4)) == 4


# ---------------------------------------------------------------- several requests


def test_a_pass_takes_the_roots_first_and_only_so_many_leaves() -> None:
    model = ScriptModel(chunk=1000)
    drafter = TreeDrafter(model, BestFirst(4), pass_leaves=3, most_nodes=20)
    sides = [Side(f"r{i}", [i, 2, 3]) for i in range(2)]
    drafter.advance([side.item(9, 9) for side in sides])
    while drafter.work_ahead() is not None and len(model.passes) < 6:
        pass
    late = Side("late", [9, 9])
    drafter.advance([late.item(9, 9)])
    drafter.work_ahead()  # reads its text
    drafter.work_ahead()
    assert model.passes[-1][0] == ("late", (9, 9))
    assert all(len(leaves) <= 3 for leaves in model.passes)


@pytest.mark.parametrize("name", ["chain", "fixed-shape", "layers", "best-first"])
def test_who_finds_no_place_in_a_pass_gets_one_in_the_next(name: str) -> None:
    """The answer to each request is the one it would get alone."""
    crowd = TreeDrafter(ScriptModel(), RULES[name], pass_leaves=2)
    sides = [Side(f"r{i}", [i, 2, 3]) for i in range(5)]
    together = crowd.grow([side.item() for side in sides])
    for side, proposal in zip(sides, together, strict=True):
        alone = TreeDrafter(ScriptModel(), RULES[name])
        other = Side(side.name, side.text)
        (expected,) = alone.grow([other.item()])
        if name in ("chain", "fixed-shape"):
            assert proposal == expected
        else:  # where passes count, a pass that took only some of the leaves counts as well
            assert len(proposal.tokens) >= 4


def test_a_request_that_cannot_be_drafted_for_costs_only_itself() -> None:
    model = ScriptModel()
    drafter = TreeDrafter(model, Chain(3))
    sides = [Side(f"r{i}", [i, 2, 3]) for i in range(3)]
    model.refused.add("r1")
    drafter.advance([side.item(0, 0) for side in sides])
    proposals = drafter.grow([side.item(3, 3) for side in sides])
    assert [proposal.error for proposal in proposals] == [None, "refused", None]
    assert [len(proposal.tokens) for proposal in proposals] == [3, 0, 3]
    assert all(name != "r1" for leaves in model.passes for name, _ in leaves)


def test_an_announcement_starts_anew_with_numbers_from_the_first() -> None:
    drafter, _, side = ask(BestFirst(4))
    drafter.advance([side.item(9, 9)])
    while not (grown := drafter.work_ahead()):
        pass
    again = Side("r", [4, 5], generation=2)
    drafter.advance([again.item(9, 9)])
    while not (grown := drafter.work_ahead()):
        pass
    (nodes,) = grown
    assert (nodes.generation, nodes.first, nodes.num_tokens) == (2, 0, 2)
    assert set(nodes.parents) == {-2}
