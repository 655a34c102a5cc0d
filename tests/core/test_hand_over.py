"""Whether a free target waits for the drafter."""

from __future__ import annotations

import pytest

from paceline.core.draft_lane import DraftPolicy
from paceline.core.drafting import DrafterNeeds, FixedLength
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.hand_over import HandOver
from paceline.core.params import SamplingParams
from paceline.core.placement import OverlappedPlacement
from paceline.core.request import Request
from paceline.core.scheduler import Limits
from paceline.core.token_tree import TokenTree
from paceline.core.work import (
    AdvanceDrafts,
    DraftItem,
    DraftNodes,
    Event,
    NodesDrafted,
    Release,
    RequestArrived,
    RunTarget,
    WaitOver,
    WaitUntil,
)
from tests.core.test_engine_core import oracle
from tests.core.toy import VOCAB, ToyExecutor, toy_generate


def request(name: str = "a", guesses: int = 0) -> Request:
    made = Request(name, [1, 2, 3], 2, SamplingParams(), 0.0)
    made.proposal = TokenTree.chain(list(range(guesses)))
    return made


def hand_over(reply_s: float, tokens_per_s: float) -> HandOver:
    """One whose drafter answers after `reply_s` and whose target writes `tokens_per_s`; a commit at 10.0."""
    made, now = HandOver(), 0.0
    for _ in range(50):
        made.on_follow("a", now)
        made.on_nodes("a", now + reply_s, caught_up=True)
        now += 1.0 / tokens_per_s
        made.on_commit(1, now)
    made.on_follow("a", 10.0)
    return made


def test_it_waits_for_a_fast_drafter_and_not_for_a_slow_one() -> None:
    assert hand_over(0.01, 10.0).at([request()], 10.0) == pytest.approx(10.015)
    assert hand_over(0.2, 10.0).at([request()], 10.0) == 10.0


def test_it_never_waits_with_something_to_verify() -> None:
    assert hand_over(0.01, 10.0).at([request(guesses=1)], 10.0) == 10.0


def test_an_answer_that_is_late_is_not_waited_for_any_longer() -> None:
    made = hand_over(0.01, 10.0)
    assert made.at([request()], 10.016) == 10.016


def test_an_answer_that_came_is_not_waited_for() -> None:
    made = hand_over(0.01, 10.0)
    made.on_nodes("a", 10.005, caught_up=True)
    assert made.at([request()], 10.006) == 10.006


def test_nodes_on_an_older_root_are_no_answer() -> None:
    made = hand_over(0.01, 10.0)
    made.on_nodes("a", 10.005, caught_up=False)
    assert made.at([request()], 10.006) > 10.006


def test_one_request_does_not_make_a_batch_wait() -> None:
    """The whole batch's tokens are weighed against what one request's guesses bring."""
    made = hand_over(0.01, 200.0)
    assert made.at([request(), *(request(f"b{i}", 2) for i in range(15))], 10.0) == 10.0


def test_who_did_not_answer_is_not_waited_for_again_until_the_drafter_is_heard_of_it() -> None:
    made = hand_over(0.01, 10.0)
    due = made.at([request()], 10.0)
    assert made.at([request()], due) == due, "the wait is over"
    assert made.reply_s == pytest.approx(0.9 * 0.01 + 0.1 * 0.015), "it took that long at least"
    made.on_follow("a", 10.1)
    assert made.at([request()], 10.1) == 10.1
    made.on_nodes("a", 10.2, caught_up=False)
    made.on_follow("a", 10.3)
    assert made.at([request()], 10.3) > 10.3


def test_a_wait_that_is_over_for_one_is_over_for_the_other_when_it_was_promised() -> None:
    made = hand_over(0.01, 10.0)
    made.on_follow("b", 10.008)
    both = [request("a"), request("b")]
    assert made.at(both, 10.008) == pytest.approx(10.023)
    due = made.at(both, 10.016)  # in vain for "a", so that answers are known to take longer
    assert due > 10.023
    assert made.at(both, due) == due


def test_an_answer_that_was_late_without_being_waited_for_says_nothing() -> None:
    made = hand_over(0.01, 10.0)
    assert made.at([request()], 10.1) == 10.1
    assert made.reply_s == pytest.approx(0.01)
    made.on_follow("a", 10.2)
    assert made.at([request()], 10.2) > 10.2


def test_all_that_a_step_commits_makes_its_rate_and_idle_time_makes_none() -> None:
    made = HandOver()
    for step in range(50):
        for _ in range(16):
            made.on_commit(2, step / 10)
    assert made.rate == pytest.approx(320.0)
    made.on_idle()
    for step in range(3):
        made.on_commit(32, 1000.0 + step / 10)
    assert made.rate == pytest.approx(320.0)


