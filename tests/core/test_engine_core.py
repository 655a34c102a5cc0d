"""The core driven by a toy executor: exactness, slot laws and replay over random lives of requests."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.draft_lane import DraftPolicy
from paceline.core.drafting import DrafterNeeds, FixedLength, LengthByBatchSize
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.params import SamplingParams
from paceline.core.request import FinishReason
from paceline.core.scheduler import Limits
from paceline.core.token_tree import ROOT, TokenTree
from paceline.core.work import (
    DraftDone,
    DrafterLost,
    DraftItem,
    GrowDrafts,
    Proposal,
    RequestAborted,
    RequestArrived,
    RunTarget,
    StepDone,
    Verdict,
)
from tests.core.toy import VOCAB, DraftRule, Drive, ToyExecutor, toy_generate, toy_next


def oracle(known: list[int], item: DraftItem) -> TokenTree:
    return TokenTree.chain(toy_generate(known, item.max_depth))


def adversary(known: list[int], item: DraftItem) -> TokenTree:
    tokens = list(known)
    for _ in range(item.max_depth):
        tokens.append((toy_next(tokens) + 1) % VOCAB)
    return TokenTree.chain(tokens[len(known) :])


@dataclass
class HalfRight:
    """Bushy trees whose guesses are right half of the time."""

    rng: random.Random

    def __call__(self, known: list[int], item: DraftItem) -> TokenTree:
        tree = TokenTree()
        for _ in range(item.max_nodes):
            parent = self.rng.randrange(ROOT, len(tree))
            prefix = known + [tree.tokens[node] for node in (tree.path(parent) if parent != ROOT else [])]
            right = self.rng.random() < 0.5
            token = toy_next(prefix) if right else self.rng.randrange(VOCAB)
            tree.add(parent, token, -self.rng.random())
        return tree


def make_core(k: int = 4, **limits: int) -> EngineCore:
    known = {"context_length": 200, "num_slots": 400, "max_num_seqs": 4, "max_batch_tokens": 64} | limits
    return EngineCore(
        CoreConfig(
            limits=Limits(**known),
            vocab_size=VOCAB,
            drafting=DraftPolicy((DrafterNeeds("toy", ingests_prompts=True),), FixedLength(k)),
        )
    )


def make_drive(core: EngineCore, draft: DraftRule = oracle) -> Drive:
    return Drive(core, ToyExecutor(core.config.limits.num_slots, draft))


def arrive(drive: Drive, name: str, prompt: list[int], **params: object) -> None:
    drive.feed(RequestArrived(name, tuple(prompt), SamplingParams(**params).resolved()))  # type: ignore[arg-type]


def assert_no_leak(core: EngineCore) -> None:
    """Idle: every slot is free or the prefix cache's, and nothing is locked."""
    assert core.ledger.pool.num_free + core.ledger.cache.size == core.ledger.pool.num_slots
    assert core.ledger.cache.num_evictable == core.ledger.cache.size
    core.ledger.cache.clear()
    assert core.ledger.pool.num_free == core.ledger.pool.num_slots


