"""When each lane ran: gaps and idle shares of given passes, and traces of engines that overlap or do not."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, ConfigError, EngineError, SamplingParams
from paceline.core.work import Proposal
from paceline.engine.timeline import Timeline
from tests.cases.drafters import RuleDrafter, constant
from tests.engine.draft_drive import worker_pid
from tests.tiny import DRAFTED, ENGINE, write_random

PROMPT = [5, 6, 7, 8, 9, 10]
FOUR: dict[str, Any] = {**DRAFTED, "num_speculative_tokens": 4}
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)

# ---------------------------------------------------------------- given passes


def test_a_gap_is_what_lies_between_two_passes_of_running_requests() -> None:
    timeline = Timeline()
    assert timeline.gaps is None
    timeline.target_pass(1.0, 2.0, 8, goes_on=True)
    timeline.target_pass(2.5, 3.0, 8, goes_on=True)
    timeline.target_pass(4.0, 5.0, 8, goes_on=False)
    timeline.target_pass(90.0, 91.0, 8, goes_on=True)  # of the next request: nobody waited before
    timeline.target_pass(91.25, 92.0, 8, goes_on=True)
    timeline.pause()  # it was aborted between two passes
    timeline.target_pass(200.0, 201.0, 8, goes_on=True)
    gaps = timeline.gaps
    assert gaps is not None
    assert (gaps.median_s, gaps.p99_s, gaps.count) == (0.5, 1.0, 3)
    assert timeline.target.busy_s == 5.25


def test_the_idle_share_counts_only_time_with_requests() -> None:
    timeline = Timeline()
    timeline.draft_pass(0.0, 0.5, 4)  # before the first pass: not counted
    timeline.draft_pass(0.75, 1.5, 4)  # half a second of it beside the pass that is told of next
    timeline.target_pass(1.0, 3.0, 8, goes_on=True)
    timeline.draft_pass(3.0, 3.5, 4)
    timeline.target_pass(4.0, 5.0, 8, goes_on=False)
    assert timeline.draft_idle_share == pytest.approx(1 - 1.0 / 4)
    timeline.draft_pass(4.5, 50.0, 4)  # went on until long after the last request
    assert timeline.draft_idle_share == pytest.approx(1 - 1.5 / 4)
    timeline.target_pass(100.0, 104.0, 8, goes_on=True)  # an hour without requests is nobody's idleness
    assert timeline.draft_idle_share == pytest.approx(1 - 1.5 / 8)


def test_no_idle_share_without_a_drafter() -> None:
    timeline = Timeline()
    timeline.target_pass(1.0, 2.0, 8, goes_on=True)
    assert timeline.draft_idle_share is None


def test_late_news_do_not_make_a_drafter_do_two_things_at_once() -> None:
    timeline = Timeline()
    for start, end in ((0.0, 1.0), (1.5, 2.5), (1.75, 2.75), (2.5, 3.25)):
        timeline.draft_pass(start, end, 4)
    spans = [(span.start, span.end) for span in timeline.draft.spans]
    assert spans == [(-0.5, 0.5), (0.5, 1.5), (1.5, 2.5), (2.5, 3.25)]


# ---------------------------------------------------------------- traces of engines


Span = dict[str, Any]


def read(path: Path) -> tuple[list[Span], list[Span], list[Span]]:
    """Target passes, draft passes and instants."""
    events = json.loads(path.read_bytes())["traceEvents"]
    named = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    lanes = {
        name: [event for event in events if event["ph"] == "X" and named[event["tid"]] == name]
        for name in ("target", "draft")
    }
    return lanes["target"], lanes["draft"], [event for event in events if event["ph"] == "i"]


def overlaps(target: Sequence[Span], draft: Sequence[Span]) -> int:
    return sum(
        one["ts"] < other["ts"] + other["dur"] and other["ts"] < one["ts"] + one["dur"]
        for one in target
        for other in draft
    )


def ids(spans: Sequence[Span], name: str = "r0") -> list[int]:
    return [token for span in spans if name in span["args"] for token in span["args"][name]["ids"]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft model that is often right."""
    folder = tmp_path_factory.mktemp("timeline")
    return write_random(folder / "target"), write_random(folder / "draft", head_noise=0.1)


def slow_down(llm: LLM, pause_s: float) -> None:
    """A pass takes as long as with a model of some size, so that a drafter can be of use."""
    target: Any = llm.engine._executor._target  # type: ignore[attr-defined]
    real = target.run

    def run(work: Any) -> Any:
        time.sleep(pause_s)
        return real(work)

    target.run = run


