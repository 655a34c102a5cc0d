"""Target and drafter at the same time: the output is plain decoding's, whatever the drafter does."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

from paceline.core.params import SamplingParams
from paceline.core.work import (
    AdvanceDrafts,
    Announcement,
    DraftDone,
    DrafterLost,
    DraftNodes,
    GrowDrafts,
    NodesDrafted,
    Release,
    RequestAborted,
    RunTarget,
    StepDone,
    TargetItem,
    WaitOver,
    WaitUntil,
    WorkLost,
)
from paceline.engine import draft_group, draft_worker
from paceline.engine.disaggregated import DisaggregatedExecutor
from paceline.engine.draft_messages import Beat
from tests.core.toy import toy_generate
from tests.engine import draft_toys as toys
from tests.engine.draft_drive import ThreadHost, driving, prompts
from tests.engine.draft_toys import ToyTarget

MODES = ["off", "silent", "stream"]


# ---------------------------------------------------------------- the same output


@pytest.mark.parametrize("ahead", MODES)
@pytest.mark.parametrize("factory", [toys.mostly_right, toys.ahead, toys.slow_ahead])
def test_the_output_is_plain_decodings(ahead: str, factory: Any) -> None:
    with driving(ThreadHost(factory), ahead, pause_s=0.002) as drive:
        drive.check(prompts(4), 60)
        drive.check(prompts(2, length=100), 60)
        # A drafter that is slower than the target may never be ahead of it.
        assert drive.num_accepted > 0 or (factory, ahead) == (toys.slow_ahead, "stream")
        assert drive.core.speculation.num_failed_drafts == 0
        assert drive.group.stats.losses == 0


@pytest.mark.parametrize("ahead", MODES)
@pytest.mark.parametrize(
    "factory",
    [
        toys.junk_ids,
        toys.junk_parents,
        toys.nan_scores,
        toys.stale_generations,
        toys.strangers,
        toys.uneven_lists,
        toys.too_many_nodes,
        toys.unprintable,
        toys.raising,
        toys.flooding,
    ],
    ids=lambda factory: factory.__name__,
)
def test_no_drafter_can_change_the_output(factory: Any, ahead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_group, "_MOST_WAITING", 200)
    with driving(ThreadHost(factory), ahead, pause_s=0.001) as drive:
        drive.check(prompts(3), 40)
        drive.check(prompts(3), 40)


@pytest.mark.parametrize("ahead", ["off", "silent"])
@pytest.mark.parametrize(
    ("worker", "reason"),
    [
        (toys.WrongRounds, r"answers round \d+, which it was not asked for"),
        (toys.NeverAnswers, "does not answer what it is asked"),
    ],
)
def test_a_live_worker_that_fails_its_rounds_is_lost(
    worker: Any, reason: str, ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_worker, "BEAT_S", 0.02)
    with driving(ThreadHost(toys.ahead, worker=worker), ahead) as drive:
        drive.check(prompts(2), 12)
        assert re.fullmatch(reason, drive.seen(DrafterLost)[0].reason)
        drive.check(prompts(2), 12)


def test_a_round_that_was_given_up_may_still_be_answered() -> None:
    """The answer comes after the next round was asked for, and costs nobody his place."""
    with driving(ThreadHost(toys.ahead), "off") as drive:
        for number in (1, 2):
            drive.executor.submit(GrowDrafts(number, ()))
            drive.executor.forget_queued()
        drive.executor.submit(GrowDrafts(3, ()))
        rounds = [drive.executor.poll() for _ in range(3)]
        assert [done.round for done in rounds if isinstance(done, DraftDone)] == [1, 2, 3]
        assert drive.group.stats.losses == 0


def test_a_worker_may_promise_silence_for_so_long_only() -> None:
    with driving(ThreadHost(toys.ahead)) as drive:
        attachment = drive.group._current
        assert attachment is not None
        attachment.take(Beat(1e9, 0, 0.0, 0.0))
        assert attachment.allow_s == 120


def test_a_flood_costs_the_flooder_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only as much waits as the limit allows, and the engine goes on."""
    monkeypatch.setattr(draft_group, "_MOST_WAITING", 100)
    with driving(ThreadHost(toys.flooding), "stream", pause_s=0.05) as drive:
        for name, prompt in prompts(1).items():
            drive.add(name, prompt, 10)
        end = time.perf_counter() + 10
        while drive.group.stats.losses == 0:
            assert time.perf_counter() < end
            time.sleep(0.01)
        drive.run()
        assert drive.tokens["r0"] == toy_generate(prompts(1)["r0"], 10)
    assert [r for r in caplog.records if "floods the engine" in r.getMessage()]


