"""A draft model whose trees outlive verdicts: its KV is what the text says, and nothing is computed twice."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core import sampling
from paceline.core.growth import BestFirst, Calibrated, Chain, FixedShape, GrowthRule, Layers
from paceline.core.outcomes import OutcomeCache
from paceline.core.params import SamplingParams
from paceline.core.token_tree import ROOT
from paceline.core.work import Announcement, DraftItem
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.tree_drafter import DraftSequence, TreeDrafter
from paceline.execution.forward_batch import Segment
from paceline.execution.model_runner import ModelRunner
from paceline.kernels.kv_cache import KVCache
from paceline.loading import LoadedModel, load
from paceline.models.native_decoder import NativeDecoder
from tests.core.test_kv_ledger import cached_slots
from tests.tiny import write_random

CONTEXT = 64
CHUNK = 7
PARAMS = [
    SamplingParams(temperature=0).resolved(),
    SamplingParams(temperature=0.9, seed=7).resolved(),
    SamplingParams(temperature=0.7, seed=3, frequency_penalty=0.8, top_k=30, logit_bias={5: 2.0}).resolved(),
]
Text = tuple[int, ...]


def new_runner(kind: type[ModelRunner], model: LoadedModel, slots: int, rows: int) -> Any:
    decoder = NativeDecoder(model.spec, model.weights, dtype="float32", threads=1)
    spec = decoder.spec
    kv = KVCache(spec.num_layers, slots, spec.num_kv_heads, spec.head_dim, decoder.kv_dtype, "cpu")
    return kind(decoder, kv, num_rows=rows, context_length=CONTEXT)


class WatchedRunner(ModelRunner):
    """Knows which text every token it computes ends, and that no text of one life comes twice."""

    model: WatchedModel
    num_tokens = 0

    def forward(self, segments: Sequence[Segment], layers: int | None = None) -> Tensor:
        slots: list[int] = []
        for segment in segments:
            sequence = next(each for each in self.model._holding.values() if each.row == segment.row)
            ends = range(segment.start + 1, segment.start + len(segment.tokens) + 1)
            texts = [tuple(sequence.tokens[:end]) for end in ends]
            slots += self.tables.rows[segment.row, segment.start : ends.stop - 1].tolist()
            nodes = {slot: node for node, slot in sequence.node_slots.items()}
            for path in segment.tree_paths:
                texts.append((*sequence.tokens, *sequence.path_tokens(nodes[path[-1]])))
                slots.append(path[-1])
            for text in texts:
                assert text not in self.model.computed[sequence.request_id], "computed twice"
                self.model.computed[sequence.request_id].add(text)
            self.num_tokens += len(texts)
        assert len(slots) <= self.model._chunk_tokens, "the pass is larger than its room"
        assert len(set(slots)) == len(slots), "two tokens of one pass share a slot"
        return super().forward(segments, layers)


class WatchedModel(DraftModel):
    """computed: texts whose KV each sequence holds."""

    def __init__(self, runner: WatchedRunner, **options: Any) -> None:
        super().__init__(runner, **options)
        runner.model = self
        self.computed: dict[str, set[Text]] = {}
        self.num_dropped = 0

    def _open(self, sequence: DraftSequence, busy: Sequence[DraftSequence], upto: int) -> None:
        fresh = sequence.cache_node is None
        super()._open(sequence, busy, upto)
        if fresh:
            ends = range(1, sequence.num_held + 1)
            self.computed[sequence.request_id] = {tuple(sequence.tokens[:end]) for end in ends}

    def moved(self, sequence: DraftSequence, accepted: Sequence[int], place: dict[int, int]) -> None:
        super().moved(sequence, accepted, place)
        if sequence.cache_node is not None:
            ends = range(1, sequence.num_held + 1)
            self.computed[sequence.request_id] = {tuple(sequence.tokens[:end]) for end in ends} | {
                (*sequence.tokens, *sequence.path_tokens(node)) for node in sequence.node_slots
            }

    def _drop_kv(self, sequence: DraftSequence) -> None:
        self.num_dropped += sequence.cache_node is not None
        super()._drop_kv(sequence)
        self.computed.pop(sequence.request_id, None)

    def check(self) -> None:
        pool, cached = self._ledger.pool, cached_slots(self._ledger)
        owned = []
        for sequence in self._holding.values():
            assert sequence.num_held == len(sequence.slots) <= len(sequence.tokens)
            owned += [*sequence.slots[sequence.num_cached_slots :], *sequence.node_slots.values()]
            assert set(sequence.slots[: sequence.num_cached_slots]) <= set(cached)
            held = self._runner.tables.rows[sequence.row, : sequence.num_held].tolist()
            assert held == sequence.slots, "the model reads other slots than it holds"
            # A root's KV is the text's own, every other expanded node's is in a slot of its own.
            assert set(sequence.node_slots) == sequence.draft.expanded - {ROOT}
            assert (ROOT in sequence.draft.expanded) == (sequence.num_held == len(sequence.tokens))
        assert sorted(owned + cached + pool._free) == list(range(pool.num_slots))
        rows = [sequence.row for sequence in self._holding.values()] + self._rows
        assert sorted(rows) == list(range(len(rows)))


class Scratch:
    """Candidates after a text, by one pass over all of it in a KV of its own."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.runner = new_runner(ModelRunner, model, CONTEXT, 1)
        self.runner.tables.write(0, 0, list(range(CONTEXT)))
        self.logits = cache(self._logits)

    def _logits(self, text: Text) -> Any:
        return self.runner.forward([Segment(0, 0, text, True)])[0].float().clone().numpy()

    def candidates(
        self, text: Text, params: SamplingParams, num_prompt: int, count: int
    ) -> tuple[list[int], list[float]]:
        return sampling.candidates(self.logits(text), params, text, num_prompt, (), count)


