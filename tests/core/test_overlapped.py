"""Overlapped placement: whatever the drafter sends and when, the output is the target's own."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.draft_lane import DraftPolicy
from paceline.core.drafting import DrafterNeeds, FixedLength
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.placement import OverlappedPlacement
from paceline.core.scheduler import Limits
from paceline.core.work import (
    AdvanceDrafts,
    DraftNodes,
    NodesDrafted,
    RequestAborted,
    RunTarget,
    WorkLost,
)
from tests.core.streaming import OverlappedDrive
from tests.core.test_engine_core import assert_no_leak
from tests.core.toy import VOCAB, toy_generate


def make_core(
    k: int = 4, lookup: tuple[int, int] | None = None, *, planned: bool = False, **limits: int
) -> EngineCore:
    known = {"context_length": 200, "num_slots": 400, "max_num_seqs": 4, "max_batch_tokens": 64} | limits
    return EngineCore(
        CoreConfig(
            limits=Limits(**known),
            vocab_size=VOCAB,
            drafting=DraftPolicy(
                (DrafterNeeds("toy", ingests_prompts=True),), FixedLength(k), lookup, planned=planned
            ),
            placement=OverlappedPlacement(),
        )
    )


def prompts(count: int) -> dict[str, list[int]]:
    return {f"r{i}": [(i * 5 + at) % VOCAB for at in range(3 + 9 * i)] for i in range(count)}


@pytest.mark.parametrize("k", [0, 1, 3, 8])
@pytest.mark.parametrize("skill", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("planned", [False, True])
def test_the_output_is_the_targets_own(k: int, skill: float, planned: bool) -> None:
    core = make_core(k, planned=planned)
    drive = OverlappedDrive(core, random.Random(k), skill)
    for name, prompt in prompts(6).items():
        drive.arrive(name, prompt, max_tokens=40)
    drive.run()
    for name, prompt in prompts(6).items():
        assert drive.tokens[name] == toy_generate(prompt, 40)
        assert drive.finished[name].finish_reason == "length"
    stats = core.speculation
    assert (stats.num_accepted_tokens > 20) == (k > 0 and skill > 0)
    assert stats.num_failed_drafts == 0
    assert stats.num_hits + stats.num_leaf_hits + stats.num_misses == (stats.num_steps if k else 0)
    assert_no_leak(core)


def test_guesses_that_arrive_while_a_subtree_is_verified_are_not_counted_with_it() -> None:
    core = make_core(4)
    drive = OverlappedDrive(core, random.Random(3), skill=0.7)
    for name, prompt in prompts(4).items():
        drive.arrive(name, prompt, max_tokens=60)
    drive.run()
    sent = sum(len(item.tree_tokens) for work in drive.passes for item in work.items)
    assert core.speculation.num_draft_tokens == sent > 0
    assert core.speculation.num_drafts == sum(
        bool(item.tree_tokens) for work in drive.passes for item in work.items
    )


def test_who_decodes_takes_part_in_every_pass_whatever_befalls_the_others() -> None:
    """Where slots are plenty: a miss or a request without a drafter costs the others nothing."""
    drive = OverlappedDrive(make_core(4), random.Random(5))
    for name, prompt in prompts(4).items():
        drive.arrive(name, prompt, max_tokens=50, num_speculative_tokens=0 if name == "r1" else 4)
    begun: set[str] = set()
    while drive.step():
        works = drive.log[-1][2]
        for work in works:
            if isinstance(work, RunTarget):
                assert begun - set(drive.finished) <= {item.request_id for item in work.items}
        begun = {name for name, tokens in drive.tokens.items() if tokens}
    for name, prompt in prompts(4).items():
        assert drive.tokens[name] == toy_generate(prompt, 50)
    sizes = {item.request_id: 0 for work in drive.passes for item in work.items}
    for work in drive.passes:
        for item in work.items:
            sizes[item.request_id] += len(item.tree_tokens)
    assert sizes["r1"] == 0
    assert min(size for name, size in sizes.items() if name != "r1") > 0


def test_a_hit_is_verified_at_once_with_what_hangs_below_it() -> None:
    """The verdict comes, and the pass that follows in the same breath has the subtree of the bonus token."""
    core = make_core(3)
    drive = OverlappedDrive(core, random.Random(1))
    drive.arrive("r", [1, 2, 3], max_tokens=20)
    text = [1, 2, 3]
    chain = toy_generate(text, 8)
    parents = (-3, *range(7))
    drive.feed(NodesDrafted((DraftNodes("r", 1, 3, 0, tuple(chain), parents, (-0.1,) * 8),)))
    for before, committed in ((0, 1), (1, 5)):
        drive._target_is_done()
        assert drive.tokens["r"] == chain[:committed]
        assert drive.running is not None
        assert drive.running.items[0].tree_tokens == tuple(chain[committed : committed + 3])
        advance = [work for work in drive.log[-1][2] if isinstance(work, AdvanceDrafts)]
        assert [work.items[0].tokens for work in advance] == [tuple(chain[before:committed])]


def test_of_a_drafter_that_says_nothing_little_is_kept() -> None:
    """What is looked up goes into its tree, and from there again."""
    core = make_core(15, (1, 3), num_slots=4000, context_length=3000)
    drive = OverlappedDrive(core, random.Random(1))
    drive.arrive("r", [1, 2, 3], max_tokens=1500)
    largest = 0
    while not core.idle:
        drive._target_is_done()
        if (request := core.requests.get("r")) is not None and request.mirror is not None:
            largest = max(largest, len(request.mirror.tree))
    assert drive.tokens["r"] == toy_generate([1, 2, 3], 1500)
    assert 256 < largest < 256 + 33 * 2 * 15


def test_where_the_drafters_context_ends_the_text_is_still_looked_up() -> None:
    core = EngineCore(
        CoreConfig(
            limits=Limits(context_length=300, num_slots=400, max_num_seqs=4, max_batch_tokens=64),
            vocab_size=VOCAB,
            drafting=DraftPolicy((DrafterNeeds("toy", context_length=8),), FixedLength(4), (1, 3)),
            placement=OverlappedPlacement(),
        )
    )
    drive = OverlappedDrive(core, random.Random(1))
    drive.arrive("r", [1, 2, 3], max_tokens=200)
    drive.run()
    assert drive.tokens["r"] == toy_generate([1, 2, 3], 200)
    works = [work for _, _, works in drive.log for work in works]
    told = [item for work in works if isinstance(work, AdvanceDrafts) for item in work.items]
    assert max(item.start + len(item.tokens) for item in told) < 8
    late = [work.items[0] for work in drive.passes if work.items[0].start > 100]
    assert sum(bool(item.tree_tokens) for item in late) > len(late) // 2


def test_what_is_looked_up_again_while_the_target_waits_is_judged_once() -> None:
    core = make_core(4, (1, 3))
    drive = OverlappedDrive(core, random.Random(1))
    drive.arrive("r", [1, 2, 1, 2, 1], max_tokens=50)
    for _ in range(5):
        drive._target_is_done()
    lookup = core.requests["r"].lookup
    assert lookup is not None
    for _ in range(5):
        core.propose(drive.now)
        assert 0 < len(lookup.open) <= 2


@pytest.mark.parametrize("score", [math.nan, -math.inf, 0.5, -1.7e308])
@pytest.mark.parametrize("planned", [False, True])
def test_a_score_that_is_no_log_probability_costs_only_its_message(score: float, planned: bool) -> None:
    core = make_core(4, planned=planned)
    drive = OverlappedDrive(core, random.Random(1))
    drive.arrive("r", [1, 2, 3], max_tokens=20)
    for first in (0, 2):
        nodes = DraftNodes("r", 1, 3, first, (1, 2), (-3, first), (score, score))
        drive.feed(NodesDrafted((nodes,)))
    assert core.requests["r"].speculation.num_failed_drafts == 2
    mirror = core.requests["r"].mirror
    assert mirror is not None
    assert len(mirror.tree) == 0
    drive.run()
    assert drive.tokens["r"] == toy_generate([1, 2, 3], 20)


class Life:
    """A random life of many requests and of the drafter itself, drawn from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.core = make_core(
            rng.randrange(0, 9),
            rng.choice([None, (1, 3)]),
            planned=rng.random() < 0.5,
            num_slots=rng.randrange(60, rng.choice([90, 300])),
            max_num_seqs=rng.randrange(1, 6),
            max_batch_tokens=rng.randrange(24, 80),
            context_length=rng.randrange(48, 100),
        )
        self.drive = OverlappedDrive(
            self.core, rng, rng.choice([0.2, 0.6, 0.95]), rng.choice([0.0, 0.1]), rng.choice([1, 4, 10])
        )
        self.prompts: dict[str, list[int]] = {}
        self.ended_early: set[str] = set()
        self.preempted = 0

    def live(self, count: int) -> None:
        for _ in range(20_000):
            draw = self.rng.random()
            if count and draw < 0.05:
                count -= 1
                self._arrive(f"r{count}")
            elif draw < 0.06:
                self._interrupt()
            elif not self.drive.step() and not count:
                break
            numbers = [request.num_preemptions for request in self.core.requests.values()]
            self.preempted = max([self.preempted, *numbers])
        assert self.core.idle

    def _interrupt(self) -> None:
        kind = self.rng.choice(["abort", "abort", "drafter", "drafter", "work"])
        if kind == "drafter":
            if self.drive.present:
                self.drive.lose_drafter()
            else:
                self.drive.find_drafter()
        elif kind == "abort" and self.core.requests:
            name = self.rng.choice(sorted(self.core.requests))
            self.ended_early.add(name)
            self.drive.feed(RequestAborted(name))
        elif kind == "work" and self.rng.random() < 0.2:
            self.ended_early |= {request.request_id for request in self.core.scheduler.running}
            self.drive.running = None
            self.drive.feed(WorkLost("interrupted"))

    def _arrive(self, name: str) -> None:
        shared = [1, 2, 3, 1, 2, 3, 4, 4, 5]
        prompt = shared[: self.rng.randrange(10)]
        prompt += [self.rng.randrange(3) for _ in range(self.rng.randrange(1, 40))]
        self.prompts[name] = prompt
        self.drive.arrive(name, prompt, max_tokens=self.rng.randrange(1, 40))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_random_lives_are_exact_leak_nothing_and_replay(seed: int) -> None:
    life = Life(seed)
    life.live(12)
    for name, prompt in life.prompts.items():
        tokens = life.drive.tokens.get(name, [])
        assert tokens == toy_generate(prompt, len(tokens))
        delta = life.drive.finished[name]
        if name not in life.ended_early and delta.error is None:
            assert delta.finish_reason == "length"
    assert_no_leak(life.core)
    again = EngineCore(life.core.config)
    for now, event, works in life.drive.log:
        assert again.handle(event, now) == works
        again.take_outputs()