@pytest.fixture(scope="module")
def apart(models: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM(models[0], draft=models[1], mode="overlapped", **FOUR) as llm:
        slow_down(llm, 0.004)
        yield llm


def test_the_lanes_of_an_overlapped_run_overlap(apart: LLM, tmp_path: Path) -> None:
    apart.engine.timeline.keep_tokens = True
    (output,) = apart.generate([PROMPT], GREEDY)
    path = tmp_path / "trace.json"
    apart.engine.timeline.write_trace(path, apart.tokenizer.decode)
    target, draft, instants = read(path)
    assert overlaps(target, draft) > len(draft) // 2
    assert ids(target, output.request_id) == output.token_ids
    # Guesses looked up in the text are guesses too, and take no pass.
    assert 0 < len(ids(draft, output.request_id)) <= output.speculation.num_drafted_nodes
    assert sum(span["args"].get("guesses", 0) for span in target) == output.speculation.num_draft_tokens
    assert all(span["args"]["tokens"] > 0 for span in [*target, *draft])
    written = target[-1]["args"][output.request_id]
    assert written["text"] == [apart.tokenizer.decode([token]) for token in written["ids"]]
    name = output.request_id
    assert [event["name"] for event in instants] == [f"{name} arrives", f"{name} ends"]
    assert instants[0]["ts"] <= target[0]["ts"]
    assert instants[1]["ts"] >= target[-1]["ts"] + target[-1]["dur"]
    assert min(event["ts"] for event in [*target, *draft, *instants]) == 0


def test_what_an_engine_says_of_its_lanes(apart: LLM) -> None:
    before = apart.speculation
    (output,) = apart.generate([PROMPT], GREEDY)
    total, lanes = apart.speculation, apart.lanes
    for name in ("num_hits", "num_leaf_hits", "num_misses", "num_drafted_nodes", "num_draft_tokens"):
        assert getattr(total, name) - getattr(before, name) == getattr(output.speculation, name), name
    assert total.num_hits + total.num_leaf_hits + total.num_misses == total.num_steps
    assert (lanes.mode, lanes.placement) == ("overlapped", "disaggregated")
    assert lanes.target_passes >= total.num_steps > 0
    assert lanes.target_busy_s > 0.004 * lanes.target_passes
    assert lanes.draft_passes > 0
    assert lanes.draft_busy_s > 0
    assert lanes.draft_idle_share is not None
    assert 0 < lanes.draft_idle_share < 1
    assert lanes.target_gap_median_s is not None
    assert lanes.target_gap_p99_s is not None
    assert 0 < lanes.target_gap_median_s <= lanes.target_gap_p99_s
    assert (lanes.drafter_losses, lanes.drafter_joins, lanes.drafter_away) == (0, 0, False)
    assert lanes.drafter_loss_reason is None


def test_counters_move_while_a_request_runs(apart: LLM) -> None:
    before = apart.speculation.num_steps
    stream = apart.stream(PROMPT, GREEDY)
    for _ in range(3):
        next(stream)
    assert before < apart.speculation.num_steps
    stream.close()


def test_a_lost_drafter_shows_until_it_is_back_and_then_as_a_loss(apart: LLM) -> None:
    group: Any = apart.engine._executor._group  # type: ignore[attr-defined]
    os.kill(worker_pid(group._host), signal.SIGKILL)
    _until(lambda: apart.lanes.drafter_losses == 1)
    reason = apart.lanes.drafter_loss_reason
    assert reason is not None
    assert "signal 9" in reason
    _until(lambda: apart.lanes.drafter_joins == 1)
    apart.generate([PROMPT], GREEDY)
    assert (apart.lanes.drafter_away, apart.lanes.drafter_losses) == (False, 1)
    names = [moment.name for moment in apart.engine.timeline.moments]
    assert names.count("drafter lost") == names.count("drafter back") == 1


def _until(condition: Any) -> None:
    end = time.perf_counter() + 30
    while not condition():
        assert time.perf_counter() < end
        time.sleep(0.01)


def test_the_lanes_of_a_serial_run_never_overlap(models: tuple[Path, Path], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with LLM(models[0], draft=models[1], trace=path, **FOUR) as llm:
        llm.generate([PROMPT, PROMPT[:3]], GREEDY)
        lanes = llm.lanes
        assert not path.exists()
    target, draft, _ = read(path)
    assert len(target) > 5
    assert len(draft) > 5
    assert overlaps(target, draft) == 0
    assert (lanes.mode, lanes.placement, lanes.target_passes) == ("serial-chain", "serial", len(target))
    assert lanes.draft_idle_share is not None


def test_an_engine_without_a_drafter(models: tuple[Path, Path]) -> None:
    with LLM(models[0], draft="none", **ENGINE) as llm:
        llm.generate([PROMPT], GREEDY)
        lanes = llm.lanes
    assert (lanes.draft_passes, lanes.draft_busy_s, lanes.draft_idle_share) == (0, 0.0, None)
    assert lanes.target_gap_median_s is not None
    assert all(span.made == () for span in llm.engine.timeline.target.spans)  # nobody wants a trace


def test_a_drafter_of_ones_own_that_fails(models: tuple[Path, Path]) -> None:
    drafter = RuleDrafter(constant(1))

    def fail(_: Any) -> list[Proposal]:
        raise ValueError("no idea")

    drafter.grow = fail  # type: ignore[method-assign,assignment]
    with LLM(models[0], draft=drafter, **ENGINE) as llm:
        llm.generate([PROMPT], GREEDY)
        lanes = llm.lanes
    assert (lanes.drafter_away, lanes.drafter_losses, lanes.drafter_joins) == (True, 1, 0)
    assert lanes.drafter_loss_reason == "ValueError: no idea"


# ---------------------------------------------------------------- paths that cannot be written


def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "trace.json"):
        with pytest.raises(ConfigError, match=r"cannot write the trace .*: (Is a directory|No such file)"):
            LLM(tmp_path / "no-model", trace=path)


def test_the_check_leaves_nothing_behind_and_what_is_there_alone(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept")
    for path in (old, new):
        with pytest.raises(Exception, match="no-model"):
            LLM(tmp_path / "no-model", trace=path)
    assert old.read_text() == "kept"
    assert not new.exists()


def test_a_trace_that_can_no_longer_be_written_is_an_error_unless_there_is_another(
    models: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder" / "trace.json"
    path.parent.mkdir()
    llm = LLM(models[0], draft="none", trace=path, **ENGINE)
    path.parent.rmdir()
    with pytest.raises(EngineError, match="cannot write the trace"):
        llm.close()
    llm.close()
    path.parent.mkdir()
    with (  # noqa: PT012
        caplog.at_level(logging.WARNING),
        pytest.raises(ZeroDivisionError),
        LLM(models[0], draft="none", trace=path, **ENGINE),
    ):
        path.parent.rmdir()
        _ = 1 / 0
    assert "cannot write the trace" in caplog.text