RULES: dict[str, GrowthRule] = {
    "chain": Chain(6),
    "fixed-shape": FixedShape((3, 2, 1)),
    "best-first": BestFirst(3, passes=3, candidates=4),
    "endless": BestFirst(3, candidates=3),
    "layers": Layers(2, 4, candidates=4),
    "calibrated": Calibrated(3, passes=3, candidates=4),
    "outcomes": OutcomeCache(3, 2),
}


class Life:
    """Several requests, with verdicts of every kind, in fewer slots than they would like."""

    def __init__(self, seed: int, rule: GrowthRule, scratch: Scratch) -> None:
        self.rng, self.rule, self.scratch = random.Random(seed), rule, scratch
        slots = self.rng.choice([40, 70, 300])
        self.runner: WatchedRunner = new_runner(WatchedRunner, scratch.model, slots, 3)
        self.model = WatchedModel(
            self.runner, target_vocab_size=320, eos_token_ids=(), num_slots=slots, chunk_tokens=CHUNK
        )
        self.drafter = TreeDrafter(
            self.model,
            rule,
            keep_tree=self.rng.random() < 0.8,
            top_up=self.rng.random() < 0.3,
            pass_leaves=self.rng.choice([2, CHUNK]),
            thrifty=self.rng.random() < 0.3,
            most_nodes=self.rng.choice([6, 20]),
        )
        self.texts: dict[str, list[int]] = {}
        self.about: dict[str, tuple[int, SamplingParams]] = {}
        self.told: dict[str, int] = {}
        self.landings = {"hit": 0, "leaf hit": 0, "miss": 0}

    def live(self, count: int) -> None:
        moves = [self.arrive, self.told_more, self.told_more, self.asked, self.verdict, self.verdict]
        moves += [self.ahead] * 3
        for _ in range(count):
            self.rng.choice(moves)()
            if self.rng.random() < 0.03:
                self.leave()
            self.model.check()
            self.check_candidates()
        for name in list(self.texts):
            self.drafter.release([name])
        self.model.check()
        assert not self.model._holding
        assert self.model._ledger.num_available == self.model._ledger.pool.num_slots

    def arrive(self) -> None:
        name = f"r{self.rng.randrange(3)}"
        if name in self.texts and self.rng.random() < 0.8:
            return  # else it begins anew, as after the drafter was lost
        shared = [3, 4, 5, 6, 7, 8, 9, 10][: self.rng.randrange(9)]
        text = shared + [self.rng.randrange(3, 320) for _ in range(self.rng.randrange(1, 12))]
        self.texts[name], self.told[name] = text, 0
        self.about[name] = (len(text), self.rng.choice(PARAMS))

    def items(self, nodes: int) -> list[DraftItem]:
        names = self.rng.sample(sorted(self.texts), self.rng.randint(0, len(self.texts)))
        found = []
        for name in names:
            start, text = self.told[name], self.texts[name]
            announcement = Announcement(*self.about[name]) if start == 0 else None
            self.told[name] = len(text)
            found.append(DraftItem(name, start, tuple(text[start:]), nodes, nodes, announcement))
        return found

    def told_more(self) -> None:
        self.drafter.advance(self.items(self.rng.choice([0, 30, 30, 30])))

    def asked(self) -> None:
        items = self.items(self.rng.randrange(1, 8))
        proposals = self.drafter.grow(items)
        assert [each.request_id for each in proposals] == [item.request_id for item in items]
        assert all(each.error is None or len(self.texts[each.request_id]) > CONTEXT for each in proposals)

    def ahead(self) -> None:
        self.drafter.work_ahead()

    def verdict(self) -> None:
        if not self.texts:
            return
        in_step = [name for name, text in sorted(self.texts.items()) if self.told[name] == len(text)]
        name = self.rng.choice(in_step if in_step and self.rng.random() < 0.8 else sorted(self.texts))
        text, sequence = self.texts[name], self.drafter._sequences.get(name)
        landing = "miss"
        if sequence is not None and self.told[name] == len(text) and self.rng.random() < 0.9:
            tree = sequence.draft.tree
            if not len(tree) and self.rng.random() < 0.7:
                return
            if len(tree):
                inner = sorted(sequence.draft.expanded - {ROOT})
                node = self.rng.choice(inner if inner and self.rng.random() < 0.5 else range(len(tree)))
                text += [tree.tokens[other] for other in tree.path(node)]
                landing = "hit" if node in sequence.draft.expanded else "leaf hit"
        if landing == "miss" or self.rng.random() < 0.2:
            text.append(self.rng.randrange(3, 320))
            landing = "miss"
        self.landings[landing] += 1
        if len(text) > CONTEXT + 2:
            self.drafter.release([name])
            del self.texts[name]

    def leave(self) -> None:
        if self.texts:
            name = self.rng.choice(sorted(self.texts))
            self.drafter.release([name])
            del self.texts[name]

    def check_candidates(self) -> None:
        for sequence in self.drafter._sequences.values():
            draft, tree = sequence.draft, sequence.draft.tree
            for node in draft.expanded:
                text = (*sequence.tokens, *sequence.path_tokens(node))
                below = tree.children(node)
                # A rule may have asked for more, and kept those that are likely to be reached.
                tokens, scores = self.scratch.candidates(
                    text, sequence.params, sequence.num_prompt, max(len(below), 1)
                )
                found = [draft.confidence[each] for each in below]
                if not sequence.params.greedy:  # given the noise, of those that shared the pass
                    found, scores = [each - found[0] for each in found], [each - scores[0] for each in scores]
                assert found == pytest.approx(scores, abs=1e-4)
                assert [tree.tokens[each] for each in below] == tokens


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    return Scratch(load(str(write_random(tmp_path_factory.mktemp("draft") / "tiny"))))


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(RULES)))
def test_candidates_are_those_of_the_text_and_nothing_is_computed_twice(
    scratch: Scratch, seed: int, name: str
) -> None:
    Life(seed, RULES[name], scratch).live(60)


