"""A drafter is asked when it pays for itself, and no longer when it does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import exp

import pytest

from paceline.core.combined import Rest
from paceline.core.draft_cost import DraftCost, Pace
from paceline.core.ensemble import Ensemble, Merged
from paceline.core.recent import AS_USUAL
from paceline.core.survival import Survival
from paceline.core.token_tree import TokenTree
from paceline.core.work import DraftItem, GrowDrafts, RunTarget
from tests.core.test_engine_core import adversary, arrive, oracle
from tests.core.test_several_drafters import finish, make_drive
from tests.core.toy import VOCAB, DraftRule, Drive, toy_generate, toy_next

# ---------------------------------------------------------------- in the core


def right_in(share: Callable[[], float], seed: int) -> DraftRule:
    """Chains of which each guess is right with that probability, given the one before."""
    rng = random.Random(seed)

    def guess(known: list[int], item: DraftItem) -> TokenTree:
        tokens = list(known)
        for _ in range(item.max_depth):
            tokens.append((toy_next(tokens) + (rng.random() >= share())) % VOCAB)
        return TokenTree.chain(tokens[len(known) :])

    return guess


def costly(rules: Sequence[DraftRule], *prices: float, k: int = 8, requests: int = 1) -> Drive:
    """prices: of each drafter per guess in a row, where a pass takes 1 and 0.02 per token."""
    drive = make_drive(rules, k, planned=True, context_length=20_000, num_slots=60_000, max_num_seqs=16)
    drive.executor.pass_s = 0.02
    drive.executor.seconds = lambda drafter, _, depth: prices[drafter] * depth
    for at in range(requests):
        arrive(drive, f"r{at}", [at + 1, 2, 3], max_tokens=1500)
    return drive


def asked(drive: Drive, drafter: int, start: int = 0) -> float:
    """Share of the passes since the entry `start` of the log before which it was asked."""
    work = [each for _, works in drive.log[start:] for each in works]
    questions = sum(isinstance(each, GrowDrafts) and each.drafter == drafter for each in work)
    return questions / sum(isinstance(each, RunTarget) for each in work)


def prompts(requests: int) -> dict[str, list[int]]:
    return {f"r{at}": [at + 1, 2, 3] for at in range(requests)}


@pytest.mark.parametrize("requests", [1, 6])
def test_a_useless_dear_drafter_is_soon_not_asked(requests: int) -> None:
    drive = costly([oracle, adversary], 0.0001, 0.3, requests=requests)
    finish(drive, prompts(requests), 1500)
    assert asked(drive, 0) > 0.9
    assert asked(drive, 1, len(drive.log) // 3) < 0.03
    alone = costly([adversary], 0.3, requests=requests)
    finish(alone, prompts(requests), 1500)
    late = asked(alone, 0, len(alone.log) // 3)
    assert 0.0 < late < 0.03, "it is looked at again, rarely"


def test_a_drafter_that_becomes_good_is_asked_again() -> None:
    share = [0.02]
    drive = costly([right_in(lambda: share[0], 1)], 0.1)
    while len(drive.tokens.get("r0", [])) < 700:
        drive.step()
    before = len(drive.log)
    assert asked(drive, 0, before // 2) < 0.1
    share[0] = 0.95
    finish(drive, prompts(1), 1500)
    assert asked(drive, 0, before + (len(drive.log) - before) // 2) > 0.8


def test_a_good_one_is_used_as_far_as_it_pays() -> None:
    """What is dear per guess is asked for short chains, what is not for long ones."""
    sizes = {}
    for price in (0.01, 0.12, 0.3):
        drive = costly([right_in(lambda: 0.8, 2)], price)
        finish(drive, prompts(1), 1500)
        work = [each for _, works in drive.log[len(drive.log) // 2 :] for each in works]
        lengths = [each.items[0].max_depth for each in work if isinstance(each, GrowDrafts)]
        sizes[price] = sum(lengths) / len(lengths)
    assert sizes[0.01] > sizes[0.12] > sizes[0.3]


def test_a_dear_drafter_is_asked_where_the_cheap_one_has_nothing() -> None:
    """The cheap one knows one half of the requests, the dear one all."""

    def half(known: list[int], item: DraftItem) -> TokenTree:
        return oracle(known, item) if known[0] % 2 else TokenTree()

    drive = costly([half, oracle], 0.0001, 0.15, requests=6)
    finish(drive, prompts(6), 1500)
    late = [each for _, works in drive.log[len(drive.log) // 2 :] for each in works]
    dear = [
        item for each in late if isinstance(each, GrowDrafts) and each.drafter == 1 for item in each.items
    ]
    assert dear
    named = [int(item.request_id[1:]) % 2 for item in dear]  # the first token of r0 is 1
    assert sum(named) / len(named) > 0.9


@pytest.mark.parametrize("selector", ["reactive", "bandit", "classifier", "everyone"])
def test_other_selectors_are_exact_too_and_use_a_good_drafter(selector: str) -> None:
    drive = make_drive([oracle, adversary, oracle], planned=True, costs=True, selector=selector)
    arrive(drive, "r", [1, 2, 3], max_tokens=190)
    finish(drive, {"r": [1, 2, 3]}, 190)
    assert (drive.core.speculation.tokens_per_step or 0.0) > 1.5


def test_a_wish_of_the_request_is_kept() -> None:
    drive = costly([adversary, oracle], 0.3, 0.3)
    arrive(drive, "own", [4, 4], max_tokens=60, num_speculative_tokens=3)
    drive.run()
    assert drive.tokens["own"] == toy_generate([4, 4], 60)
    work = [each for _, works in drive.log for each in works if isinstance(each, GrowDrafts)]
    own = [item.max_nodes for each in work for item in each.items if item.request_id == "own"]
    assert set(own[:-4]) == {3}


# ---------------------------------------------------------------- what it knows


def test_what_a_question_takes_is_taken_apart() -> None:
    rng, cost = random.Random(1), DraftCost()
    assert not cost.known
    for _ in range(400):
        requests, levels = rng.randint(1, 16), rng.randint(1, 8)
        guesses, unread = requests * levels, rng.randint(1, 40)
        seconds = 2.0 + 0.5 * levels + 0.1 * requests + 0.05 * guesses + 0.01 * unread
        cost.learn(requests, levels, guesses, unread, seconds * rng.uniform(0.95, 1.05))
    assert cost.of(4, 4, 16, 10) == pytest.approx(2.0 + 2.0 + 0.4 + 0.8 + 0.1, rel=0.05)
    assert cost.of(1, 1, 1, 1) == pytest.approx(2.0 + 0.5 + 0.1 + 0.05 + 0.01, rel=0.15)
    for _ in range(5):
        cost.learn(4, 4, 16, 10, 5000.0)
    assert cost.of(4, 4, 16, 10) < 20.0, "a disturbed question says little"


def test_a_first_question_that_took_long_is_soon_forgotten() -> None:
    cost = DraftCost()
    cost.learn(1, 4, 4, 500, 30.0)
    for _ in range(4):
        cost.learn(1, 4, 4, 3, 1.0)
    assert cost.of(1, 4, 4, 3) < 1.5


def test_survival_counts_what_others_do_not_cover() -> None:
    """The second drafter is right in 70 % of all cases where the first says nothing, and in none of those
    where the first is wrong."""
    rng, survival = random.Random(4), Survival()
    ensemble = Ensemble(2)
    for _ in range(1500):
        first = rng.random() < 0.5
        merged, right = Merged(), rng.random() < 0.7
        if first:
            ensemble.take(merged, "r", 0, ([1 if right else 3], [-1], [-0.5]), -float("inf"))
        ensemble.take(merged, "r", 1, ([1 if right else 2], [-1], [-0.5]), -float("inf"))
        survival.learn(merged, 1, 1, [1], AS_USUAL)
    alone = survival.gains([], 3, 0.01, AS_USUAL)
    assert alone[0] == pytest.approx(0.7, abs=0.06)
    beside = survival.gains([0.7], 1, 0.0, AS_USUAL)
    assert beside[0] < 0.02, "where the first is right it adds nothing, where that is wrong neither"


def test_a_token_is_worth_more_where_steps_bring_few() -> None:
    pace, now = Pace(), 0.0
    for _ in range(60):
        now += 1.25
        pace.on_step(1.0, 1.0, now)
        pace.on_tokens("slow", 1)
        pace.on_tokens("fast", 4)
    assert pace.worth("slow", 2, 1.0) == pytest.approx(1.25 / 2, rel=0.05)
    assert pace.worth("fast", 2, 1.0) == pytest.approx(1.25 / 8, rel=0.05)
    pace.on_other(now + 100.0)
    pace.on_step(1.0, 1.0, now + 101.25)
    assert pace.worth("slow", 2, 1.0) == pytest.approx(1.25 / 2, rel=0.05), "what was between does not count"


def test_no_token_is_worth_more_than_it_takes_without_guesses() -> None:
    """Steps made long by guesses in vain are no reason for more of them."""
    pace, now = Pace(), 0.0
    for _ in range(60):
        now += 8.2
        pace.on_answer(1.0)
        pace.on_step(1.0, 7.0, now)
        pace.on_tokens("r", 1)
    assert pace.worth("r", 4, 1.0) == pytest.approx(1.2 / 4, rel=0.05)


def test_what_guessing_takes_is_the_drafters_time_and_what_the_policy_adds_to_a_step() -> None:
    pace, now = Pace(), 0.0
    for step in range(40):
        guessing = step % 2 == 1
        now += 1.1 + (0.5 if guessing else 0.0)
        if guessing:
            pace.on_answer(0.3)
        pace.on_step(1.0, 1.0, now)
        pace.on_tokens("r", 1)
        if step > 20:
            assert pace.drafting_s == pytest.approx(0.5 if guessing else 0.0, abs=0.02)


def test_drafters_rest_longer_and_longer_while_guessing_does_not_pay_and_not_once_it_does() -> None:
    rest = Rest()
    asked = [not rest.on_step(0.0, 1.0, 10.0) for _ in range(120)]
    assert asked[:3] == [True] * 3
    assert sum(asked[60:]) < 20, "rarely, in the end"
    rests = "".join("x" if one else "." for one in asked).replace("x", " ").split()
    assert [len(one) for one in rests][:3] == [4, 8, 16]
    while rest.on_step(2.0, 1.0, 10.0):
        pass  # the rest of the last rest
    assert not any(rest.on_step(2.0, 1.0, 10.0) for _ in range(20)), "it pays"
    assert all(not rest.on_step(0.0, 0.1, 10.0) for _ in range(20)), "what takes so little is no loss"


def test_one_request_that_goes_wrong_is_believed_less_than_the_others() -> None:
    ensemble = Ensemble(1)
    for step in range(200):
        for name in ("good", "bad"):
            merged = Merged()
            ensemble.take(merged, name, 0, ([1], [-1], [-0.2]), -float("inf"))
            ensemble.judge(merged, name, [1 if name == "good" or step < 100 else 2])
    chances = {}
    for name in ("good", "bad"):
        merged = Merged()
        ensemble.take(merged, name, 0, ([1], [-1], [-0.2]), -float("inf"))
        chances[name] = exp(merged.tree.values[0])
    assert chances["good"] > 0.9
    assert chances["bad"] < 0.5