@pytest.mark.parametrize("k", [0, 1, 2, 3, 7, 16])
@pytest.mark.parametrize("draft", [oracle, adversary, HalfRight(random.Random(1))])
def test_output_is_the_targets_own(k: int, draft: DraftRule) -> None:
    drive = make_drive(make_core(k), draft)
    prompts = {f"r{i}": list(range(i, i + 3 + 11 * i)) for i in range(6)}
    prompts = {name: [token % VOCAB for token in prompt] for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        arrive(drive, name, prompt, max_tokens=40)
    drive.run()
    for name, prompt in prompts.items():
        assert drive.tokens[name] == toy_generate(prompt, 40)
        assert drive.finished[name].finish_reason == "length"
    assert_no_leak(drive.core)


def test_oracle_accepts_everything_and_counts_the_bonus() -> None:
    drive = make_drive(make_core(3))
    arrive(drive, "r", [1, 2, 3], max_tokens=41)
    drive.run()
    stats = drive.core.speculation
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (10, 30, 30)
    assert stats.acceptance_rate == 1.0
    assert stats.mean_acceptance_length == 4.0
    assert stats.accepted_by_depth == [10, 10, 10]


def test_adversary_has_rate_zero_and_a_request_that_never_drafts_has_none() -> None:
    drive = make_drive(make_core(4), adversary)
    arrive(drive, "r", [1, 2], max_tokens=10)
    drive.run()
    assert drive.core.speculation.acceptance_rate == 0.0
    assert drive.core.speculation.mean_acceptance_length == 1.0
    quiet = make_drive(make_core(4))
    arrive(quiet, "r", [1, 2], max_tokens=10, num_speculative_tokens=0)
    quiet.run()
    assert quiet.core.speculation.acceptance_rate is None
    assert quiet.core.speculation.num_steps == 9


@pytest.mark.parametrize(("max_tokens", "drafts"), [(13, [3, 3, 3]), (14, [3, 3, 3, 0]), (15, [3, 3, 3, 1])])
def test_never_drafts_what_cannot_be_emitted(max_tokens: int, drafts: list[int]) -> None:
    drive = make_drive(make_core(3))
    arrive(drive, "r", [1, 2, 3], max_tokens=max_tokens)
    drive.run()
    works = [work for _, works in drive.log for work in works]
    asked = [work.items[0].max_nodes for work in works if isinstance(work, GrowDrafts)]
    assert asked == [count for count in drafts if count]
    assert len(drive.tokens["r"]) == max_tokens


@pytest.mark.parametrize("short", [1, 2, 3, 4, 5, 6])
def test_context_limit_is_exact(short: int) -> None:
    drive = make_drive(make_core(5, context_length=64))
    arrive(drive, "r", [3] * (64 - short), max_tokens=None)
    drive.run()
    assert len(drive.tokens["r"]) == short
    assert drive.finished["r"].finish_reason == "length"


def test_stop_and_length_in_one_round() -> None:
    prompt = [5, 6, 7]
    output = toy_generate(prompt, 12)
    first = next(i for i in range(2, 12) if output[i] not in output[:i])
    cases = ((first + 3, "stop", first + 1), (first + 1, "stop", first + 1), (first, "length", first))
    for cap, reason, count in cases:
        drive = make_drive(make_core(8))
        arrive(drive, "r", prompt, max_tokens=cap, stop_token_ids=[output[first]])
        drive.run()
        assert drive.tokens["r"] == output[:count]
        assert drive.finished["r"].finish_reason == reason


def test_refusals_leave_neighbours_alone() -> None:
    drive = make_drive(make_core(4))
    arrive(drive, "good", [1, 2, 3], max_tokens=20)
    arrive(drive, "empty", [])
    arrive(drive, "long", [1] * 200)
    arrive(drive, "good", [4])
    assert "in use" in (drive.finished.pop("good").error or "")
    drive.run()
    assert drive.tokens["good"] == toy_generate([1, 2, 3], 20)
    assert "empty" in (drive.finished["empty"].error or "")
    assert "shorten" in (drive.finished["long"].error or "")


def test_prefix_hit_covers_prompt_and_answer() -> None:
    core = make_core(4)
    drive = make_drive(core, HalfRight(random.Random(3)))
    arrive(drive, "one", [1, 2, 3, 4], max_tokens=20)
    drive.run()
    second = [1, 2, 3, 4, *drive.tokens["one"], 9, 9]
    hits: list[int] = []
    drive.feed(RequestArrived("two", tuple(second), SamplingParams(max_tokens=5).resolved()))
    hits.append(core.requests["two"].prefix_hit or 0)
    drive.run()
    assert hits == [4 + 19]
    assert drive.tokens["two"] == toy_generate(second, 5)
    assert_no_leak(core)


def test_small_pool_preempts_and_output_stays() -> None:
    core = make_core(3, num_slots=70, max_num_seqs=4, max_batch_tokens=32)
    drive = make_drive(core, HalfRight(random.Random(5)))
    prompts = {f"r{i}": [i, 2, 3, i] for i in range(4)}
    for name, prompt in prompts.items():
        arrive(drive, name, prompt, max_tokens=40)
    preempted = 0
    while drive.step():
        preempted = max([preempted, *(request.num_preemptions for request in core.requests.values())])
    assert preempted > 0
    for name, prompt in prompts.items():
        assert drive.tokens[name] == toy_generate(prompt, 40)
    assert_no_leak(core)


def test_request_that_outgrows_the_pool_ends_alone() -> None:
    core = make_core(8, num_slots=30)
    drive = make_drive(core)
    arrive(drive, "big", [1, 2, 3], max_tokens=100)
    arrive(drive, "small", [4, 5], max_tokens=10)
    drive.run()
    assert "more slots" in (drive.finished["big"].error or "")
    assert drive.tokens["big"] == toy_generate([1, 2, 3], len(drive.tokens["big"]))
    assert drive.tokens["small"] == toy_generate([4, 5], 10)
    assert_no_leak(core)


@pytest.mark.parametrize(
    "bad",
    [
        Proposal("r", 4, (99,), (-1,), (0.0,)),
        Proposal("r", 4, (-1,), (-1,), (0.0,)),
        Proposal("r", 4, (1, 2), (-1, 1), (0.0, 0.0)),
        Proposal("r", 4, (1,), (-1,), (float("nan"),)),
        Proposal("r", 4, (1,), (-1,), (float("-inf"),)),
        Proposal("r", 4, tuple(at % VOCAB for at in range(1025)), tuple(range(-1, 1024))),
        Proposal("r", 4, (1, 2), (-1,), ()),
        Proposal("r", 4, error="boom"),
    ],
)
def test_invalid_proposal_costs_only_its_guesses(bad: Proposal) -> None:
    drive = make_drive(make_core(4, max_num_seqs=4))
    arrive(drive, "r", [1, 2, 3], max_tokens=6)
    while not isinstance(drive.pending[0], GrowDrafts):
        drive.step()
    work = drive.pending.popleft()
    assert isinstance(work, GrowDrafts)
    drive.executor._note(0, work.items[0])
    drive.feed(DraftDone(work.round, (bad,)))
    drive.run()
    assert drive.tokens["r"] == toy_generate([1, 2, 3], 6)
    assert drive.core.speculation.num_failed_drafts == 1


def test_too_many_guesses_are_cut() -> None:
    drive = make_drive(make_core(2), lambda known, _: TokenTree.chain(toy_generate(known, 9)))
    arrive(drive, "r", [1, 2, 3], max_tokens=7)
    drive.run()
    assert drive.tokens["r"] == toy_generate([1, 2, 3], 7)
    assert drive.core.speculation.num_draft_tokens == 4


def test_stale_answers_are_dropped() -> None:
    drive = make_drive(make_core(4))
    arrive(drive, "r", [1, 2, 3], max_tokens=8)
    drive.feed(DraftDone(0, (Proposal("r", 3, (1,), (-1,), (0.0,)),)))
    drive.feed(StepDone(0, (Verdict("r", (), (5,)),)))
    drive.run()
    assert drive.tokens["r"] == toy_generate([1, 2, 3], 8)


def test_lost_drafter_means_plain_decoding() -> None:
    drive = make_drive(make_core(4))
    arrive(drive, "r", [1, 2, 3], max_tokens=20)
    while not isinstance(drive.pending[0], GrowDrafts):
        drive.step()
    drive.pending.clear()
    drive.feed(DrafterLost("killed"))
    drive.run()
    assert drive.tokens["r"] == toy_generate([1, 2, 3], 20)


def test_abort_in_flight_keeps_slots_until_the_step_is_done() -> None:
    core = make_core(4)
    drive = make_drive(core)
    arrive(drive, "a", [1, 2, 3], max_tokens=20)
    arrive(drive, "b", [4, 5], max_tokens=20)
    while not (isinstance(drive.pending[0], RunTarget) and len(drive.pending[0].items) == 2):
        drive.step()
    free = core.ledger.pool.num_free
    drive.feed(RequestAborted("a"))
    assert drive.finished["a"].finish_reason == FinishReason.ABORT
    assert core.ledger.pool.num_free == free
    drive.run()
    assert drive.tokens["b"] == toy_generate([4, 5], 20)
    assert_no_leak(core)


def test_length_by_batch_size_resumes_in_step() -> None:
    core = make_core()
    config = CoreConfig(
        limits=core.config.limits,
        vocab_size=VOCAB,
        drafting=DraftPolicy(
            (DrafterNeeds("toy", ingests_prompts=True),), LengthByBatchSize(((1, 3), (2, 0)))
        ),
    )
    drive = make_drive(EngineCore(config))
    arrive(drive, "a", [1, 2, 3], max_tokens=60)
    for _ in range(20):
        drive.step()
    arrive(drive, "b", [4, 5], max_tokens=10)
    drive.run()
    assert drive.tokens["a"] == toy_generate([1, 2, 3], 60)
    assert drive.core.speculation.acceptance_rate == 1.0


def test_draft_never_exceeds_the_token_budget() -> None:
    core = make_core(8, max_num_seqs=16, max_batch_tokens=64, num_slots=2000)
    drive = make_drive(core, HalfRight(random.Random(2)))
    for i in range(16):
        arrive(drive, f"r{i}", [i % VOCAB, 3, 1], max_tokens=30)
    drive.run()
    for _, works in drive.log:
        for work in works:
            if isinstance(work, RunTarget):
                assert sum(len(item.tokens) + len(item.tree_tokens) for item in work.items) <= 64
    for i in range(16):
        assert drive.tokens[f"r{i}"] == toy_generate([i % VOCAB, 3, 1], 30)


class Life:
    """A random life of many requests, drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        rng = self.rng
        self.core = make_core(
            rng.randrange(0, 9),
            num_slots=rng.randrange(60, 300),
            max_num_seqs=rng.randrange(1, 6),
            max_batch_tokens=rng.randrange(24, 80),
            context_length=rng.randrange(48, 100),
        )
        self.drive = make_drive(self.core, HalfRight(random.Random(seed + 1)))
        self.prompts: dict[str, list[int]] = {}
        self.aborted: set[str] = set()

    def live(self, count: int) -> None:
        while count or self.drive.pending:
            draw = self.rng.random()
            if count and draw < 0.2:
                count -= 1
                self._arrive(f"r{count}")
            elif draw < 0.23 and self.core.requests:
                name = self.rng.choice(sorted(self.core.requests))
                self.aborted.add(name)
                self.drive.feed(RequestAborted(name))
            else:
                self.drive.step()
        assert self.core.idle

    def _arrive(self, name: str) -> None:
        shared = [1, 2, 3, 1, 2, 3, 4, 4, 5]
        prompt = shared[: self.rng.randrange(10)] + [
            self.rng.randrange(3) for _ in range(self.rng.randrange(1, 40))
        ]
        self.prompts[name] = prompt
        arrive(self.drive, name, prompt, max_tokens=self.rng.randrange(1, 40))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_random_lives_are_exact_leak_nothing_and_replay(seed: int) -> None:
    life = Life(seed)
    life.live(15)
    for name, prompt in life.prompts.items():
        tokens = life.drive.tokens.get(name, [])
        assert tokens == toy_generate(prompt, len(tokens))
        delta = life.drive.finished[name]
        if name not in life.aborted and delta.error is None:
            assert delta.finish_reason == "length"
    assert_no_leak(life.core)
    again = EngineCore(life.core.config)
    for now, (event, works) in enumerate(life.drive.log):
        assert again.handle(event, float(now)) == works
        again.take_outputs()