def test_the_random_lives_meet_every_landing_and_run_out_of_room(scratch: Scratch) -> None:
    total = {"hit": 0, "leaf hit": 0, "miss": 0, "dropped": 0}
    for seed in range(30):
        life = Life(seed, RULES["endless"], scratch)
        life.live(60)
        for landing, count in life.landings.items():
            total[landing] += count
        total["dropped"] += life.model.num_dropped
    assert min(total.values()) > 10


def alone(scratch: Scratch, rule: GrowthRule) -> tuple[TreeDrafter, WatchedRunner]:
    runner: WatchedRunner = new_runner(WatchedRunner, scratch.model, 100, 2)
    model = WatchedModel(runner, target_vocab_size=320, eos_token_ids=(), num_slots=100, chunk_tokens=50)
    return TreeDrafter(model, rule), runner


@pytest.mark.timeout(60)
def test_two_trees_do_not_take_each_others_room_without_end(scratch: Scratch) -> None:
    """Whoever loses its KV leaves the others alone until the target goes on with its text."""
    runner: WatchedRunner = new_runner(WatchedRunner, scratch.model, 40, 2)
    model = WatchedModel(runner, target_vocab_size=320, eos_token_ids=(), num_slots=40, chunk_tokens=50)
    drafter = TreeDrafter(model, BestFirst(3, candidates=3), pass_leaves=1)
    texts = {"a": tuple(range(20, 35)), "b": tuple(range(40, 55))}
    items = [DraftItem(name, 0, text, 30, 30, Announcement(15, PARAMS[0])) for name, text in texts.items()]
    drafter.advance(items)
    rounds = 0
    while drafter.work_ahead() is not None:
        rounds += 1
        assert rounds < 200, "they take turns for ever"
        model.check()
    assert model.num_dropped == 1
    (lost,) = (each for each in drafter._sequences.values() if each.cache_node is None)
    drafter.advance([DraftItem(lost.request_id, 15, (7,), 30, 30)])
    while drafter.work_ahead() is not None:
        model.check()
    assert len(lost.draft.tree), "below the next root it may grow again"


def test_a_text_that_comes_again_is_not_read_again(scratch: Scratch) -> None:
    drafter, runner = alone(scratch, Chain(1))
    text = tuple(range(20, 40))
    for name, passed in (("first", 20), ("again", 1), ("beside it", 1)):
        runner.num_tokens = 0
        drafter.grow([DraftItem(name, 0, text, 1, 1, Announcement(20, PARAMS[0]))])
        assert runner.num_tokens == passed
        if name == "first":
            drafter.release([name])


def test_after_a_hit_only_the_missing_guesses_are_computed(scratch: Scratch) -> None:
    drafter, runner = alone(scratch, Chain(4))
    (proposal,) = drafter.grow([DraftItem("r", 0, (5, 6, 7), 4, 4, Announcement(3, PARAMS[0]))])
    assert runner.num_tokens == 3 + 3
    drafter.grow([DraftItem("r", 3, proposal.tokens[:2], 4, 4)])
    assert runner.num_tokens == 6 + 2, "two were left, the last of them not computed yet"
    drafter.grow([DraftItem("r", 5, (99,), 4, 4)])
    assert runner.num_tokens == 8 + 4, "a miss leaves the text, and the token that was missed"