def test_requests_come_and_go_while_the_drafter_works() -> None:
    with driving(ThreadHost(toys.slow_ahead), "stream", pause_s=0.001) as drive:
        texts = prompts(8)
        names = iter(texts)
        added: list[str] = []

        def each(num_tokens: int) -> None:
            if num_tokens > 25 * len(added) and (name := next(names, None)):
                added.append(name)
                drive.add(name, texts[name], 60)
            if num_tokens > 100:
                drive.feed(RequestAborted(added[0]))

        each(1)
        drive.run(each)
        assert len(added) == len(texts)
        assert drive.ended.pop(added[0]) == "abort"
        for name in added[1:]:
            assert drive.tokens[name] == toy_generate(texts[name], 60)


def test_a_step_that_failed_ends_its_requests_and_the_next_are_served() -> None:
    with driving(ThreadHost(toys.ahead), "stream") as drive:
        drive.check(prompts(2), 30)
        real, calls = drive.target.run, []

        def failing(work: RunTarget) -> StepDone:
            calls.append(work)
            if len(calls) == 3:
                raise MemoryError("no memory for this pass")
            return real(work)

        drive.target.run = failing  # type: ignore[method-assign]
        drive.add("doomed", [1, 2, 3], 40)
        with pytest.raises(MemoryError, match="this pass"):
            drive.run()
        drive.executor.forget_queued()
        drive.feed(WorkLost("a step failed"))
        assert drive.ended.pop("doomed") == "error"
        drive.check(prompts(3), 40)


# ---------------------------------------------------------------- the executor by itself