def test_the_random_lives_meet_what_they_are_for() -> None:
    lives = [Life(seed) for seed in range(40)]
    for life in lives:
        life.live(12)
    stats = [life.core.speculation for life in lives]
    assert sum(each.num_hits for each in stats) > 30
    assert sum(each.num_leaf_hits for each in stats) > 30
    assert sum(each.num_misses for each in stats) > 30
    assert sum(each.num_failed_drafts for each in stats) > 10
    assert sum(life.preempted > 0 for life in lives) > 3
    assert sum(life.drive.num_waits for life in lives) > 10


@pytest.mark.parametrize("seed", range(10))
def test_who_ends_for_want_of_slots_is_not_followed_after_it(seed: int) -> None:
    """The drafter is told of the last tokens, then of the end, and of nothing that it does not know."""
    core = make_core(3, num_slots=30)
    drive = OverlappedDrive(core, random.Random(seed))
    drive.arrive("big", [1, 2, 3], max_tokens=100)
    drive.arrive("small", [4, 5], max_tokens=10)
    drive.run()
    assert "more slots" in (drive.finished["big"].error or "")
    assert drive.tokens["big"] == toy_generate([1, 2, 3], len(drive.tokens["big"]))
    assert drive.tokens["small"] == toy_generate([4, 5], 10)
    assert_no_leak(core)


