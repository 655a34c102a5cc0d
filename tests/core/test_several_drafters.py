"""Several drafters for one target: whatever they do, the output is the target's own."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.draft_lane import DraftPolicy
from paceline.core.drafting import DrafterNeeds, FixedLength
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.scheduler import Limits
from paceline.core.selectors import SELECTORS
from paceline.core.token_tree import TokenTree
from paceline.core.work import DrafterJoined, DraftItem, GrowDrafts, RequestAborted, RunTarget
from tests.core.test_engine_core import HalfRight, adversary, arrive, assert_no_leak, oracle
from tests.core.toy import VOCAB, DraftRule, Drive, Failed, ToyExecutor, toy_generate

RULES: list[DraftRule] = [oracle, adversary, HalfRight(random.Random(1)), HalfRight(random.Random(2))]


def failing_after(rule: DraftRule, answers: int) -> DraftRule:
    left = [answers]

    def guess(known: list[int], item: DraftItem) -> TokenTree:
        left[0] -= 1
        if left[0] < 0:
            raise Failed
        return rule(known, item)

    return guess


def make_drive(
    rules: Sequence[DraftRule],
    k: int = 4,
    *,
    planned: bool = False,
    costs: bool = False,
    selector: str = "combined",
    **limits: int,
) -> Drive:
    known = {"context_length": 200, "num_slots": 400, "max_num_seqs": 4, "max_batch_tokens": 64} | limits
    needs = tuple(DrafterNeeds(f"d{at}", ingests_prompts=at % 2 == 1) for at in range(len(rules)))
    core = EngineCore(
        CoreConfig(
            limits=Limits(**known),
            vocab_size=VOCAB,
            drafting=DraftPolicy(needs, FixedLength(k), planned=planned, selector=selector),
        )
    )
    executor = ToyExecutor(known["num_slots"], rules[0], rules[1:])
    if costs:
        executor.pass_s = 0.02
        executor.seconds = lambda drafter, _, depth: 0.001 + 0.1 * drafter * depth
    return Drive(core, executor)


def finish(drive: Drive, prompts: dict[str, list[int]], count: int) -> None:
    drive.run()
    for name, prompt in prompts.items():
        assert drive.tokens[name] == toy_generate(prompt, count)
    assert_no_leak(drive.core)


def prompts_of(count: int) -> dict[str, list[int]]:
    return {f"r{i}": [(i * 7 + at) % VOCAB for at in range(3 + 11 * i)] for i in range(count)}


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("rules", [RULES[:2], RULES[1:3], RULES, [adversary, adversary, oracle]], ids=len)
def test_output_is_the_targets_own(rules: list[DraftRule], planned: bool) -> None:
    drive, prompts = make_drive(rules, planned=planned, costs=planned), prompts_of(6)
    for name, prompt in prompts.items():
        arrive(drive, name, prompt, max_tokens=60)
    finish(drive, prompts, 60)


@pytest.mark.parametrize("answers", [0, 1, 5, 17])
def test_one_that_fails_costs_only_its_own_guesses(answers: int) -> None:
    drive, prompts = make_drive([failing_after(adversary, answers), oracle], 3), prompts_of(5)
    for name, prompt in prompts.items():
        arrive(drive, name, prompt, max_tokens=41)
    finish(drive, prompts, 41)
    assert drive.core.drafts.lost == "it failed"
    assert drive.core.speculation.acceptance_rate > 0.3, "the other one goes on"
    asked = [work for _, works in drive.log for work in works if isinstance(work, GrowDrafts)]
    assert {work.drafter for work in asked[-5:]} == {1}


def test_one_that_comes_back_is_told_everything_anew() -> None:
    drive, prompts = make_drive([oracle, failing_after(oracle, 3)]), prompts_of(3)
    for name, prompt in prompts.items():
        arrive(drive, name, prompt, max_tokens=60)
    while drive.core.drafts.lost is None:
        drive.step()
    drive.executor.others = [oracle]
    drive.feed(DrafterJoined(1))
    finish(drive, prompts, 60)
    assert drive.core.drafts.lost is None
    assert any(isinstance(work, GrowDrafts) and work.drafter == 1 for work in drive.log[-6][1])


def test_equal_guesses_are_verified_once() -> None:
    drive = make_drive([oracle, oracle, oracle], 3)
    arrive(drive, "r", [1, 2, 3], max_tokens=41)
    finish(drive, {"r": [1, 2, 3]}, 41)
    stats = drive.core.speculation
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (10, 30, 30)
    passes = [work for _, works in drive.log for work in works if isinstance(work, RunTarget)]
    assert all(parent == at - 1 for work in passes for at, parent in enumerate(work.items[0].tree_parents))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 4), st.booleans(), st.sampled_from(sorted(SELECTORS)))
def test_any_life_of_requests_and_drafters(seed: int, count: int, planned: bool, selector: str) -> None:
    """Arrivals, aborts, preemption for want of slots, drafters that fail and come back."""
    rng = random.Random(seed)
    rules = [rng.choice(RULES) for _ in range(count)]
    num_slots, k = rng.choice([90, 400]), rng.randrange(6)
    drive = make_drive(rules, k, planned=planned, costs=planned, selector=selector, num_slots=num_slots)
    prompts: dict[str, list[int]] = {}
    aborted: set[str] = set()
    for at in range(10):
        prompts[f"r{at}"] = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))]
        arrive(drive, f"r{at}", prompts[f"r{at}"], max_tokens=30)
        for _ in range(rng.randrange(12)):
            drive.step()
        move, drafter = rng.random(), rng.randrange(count)
        if move < 0.2 and f"r{at}" not in drive.finished:
            aborted.add(f"r{at}")
            drive.feed(RequestAborted(f"r{at}"))
        elif move < 0.4 and drafter not in drive.executor.lost:
            drive.pending = type(drive.pending)(
                work for work in drive.pending if getattr(work, "drafter", None) != drafter
            )
            drive.feed(drive.executor.lose(drafter))
        elif move < 0.6 and drafter in drive.executor.lost:
            drive.executor.lost.discard(drafter)
            drive.feed(DrafterJoined(drafter))
    drive.run()
    for name, prompt in prompts.items():
        expected = toy_generate(prompt, 30)
        assert drive.tokens.get(name, []) == expected[: len(drive.tokens.get(name, []))]
        assert name in aborted or len(drive.tokens[name]) == 30
    assert_no_leak(drive.core)
    again = EngineCore(drive.core.config)
    for now, (event, work) in zip(drive.times, drive.log, strict=True):
        assert again.handle(event, now) == work


def test_one_drafter_alone_is_verified_as_it_is_and_weighed_now_and_then() -> None:
    drive = make_drive([oracle], k=4, costs=True)
    arrive(drive, "r", [1, 2, 3], max_tokens=180)
    finish(drive, {"r": [1, 2, 3]}, 180)
    (report,) = drive.core.drafts.report()
    steps = drive.core.speculation.num_drafts
    judged = sum(count for count, _, _ in report.reliability)
    assert report.num_questions == steps > 32
    assert 0 < judged <= 5 * (steps // 16)
    assert drive.core.speculation.num_draft_tokens > 4 * (steps - 2), "all that it says"