class Recorder:
    """A target that says when it was called and answers with nothing."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def run(self, work: RunTarget) -> StepDone:
        self.entered.set()
        assert self.gate.wait(10)
        self.calls.append(work.step)
        if work.step < 0:
            raise ValueError(f"step {work.step}")
        return StepDone(work.step, ())

    def release(self, request_ids: Any) -> None:
        self.calls.append(tuple(request_ids))

    def close(self) -> None:
        """Nothing is held."""


@contextmanager
def recording() -> Iterator[tuple[Recorder, DisaggregatedExecutor]]:
    target = Recorder()
    with closing(DisaggregatedExecutor(target, None, SimpleQueue())) as executor:
        yield target, executor
        target.gate.set()


def test_submitting_never_waits_and_answers_come_in_order() -> None:
    with recording() as (target, executor):
        assert executor.idle
        target.gate.clear()
        started = time.perf_counter()
        for step in (1, 2):
            executor.submit(RunTarget(step, ()))
        executor.submit(Release(("a",)))
        assert time.perf_counter() - started < 0.5
        assert not executor.idle
        time.sleep(0.02)
        assert executor._events.empty(), "the target is not done"
        target.gate.set()
        found = [executor.poll(), executor.poll()]
        assert [done.step for done in found if isinstance(done, StepDone)] == [1, 2]
        assert all(done.seconds > 0 for done in found if isinstance(done, StepDone))
        assert executor.poll() is None, "nothing is promised any more"
        assert executor.idle
    assert target.calls == [1, 2, ("a",)]


def test_what_the_target_raised_is_raised_once() -> None:
    with recording() as (_, executor):
        executor.submit(RunTarget(-1, ()))
        with pytest.raises(ValueError, match="step -1"):
            executor.poll()
        assert executor.idle
        executor.submit(RunTarget(1, ()))
        assert isinstance(executor.poll(), StepDone)


@pytest.mark.parametrize("step", [3, -3])
def test_what_was_given_up_answers_no_more(step: int) -> None:
    """Neither its answer nor its error reaches the requests that came after."""
    with recording() as (target, executor):
        target.gate.clear()
        for work in (RunTarget(step, ()), RunTarget(4, ()), Release(("a",)), WaitUntil(0.0)):
            executor.submit(work)
        assert target.entered.wait(5)
        executor.forget_queued()
        assert executor.idle
        executor.submit(RunTarget(5, ()))
        target.gate.set()
        answer = executor.poll()
        assert isinstance(answer, StepDone)
        assert answer.step == 5
    assert target.calls == [step, ("a",), 5]


def test_a_timer_rings_at_its_time_and_a_later_one_replaces_it() -> None:
    with recording() as (_, executor):
        now = time.perf_counter()
        executor.submit(WaitUntil(now + 60))
        assert not executor.idle
        executor.submit(WaitUntil(now + 0.05))
        assert executor.poll() == WaitOver()
        assert time.perf_counter() >= now + 0.05
        assert executor.idle
        executor.submit(WaitUntil(now))
        assert executor.poll() == WaitOver(), "a time that is past has come"
        assert executor.poll() is None


def test_an_answer_comes_before_a_timer_that_waits_longer() -> None:
    with recording() as (_, executor):
        executor.submit(WaitUntil(time.perf_counter() + 0.1))
        executor.submit(RunTarget(1, ()))
        assert isinstance(executor.poll(), StepDone)
        assert executor.poll() == WaitOver()


def test_what_is_changed_of_the_process_is_put_back_by_the_last() -> None:
    """Whatever the order in which engines come and go."""

    def state() -> tuple[float, tuple[int, int, int], int]:
        return sys.getswitchinterval(), gc.get_threshold(), gc.get_freeze_count()

    before = state()
    first, second = (DisaggregatedExecutor(Recorder(), None, SimpleQueue()) for _ in range(2))
    within = state()
    assert within[0] <= 0.001
    assert within[1][0] >= 50_000
    assert within[2] > 0
    first.close()
    first.close()
    assert state() == within
    second.close()
    assert state() == before


def test_a_target_that_cannot_be_closed_keeps_nothing_else_open() -> None:
    before = gc.get_threshold()
    with driving(ThreadHost(toys.ahead)) as drive:

        def failing() -> None:
            raise OSError("no")

        drive.target.close = failing  # type: ignore[method-assign]
        with pytest.raises(OSError, match="no"):
            drive.executor.close()
        assert gc.get_threshold() == before
        assert not drive.group._thread.is_alive()


def test_a_round_that_reaches_no_drafter_is_answered_with_nothing() -> None:
    """The core waits for it: it may not have heard yet that the drafter is gone."""
    with recording() as (_, executor):
        executor.submit(AdvanceDrafts(()))
        assert executor.idle
        executor.submit(GrowDrafts(7, ()))
        assert not executor.idle
        assert executor.poll() == DraftDone(7, ())
        assert executor.idle
        assert executor.poll() is None


def test_a_busy_target_does_not_keep_drafts_from_coming() -> None:
    """Both at the same time: nodes arrive while a pass runs."""
    with driving(ThreadHost(toys.ahead), "stream", pause_s=0.3) as drive:
        drive.add("a", [1, 2, 3], 20)
        found: list[Any] = []
        while not isinstance(event := drive.executor.poll(), StepDone):
            found.append(event)
        drive.feed(event)
        assert len(found) >= 8
        assert {type(event) for event in found} == {NodesDrafted}
        nodes = [grown for event in found for grown in event.grown]
        assert all(isinstance(grown, DraftNodes) for grown in nodes)
        drive.run()


def test_the_answer_to_a_round_says_what_it_cost() -> None:
    with driving(ThreadHost(toys.ahead), "off") as drive:
        drive.check(prompts(2), 20)
        done = drive.seen(DraftDone)
        assert done
        assert all(event.seconds > 0 for event in done)
        assert drive.group.stats.idle_share is None or 0 <= drive.group.stats.idle_share <= 1


def test_closing_waits_for_the_pass_under_way() -> None:
    target = ToyTarget(pause_s=0.2)
    executor = DisaggregatedExecutor(target, None, SimpleQueue())
    told = Announcement(2, SamplingParams())
    executor.submit(RunTarget(1, (TargetItem("a", 0, 0, (1, 2), 0, (5, 6), True, announcement=told),)))
    time.sleep(0.05)
    executor.close()
    executor.close()
    assert target.toy.steps == 1
    assert not [thread for thread in threading.enumerate() if thread.name == "paceline-target"]
