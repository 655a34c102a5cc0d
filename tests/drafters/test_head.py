"""A head over the target's features: what it drafts is what the text alone says, and nothing computed from
its own output outlives the features that replace it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core import sampling
from paceline.core.growth import BestFirst, Calibrated, Chain, FixedShape, GrowthRule, Layers
from paceline.core.outcomes import OutcomeCache
from paceline.core.params import SamplingParams
from paceline.core.token_tree import ROOT
from paceline.core.work import Announcement, DraftItem
from paceline.drafters.head import HeadModel
from paceline.drafters.tree_drafter import DraftSequence, TreeDrafter
from paceline.execution.forward_batch import Segment, SlotTables, build_batch
from paceline.execution.target_view import Span
from paceline.kernels.batch import TokenBatch
from paceline.kernels.kv_cache import KVCache
from paceline.models.head_chain import draft_chain
from paceline.models.torch_head import TorchHead
from tests.core.test_kv_ledger import cached_slots
from tests.models.heads import make_head_spec, make_head_weights

CONTEXT = 64
VOCAB = 131
PARAMS = [
    SamplingParams(temperature=0).resolved(),
    SamplingParams(temperature=0.9, seed=7).resolved(),
    SamplingParams(temperature=0.7, seed=3, frequency_penalty=0.8, top_k=30, logit_bias={5: 2.0}).resolved(),
]
RULES: dict[str, GrowthRule] = {
    "chain": Chain(6),
    "fixed-shape": FixedShape((3, 2, 1)),
    "best-first": BestFirst(3, passes=3, candidates=4),
    "endless": BestFirst(3, candidates=3),
    "layers": Layers(2, 4, candidates=4),
    "calibrated": Calibrated(3, passes=3, candidates=4),
    "outcomes": OutcomeCache(3, 2),
}
Text = tuple[int, ...]

SPEC = make_head_spec(target_hidden_size=24, hidden_size=24, intermediate_size=32, head_dim=8)
HEAD = TorchHead(SPEC, make_head_weights(SPEC))


def features_of(text: Text) -> Tensor:
    """What the target's residual stream holds at the last token of `text`."""
    generator = torch.Generator().manual_seed(hash(text) % 2**62)
    return torch.randn(len(SPEC.capture), SPEC.target_hidden_size, generator=generator)


class Source:
    """Features of the texts of requests, as far as the target is said to have computed them."""

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}
        self.reached: dict[str, int] = {}

    def computed(self, request_id: str) -> int:
        return self.reached.get(request_id, 0)

    def features(self, spans: Sequence[Span]) -> Tensor:
        assert all(0 <= start <= end <= self.computed(request_id) for request_id, start, end in spans)
        texts = {request_id: tuple(self.texts[request_id]) for request_id, _, _ in spans}
        return torch.stack(
            [features_of(texts[name][: at + 1]) for name, start, end in spans for at in range(start, end)]
        )


@dataclass
class Entry:
    """What a slot holds: the text up to the token at the next position, whether by features, the output."""

    text: Text
    backed: bool
    output: Tensor | None = None