def test_nodes_of_another_life_are_dropped_without_a_word() -> None:
    """Of a request that ended and whose name is used again, and of a drafter that was lost meanwhile."""
    core = make_core(3)
    drive = OverlappedDrive(core, random.Random(1))

    def sent(generation: int) -> int:
        chain = tuple(toy_generate([1, 2, 3], 3))
        nodes = DraftNodes("r", generation, 3, 0, chain, (-3, 0, 1), (-0.1,) * 3)
        before = core.requests["r"].speculation.num_drafted_nodes
        drive.feed(NodesDrafted((nodes, DraftNodes("stranger", 1, 3, 0, (1,), (-3,), (0.0,)))))
        return core.requests["r"].speculation.num_drafted_nodes - before

    drive.arrive("r", [1, 2, 3], max_tokens=20)
    assert [sent(0), sent(2), sent(1)] == [0, 0, 3]
    drive.feed(RequestAborted("r"))
    drive._target_is_done()
    del drive.finished["r"]
    drive.arrive("r", [1, 2, 3], max_tokens=20)
    assert [sent(1), sent(2)] == [0, 3]
    drive.lose_drafter()
    assert sent(2) == 0
    drive.find_drafter()
    assert [sent(2), sent(3)] == [0, 3]
    assert core.requests["r"].speculation.num_failed_drafts == 0
    assert core.requests["r"].mirror is not None
    assert len(core.requests["r"].mirror.tree) == 3