def test_nothing_is_known_of_requests_that_ended_or_at_the_start() -> None:
    assert HandOver().at([request()], 1.0) == 1.0
    made = hand_over(0.01, 10.0)
    made.forget("a")
    assert made.at([request()], 10.0) == 10.0


# ---------------------------------------------------------------- in the core, by a clock


class Clocked:
    """A target whose passes take 11 ms, and a drafter that answers within 1 ms and is never wrong: with far
    more than a pass verifies, but for "r0", whose guesses end again and again just before the bonus token."""

    def __init__(self, count: int, max_tokens: int = 100) -> None:
        self.core = EngineCore(
            CoreConfig(
                limits=Limits(context_length=200, num_slots=8000, max_num_seqs=16, max_batch_tokens=256),
                vocab_size=VOCAB,
                drafting=DraftPolicy((DrafterNeeds("toy"),), FixedLength(4)),
                placement=OverlappedPlacement(),
            )
        )
        self.target = ToyExecutor(8000, oracle)
        self.now = 0.0
        self.running: RunTarget | None = None
        self.heard: list[DraftItem] = []
        self.known: dict[str, list[int]] = {}
        self.numbers: dict[str, int] = {}
        self.waits: list[int] = []
        """How many tokens "r0" had left."""
        self.without_guesses = 0
        for place in range(count):
            self.arrive(f"r{place}", [place, 2, 3], max_tokens)

    def arrive(self, name: str, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens).resolved()
        self.feed(RequestArrived(name, tuple(prompt), params))

    def feed(self, event: Event) -> None:
        for work in self.core.handle(event, self.now):
            match work:
                case RunTarget():
                    self.running = work
                    self.without_guesses += any(
                        item.request_id == "r0" and item.start > 3 and not item.tree_tokens
                        for item in work.items
                    )
                case WaitUntil():
                    self.waits.append(self.core.requests["r0"].tokens_left(200))
                case AdvanceDrafts():
                    self.heard += work.items
                case Release():
                    self.target.run(work)
        self.core.take_outputs()

    def answer(self) -> None:
        heard, self.heard = self.heard, []
        self.feed(NodesDrafted(tuple(self._nodes(item) for item in heard)))

    def _nodes(self, item: DraftItem) -> DraftNodes:
        name = item.request_id
        if item.announcement is not None:
            self.known[name], self.numbers[name] = [], 0
        self.known[name] += item.tokens
        known, first = self.known[name], self.numbers[name]
        tokens = toy_generate(known, min(4 if name == "r0" else 12, item.max_nodes))
        self.numbers[name] += len(tokens)
        parents = tuple(first + at - 1 if at else -len(known) for at in range(len(tokens)))
        scores = (-0.01,) * len(tokens)
        return DraftNodes(name, item.generation, len(known), first, tuple(tokens), parents, scores)

    def step(self, *, silent: bool = False) -> None:
        self.now += 0.001
        if silent:
            self.heard = []
        else:
            self.answer()
        if self.running is None:  # waits for what did not come
            self.now += 0.001
            self.feed(WaitOver())
        assert self.running is not None
        work, self.running = self.running, None
        self.now += 0.01
        done = self.target.run(work)
        assert done is not None
        self.feed(done)

    def run(self) -> None:
        while not self.core.idle:
            self.step()


def test_one_miss_makes_nobody_wait_in_a_batch_and_alone_it_does() -> None:
    alone, batch = Clocked(1), Clocked(16)
    alone.run()
    batch.run()
    assert alone.waits
    assert batch.without_guesses > 3, "there were misses"
    assert not batch.waits


def test_nobody_waits_for_guesses_that_nothing_is_left_for() -> None:
    for max_tokens in range(20, 30):
        alone = Clocked(1, max_tokens)
        alone.run()
        assert alone.waits
        assert min(alone.waits) > 1


def test_a_pause_between_requests_is_no_slow_step() -> None:
    clocked = Clocked(1)
    clocked.run()
    hand_over = clocked.core.drafts._hand_over
    before = hand_over.rate
    assert before is not None
    clocked.now += 1000.0
    clocked.arrive("r0", [1, 2, 3], 100)
    for _ in range(3):
        clocked.step()
    assert hand_over.rate > 0.95 * before


def test_a_drafter_that_falls_silent_is_waited_for_once() -> None:
    clocked = Clocked(1)
    for _ in range(4):
        clocked.step()
    for _ in range(10):
        clocked.step(silent=True)
    del clocked.waits[:]
    for _ in range(10):
        clocked.step(silent=True)
    assert not clocked.waits
    assert not clocked.core.idle