class WatchedHead:
    """Knows what every slot holds, and that each token sees the positions of its own text and no others."""

    def __init__(self) -> None:
        self.spec, self.target_ids, self.kv_dtype = SPEC, HEAD.target_ids, HEAD.kv_dtype
        self.fuse, self.chain = HEAD.fuse, partial(draft_chain, self)
        self.content: dict[int, Entry] = {}
        self.model: WatchedModel
        self.num_tokens = self.num_passes = 0

    def forward(
        self, batch: TokenBatch, hidden: Tensor, kv: KVCache, module: int = 0
    ) -> tuple[Tensor, Tensor]:
        assert len(batch) <= self.model._chunk_tokens, "the pass is larger than its room"
        assert len(set(batch.slots.tolist())) == len(batch), "two tokens of one pass share a slot"
        for at, token in enumerate(batch.tokens.tolist()):
            self.enter(batch, at, token, hidden[at])
        logits, output = HEAD.forward(batch, hidden, kv, module)
        for row, at in enumerate(batch.logit_rows.tolist()):
            self.content[int(batch.slots[at])].output = output[row].clone()
        self.num_tokens += len(batch)
        self.num_passes += 1
        return logits, output

    def enter(self, batch: TokenBatch, at: int, token: int, hidden: Tensor) -> None:
        row, path = int(batch.rows[at]), int(batch.path_start[at])
        sequence = next(each for each in self.model._holding.values() if each.row == row)
        seen = batch.tables[row, : batch.prefix_len[at]].tolist()
        seen += batch.path_slots[path : path + batch.path_len[at]].tolist()
        assert len(seen) == batch.positions[at] + 1
        assert seen[-1] == batch.slots[at]
        before = self.content[seen[-2]].text if len(seen) > 1 else (sequence.tokens[0],)
        for position, slot in enumerate(seen[:-1]):
            assert self.content[slot].text == before[: position + 2], "a token sees another text"
        backed = torch.allclose(hidden, self.fuse(features_of(before)[None])[0], atol=1e-5)
        if not backed:
            output = self.content[seen[-2]].output
            assert output is not None
            assert torch.equal(hidden, output), "fed neither features nor the output at the position before"
        self.content[seen[-1]] = Entry((*before, token), backed)


class WatchedModel(HeadModel):
    decoder: WatchedHead

    def __init__(self, source: Source, *, slots: int, rows: int, chunk: int) -> None:
        self.decoder = WatchedHead()
        self.decoder.model = self
        kv = KVCache(1, slots, SPEC.num_kv_heads, SPEC.head_dim, torch.float32)
        super().__init__(
            self.decoder,
            kv,
            source,
            num_rows=rows,
            context_length=CONTEXT,
            target_vocab_size=VOCAB,
            eos_token_ids=(),
            chunk_tokens=chunk,
        )
        self.num_dropped = 0

    def _drop_kv(self, sequence: DraftSequence) -> None:
        self.num_dropped += sequence.cache_node is not None
        super()._drop_kv(sequence)

    def check(self) -> None:
        pool, cached, content = self._ledger.pool, cached_slots(self._ledger), self.decoder.content
        assert set(self._unbacked) == set(self._holding)
        owned = []
        for sequence in self._holding.values():
            own, tokens = self._unbacked[sequence.request_id], tuple(sequence.tokens)
            assert sequence.num_held == len(sequence.slots) < len(tokens)
            owned += [*sequence.slots[sequence.num_cached_slots :], *own.spine, *sequence.node_slots.values()]
            assert set(sequence.slots[: sequence.num_cached_slots]) <= set(cached)
            held = self._tables.rows[sequence.row, : sequence.num_held].tolist()
            assert held == sequence.slots, "the head reads other slots than it holds"
            for position, slot in enumerate([*sequence.slots, *own.spine]):
                assert content[slot].text == tokens[: position + 2]
                assert content[slot].backed or position >= sequence.num_held, "held without features"
            assert set(sequence.node_slots) == set(own.hidden) == sequence.draft.expanded - {ROOT}
            for node, slot in sequence.node_slots.items():
                assert content[slot].text == (*tokens, *sequence.path_tokens(node))
            if ROOT in sequence.draft.expanded:
                assert self._reached(sequence) == len(tokens) - 1
                assert own.tip is not None
        assert all(content[slot].backed for slot in cached)
        assert sorted(owned + cached + pool._free) == list(range(pool.num_slots))
        rows = [sequence.row for sequence in self._holding.values()] + self._rows
        assert sorted(rows) == list(range(len(rows)))


