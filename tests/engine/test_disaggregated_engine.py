"""The whole engine with its drafter in another process: what a user sees does not change, whatever happens
to that process."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline import LLM, AsyncLLM, EngineError, ModelError, RequestOutput, SamplingParams
from paceline.engine import build
from paceline.engine.channel import write_key_file
from paceline.engine.disaggregated import DisaggregatedExecutor
from paceline.engine.draft_group import DraftGroup
from paceline.engine.replay import replay
from tests.cases.lab import random_prompt
from tests.engine.draft_drive import worker_pid
from tests.tiny import DRAFTED, ENGINE, write_random
from tests.tiny_checkpoints import tiny_tokenizer

PROMPTS = [random_prompt(seed, length) for seed, length in enumerate((3, 12, 40, 90))]
GREEDY = SamplingParams(max_tokens=60, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=60, temperature=0.8, seed=7, logprobs=2)
APART: dict[str, Any] = {**DRAFTED, "placement": "disaggregated"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft model that is often right."""
    folder = tmp_path_factory.mktemp("apart")
    return write_random(folder / "target"), write_random(folder / "draft", head_noise=0.1)


@pytest.fixture(scope="module")
def plain(models: tuple[Path, Path]) -> Iterator[LLM]:
    with LLM(models[0], draft="none", **ENGINE) as llm:
        yield llm


def parts(llm: LLM) -> tuple[DisaggregatedExecutor, DraftGroup]:
    executor = llm.engine._executor
    assert isinstance(executor, DisaggregatedExecutor)
    assert executor._group is not None
    return executor, executor._group


def slow_down(llm: LLM, pause_s: float) -> None:
    """A pass takes as long as with a model of some size, so that a drafter can be of use."""
    target = parts(llm)[0]._target
    real = target.run

    def run(work: Any) -> Any:
        time.sleep(pause_s)
        return real(work)

    target.run = run  # type: ignore[method-assign]


def check(llm: LLM, plain: LLM, params: SamplingParams) -> list[RequestOutput]:
    found, expected = llm.generate(PROMPTS, params), plain.generate(PROMPTS, params)
    for one, other in zip(found, expected, strict=True):
        assert one.error is None
        assert (one.token_ids, one.text, one.finish_reason) == (
            other.token_ids,
            other.text,
            other.finish_reason,
        )
        assert one.logprobs == other.logprobs
    return found


def pid(llm: LLM) -> int:
    return worker_pid(parts(llm)[1]._host)


def joined(llm: LLM, times: int) -> None:
    end = time.perf_counter() + 30
    while parts(llm)[1].stats.joins < times:
        assert time.perf_counter() < end, "the drafter did not come back"
        time.sleep(0.02)


def accepted(llm: LLM) -> int:
    return llm.engine.core.speculation.num_accepted_tokens