class Scratch:
    """Candidates after a text and guesses below it, from the features of all of the text, without a cache of
    earlier passes."""

    def __init__(self) -> None:
        self.known: dict[tuple[Text, Text], Any] = {}

    def logits(self, text: Text, guesses: Text) -> Any:
        if (text, guesses) not in self.known:
            self.known[text, guesses] = self._logits(text, guesses)
        return self.known[text, guesses]

    def _logits(self, text: Text, guesses: Text) -> Any:
        kv = KVCache(1, CONTEXT + 64, SPEC.num_kv_heads, SPEC.head_dim, torch.float32)
        tables = SlotTables(1, CONTEXT + 64)
        tables.write(0, 0, range(CONTEXT + 64))
        backed = torch.stack([features_of(text[: at + 1]) for at in range(len(text) - 1)])
        batch = build_batch([Segment(0, 0, text[1:], True)], tables)
        logits, hidden = HEAD.forward(batch, HEAD.fuse(backed), kv)
        for at, guess in enumerate(guesses, len(text) - 1):
            batch = build_batch([Segment(0, at, [guess], True)], tables)
            logits, hidden = HEAD.forward(batch, hidden, kv)
        assert HEAD.target_ids is not None
        row = np.full(VOCAB, -1e9, np.float32)
        row[HEAD.target_ids.numpy()] = logits[0].numpy()
        return row

    def candidates(self, sequence: DraftSequence, node: int, count: int) -> tuple[list[int], list[float]]:
        text, guesses = tuple(sequence.tokens), tuple(sequence.path_tokens(node))
        row = self.logits(text, guesses)
        return sampling.candidates(row, sequence.params, (*text, *guesses), sequence.num_prompt, (), count)


class Life:
    """Several requests in fewer slots than they would like, and a target that computes their texts, is
    interrupted, and takes guesses. late: it works at the same time, so that features come when they come, and
    trees outlive verdicts."""

    def __init__(self, seed: int, rule: GrowthRule, *, late: bool) -> None:
        self.rng, self.rule, self.late = random.Random(seed), rule, late
        self.source = Source()
        slots, chunk = self.rng.choice([40, 70, 300]), self.rng.choice([7, 20, 40])
        self.model = WatchedModel(self.source, slots=slots, rows=3, chunk=chunk)
        self.drafter = TreeDrafter(
            self.model,
            rule,
            keep_tree=late and self.rng.random() < 0.8,
            top_up=self.rng.random() < 0.3,
            pass_leaves=self.rng.choice([2, 7]),
            thrifty=self.rng.random() < 0.3,
            most_nodes=self.rng.choice([6, 20]),
        )
        self.about: dict[str, tuple[int, SamplingParams]] = {}
        self.told: dict[str, int] = {}
        self.met = {"accepted": 0, "missed": 0, "preempted": 0, "shared": 0, "late": 0}
        self.scratch = Scratch()

    @property
    def texts(self) -> dict[str, list[int]]:
        return self.source.texts

    def live(self, count: int) -> None:
        moves = [self.arrive, self.prefill, self.asked, self.asked, self.verdict, self.verdict, self.preempt]
        moves += [self.ahead, self.ahead, self.catch_up] if self.late else []
        for _ in range(count):
            self.rng.choice(moves)()
            if self.rng.random() < 0.03:
                self.leave()
            self.model.check()
            if not self.late:
                self.check_candidates()
        for name in list(self.texts):
            self.drafter.release([name])
        self.model.check()
        assert not self.model._holding
        assert self.model._ledger.num_available == self.model._ledger.pool.num_slots

    def arrive(self) -> None:
        name = f"r{self.rng.randrange(3)}"
        if name in self.texts and self.rng.random() < 0.8:
            return
        shared = [3, 4, 5, 6, 7, 8, 9, 10][: self.rng.randrange(9)]
        text = shared + [self.rng.randrange(3, VOCAB) for _ in range(self.rng.randrange(1, 30))]
        if self.rng.random() < 0.2:
            text = text[:1]
        self.drafter.release([name])
        self.texts[name], self.told[name], self.source.reached[name] = text, 0, 0
        self.about[name] = (len(text), self.rng.choice(PARAMS))

    def item(self, name: str, upto: int, nodes: int) -> DraftItem:
        start, self.told[name] = self.told[name], max(upto, self.told[name])
        announcement = Announcement(*self.about[name]) if start == 0 else None
        return DraftItem(name, start, tuple(self.texts[name][start:upto]), nodes, nodes, announcement)

    def prefill(self) -> None:
        """The target computes a chunk; the drafter hears of it."""
        for name, text in self.texts.items():
            before = self.source.reached[name]
            if before < len(text) - 1:
                self.source.reached[name] = upto = min(before + self.rng.randrange(1, 25), len(text) - 1)
                if upto > self.told[name]:
                    self.drafter.advance([self.item(name, upto, 0)])

    def asked(self) -> None:
        able = [name for name, text in self.texts.items() if self.late or self.is_computed(name, text)]
        names = self.rng.sample(able, self.rng.randint(0, len(able)))
        nodes = self.rng.randrange(1, 8)
        held = dict.fromkeys(names, self.model._ledger.cache.size)
        proposals = self.drafter.grow([self.item(name, len(self.texts[name]), nodes) for name in names])
        assert [each.request_id for each in proposals] == names
        self.met["shared"] += any(held.values())
        for name, proposal in zip(names, proposals, strict=True):
            assert proposal.error is None or len(self.texts[name]) > CONTEXT
            roomy = self.model._ledger.pool.num_slots == 300
            if roomy and not self.late and 1 < len(self.texts[name]) <= CONTEXT - 1:
                assert proposal.tokens, "nothing was drafted"

    def is_computed(self, name: str, text: list[int]) -> bool:
        return self.source.reached[name] == len(text) - 1

    def ahead(self) -> None:
        self.drafter.work_ahead()

    def catch_up(self) -> None:
        for name, text in self.texts.items():
            if self.rng.random() < 0.5:
                self.source.reached[name] = len(text) - 1

    def preempt(self) -> None:
        """Nothing can be read of a request that waits to be computed anew."""
        if self.texts and self.rng.random() < 0.4:
            self.source.reached[self.rng.choice(sorted(self.texts))] = 0
            self.met["preempted"] += 1

    def verdict(self) -> None:
        able = [name for name, text in sorted(self.texts.items()) if self.is_computed(name, text)]
        if not able:
            return
        name = self.rng.choice(able)
        text, sequence = self.texts[name], self.drafter._sequences.get(name)
        if sequence is not None and self.told[name] == len(text) and len(tree := sequence.draft.tree):
            node = self.rng.randrange(len(tree))
            text += [tree.tokens[other] for other in tree.path(node)]
            self.met["accepted"] += 1
        if not self.late or self.rng.random() < 0.3:
            text.append(self.rng.randrange(3, VOCAB))
            self.met["missed"] += 1
        if not self.late or self.rng.random() < 0.5:
            self.source.reached[name] = len(text) - 1
        else:
            self.met["late"] += 1
        if self.late and self.rng.random() < 0.7:
            self.drafter.advance([self.item(name, len(text), self.rng.choice([0, 20]))])
        if len(text) > CONTEXT + 2:
            self.leave(name)

    def leave(self, name: str | None = None) -> None:
        if self.texts:
            name = name or self.rng.choice(sorted(self.texts))
            self.drafter.release([name])
            del self.texts[name], self.source.reached[name]

    def check_candidates(self) -> None:
        for sequence in self.drafter._sequences.values():
            draft, tree = sequence.draft, sequence.draft.tree
            for node in draft.expanded:
                below = tree.children(node)
                tokens, scores = self.scratch.candidates(sequence, node, max(len(below), 1))
                found = [draft.confidence[each] for each in below]
                if not sequence.params.greedy:  # given the noise, of those that shared the pass
                    found, scores = [each - found[0] for each in found], [each - scores[0] for each in scores]
                assert found == pytest.approx(scores, abs=1e-4)
                assert [tree.tokens[each] for each in below] == tokens


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(RULES)))
def test_in_turn_every_draft_is_what_the_text_alone_says(seed: int, name: str) -> None:
    Life(seed, RULES[name], late=False).live(50)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(RULES)))