@pytest.mark.parametrize("mode", ["overlapped", "swiftspec", "discard", "outcome-cache"])
def test_every_way_of_working_apart_gives_the_same_output(
    mode: str, models: tuple[Path, Path], plain: LLM, tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    with LLM(models[0], draft=models[1], mode=mode, record=log, **APART) as llm:
        slow_down(llm, 0.003)
        check(llm, plain, GREEDY)
        check(llm, plain, SAMPLED)
        assert accepted(llm) > 0
        assert parts(llm)[1].stats.losses == 0
        worker = psutil.Process(pid(llm))
    assert not worker.is_running()
    assert replay(log) > 0


def test_a_drafter_without_a_model_works_apart_too(models: tuple[Path, Path], plain: LLM) -> None:
    with LLM(models[0], draft="ngram", placement="disaggregated", **ENGINE) as llm:
        slow_down(llm, 0.002)
        check(llm, plain, GREEDY)
        assert llm.engine.core.speculation.num_drafted_nodes > 0


@pytest.mark.parametrize("mode", ["overlapped", "swiftspec"])
def test_a_killed_drafter_costs_its_guesses_and_comes_back(
    mode: str, models: tuple[Path, Path], plain: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(models[0], draft=models[1], mode=mode, **APART) as llm:
        slow_down(llm, 0.003)
        stream = llm.stream(PROMPTS[1], GREEDY)
        tokens = [token for _, chunk in zip(range(5), stream, strict=False) for token in chunk.token_ids]
        os.kill(pid(llm), signal.SIGKILL)
        chunks = list(stream)
        tokens += [token for chunk in chunks for token in chunk.token_ids]
        assert tokens == plain.generate([PROMPTS[1]], GREEDY)[0].token_ids
        check(llm, plain, SAMPLED)
        joined(llm, 1)
        llm.generate(PROMPTS[:1], GREEDY)  # hears that it is back
        before = accepted(llm)
        check(llm, plain, GREEDY)
        assert accepted(llm) > before
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "was ended by signal 9" in warnings[0]


def test_a_drafter_that_hangs_is_done_without_and_had_back(
    models: tuple[Path, Path], plain: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(models[0], draft=models[1], draft_timeout=0.5, **APART) as llm:
        slow_down(llm, 0.003)
        check(llm, plain, GREEDY)
        worker = pid(llm)
        os.kill(worker, signal.SIGSTOP)
        started = time.perf_counter()
        check(llm, plain, SAMPLED)
        while parts(llm)[1].stats.losses == 0:
            assert time.perf_counter() - started < 10
            check(llm, plain, GREEDY)
        os.kill(worker, signal.SIGCONT)
        joined(llm, 1)
        llm.generate(PROMPTS[:1], GREEDY)
        before = accepted(llm)
        check(llm, plain, SAMPLED)
        assert accepted(llm) > before
        assert pid(llm) == worker
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def test_a_draft_model_that_cannot_be_loaded_is_an_error_at_the_start(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="nowhere"):
        LLM(models[0], draft=tmp_path / "nowhere", **APART)


def test_a_log_that_cannot_be_written_is_told_before_anything_is_started(
    models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load", None)
    with pytest.raises(EngineError, match="cannot write the event log"):
        LLM(models[0], draft=models[1], record=tmp_path / "nowhere" / "log", **APART)


@pytest.mark.parametrize("step", ["assembled", "Parts"])
def test_a_start_that_fails_half_way_leaves_nothing_running(
    step: str, models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        assert [child for child in psutil.Process().children() if "draft_worker" in str(child.cmdline())]
        raise EngineError("no")

    monkeypatch.setattr(build, step, failing)
    with pytest.raises(EngineError, match="no"):
        LLM(models[0], draft="ngram", placement="disaggregated", **ENGINE)
    assert not [child for child in psutil.Process().children() if "draft_worker" in str(child.cmdline())]
    assert not [thread for thread in threading.enumerate() if "paceline-draft" in thread.name]


def test_requests_arrive_while_both_lanes_run(models: tuple[Path, Path], plain: LLM) -> None:
    engine = AsyncLLM(models[0], draft=models[1], **APART)
    slow_down(engine.llm, 0.002)

    async def late(index: int) -> list[int]:
        await asyncio.sleep(0.03 * index)
        (output,) = await engine.generate(PROMPTS[index], GREEDY)
        return output.token_ids

    async def scenario() -> list[list[int]]:
        return await asyncio.gather(*map(late, range(len(PROMPTS))))

    try:
        found = asyncio.run(scenario())
    finally:
        engine.close()
    assert found == [output.token_ids for output in plain.generate(PROMPTS, GREEDY)]


def test_an_interrupted_engine_stays_usable(models: tuple[Path, Path], plain: LLM) -> None:
    """The pass under way goes on behind the caller's back, over slots that are given away meanwhile."""
    with LLM(models[0], draft=models[1], **APART) as llm:
        slow_down(llm, 0.05)
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, SamplingParams(max_tokens=150, temperature=0.0))
        timer.join()
        check(llm, plain, SAMPLED)
        assert parts(llm)[1].stats.losses == 0


def test_a_model_served_by_another_host(models: tuple[Path, Path], plain: LLM, tmp_path: Path) -> None:
    """`paceline draft` and an engine share nothing but a key; one with another vocabulary is refused."""
    key = tmp_path / "key"
    write_key_file(key)
    other = tiny_tokenizer()
    other.add_tokens(["<only here>"])
    stranger = write_random(tmp_path / "stranger", tokenizer=other)
    command = [sys.executable, "-m", "paceline", "draft", str(models[1]), "--key-file", str(key)]
    options = ["--listen", "tcp://127.0.0.1:*", "--dtype", "float32", "--threads", "1", "--device", "cpu"]
    with subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            address = server.stderr.readline().split(" at ")[1].split(";")[0]
            away = {**APART, "draft_address": address, "draft_key_file": str(key)}
            del away["draft_dtype"]  # as is served there
            for _ in range(2):  # one engine after the other
                with LLM(models[0], **away) as llm:
                    slow_down(llm, 0.003)
                    check(llm, plain, GREEDY)
                    assert accepted(llm) > 0
                    assert llm.engine.about.drafter == "draft_model"
            with pytest.raises(ModelError, match="different vocabularies"):
                LLM(stranger, **away)
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=20) == 0