def test_late_features_replace_what_was_computed_without_them(seed: int, name: str) -> None:
    Life(seed, RULES[name], late=True).live(50)


@pytest.mark.parametrize("late", [False, True])
def test_the_random_lives_meet_what_they_are_for(late: bool) -> None:
    total = {"dropped": 0}
    for seed in range(30):
        life = Life(seed, RULES["endless"], late=late)
        life.live(50)
        for name, count in life.met.items():
            total[name] = total.get(name, 0) + count
        total["dropped"] += life.model.num_dropped
    assert min(count for name, count in total.items() if late or name != "late") > 10, total


def alone(rule: GrowthRule, **options: Any) -> tuple[TreeDrafter, WatchedModel, Source]:
    source = Source()
    model = WatchedModel(source, slots=200, rows=2, chunk=50)
    return TreeDrafter(model, rule, **{"keep_tree": False} | options), model, source


def ask(drafter: TreeDrafter, source: Source, name: str, text: Sequence[int], told: int, nodes: int) -> Text:
    source.texts[name], source.reached[name] = list(text), len(text) - 1
    announcement = Announcement(len(text), PARAMS[0]) if not told else None
    (proposal,) = drafter.grow([DraftItem(name, told, tuple(text[told:]), nodes, nodes, announcement)])
    assert proposal.error is None
    return proposal.tokens


def test_a_verdict_costs_one_pass_and_each_further_guess_another() -> None:
    drafter, model, source = alone(Chain(4))
    text = list(range(20, 30))
    guesses = ask(drafter, source, "r", text, 0, 4)
    assert (model.decoder.num_passes, model.decoder.num_tokens) == (4, 9 + 3)
    text += [*guesses[:2], 99]
    ask(drafter, source, "r", text, 10, 4)
    assert (model.decoder.num_passes, model.decoder.num_tokens) == (8, 12 + 3 + 3)


def test_a_prefix_of_n_tokens_is_n_less_one_positions() -> None:
    drafter, model, source = alone(Chain(1))
    text = list(range(20, 40))
    ask(drafter, source, "first", text, 0, 1)
    for other, passed in (
        (text, 1),
        ([*text[:10], 99, 98], 2),
        ([99, *text[1:]], 19),
        ([20, 99, *text[2:]], 19),
    ):
        model.decoder.num_tokens = 0
        ask(drafter, source, f"{other}", other, 0, 1)
        assert model.decoder.num_tokens == passed
        drafter.release([f"{other}"])


def test_a_text_of_one_token_waits_for_the_next() -> None:
    drafter, model, source = alone(Chain(3))
    assert ask(drafter, source, "r", [20], 0, 3) == ()
    assert model.decoder.num_passes == 0
    assert len(ask(drafter, source, "r", [20, 21], 1, 3)) == 3


def test_rounds_without_guesses_are_caught_up_with() -> None:
    """A request that drafts nothing for a while: the head is told later, and reads what it missed at once."""
    drafter, model, source = alone(Chain(2))
    text = list(range(20, 30))
    ask(drafter, source, "r", text, 0, 2)
    before = model.decoder.num_passes
    text += range(40, 50)
    ask(drafter, source, "r", text, 10, 2)
    assert model.decoder.num_passes == before + 2


def test_features_that_never_come_leave_the_heads_own_output() -> None:
    drafter, model, source = alone(Chain(9), keep_tree=True)
    text = list(range(20, 30))
    guesses = ask(drafter, source, "r", text, 0, 3)
    for told in range(10, 14):
        text.append(guesses[0] if guesses else 99)
        source.texts["r"] = text
        (proposal,) = drafter.grow([DraftItem("r", told, (text[-1],), 3, 3)])
        guesses = proposal.tokens
        model.check()
    assert model._holding["r"].num_held == 9
    assert len(model._unbacked["r"].spine) == 4
    source.reached["r"] = 13
    drafter.advance([DraftItem("r", 14, (), 3, 3)])
    drafter.work_ahead()
    assert model._holding["r"].num_held == 13
    assert model._unbacked["r"].spine == []
