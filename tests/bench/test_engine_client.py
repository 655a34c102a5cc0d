"""Cells on an engine: what is asked, when, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench.engine_client import EngineContender
from paceline.bench.matrix import Load, contenders_of
from paceline.bench.prompts import BenchPrompt, Workload
from paceline.bench.records import Cell
from paceline.bench.settings import Settings
from paceline.config import load_config
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError
from tests.tiny import ENGINE, write_random

SHORT = Workload(
    "w", tuple(BenchPrompt(f"w/{at}", ({"role": "user", "content": "ab" * (at + 1)},)) for at in range(3))
)


def measured(folder: Path, settings: Settings, load: Load, drafter: str = "ngram") -> Cell:
    model = write_random(folder / "model", context=64)
    config = load_config(options={"model": model, "prefix_cache": False, **ENGINE})
    (contender,) = contenders_of([drafter], config, [load])
    with EngineContender(contender, settings).started() as session:
        return session.measure("key", SHORT, load, 0)


def settings(**more: int) -> Settings:
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    return Settings(params, **({"requests": 4, "warm_up": 0} | more), raw=True)


def test_prompts_come_round_and_no_more_run_than_the_batch(tmp_path: Path) -> None:
    cell = measured(tmp_path, settings(), Load(batch=2))
    assert [request.prompt for request in cell.requests] == ["w/0", "w/1", "w/2", "w/0"]
    assert [request.tokens for request in cell.requests] == [6] * 4
    marks = [(request.arrival_s, 1) for request in cell.requests]
    marks += [(request.end_s, -1) for request in cell.requests]
    open_, most = 0, 0
    for _, change in sorted(marks, key=lambda mark: (mark[0], mark[1])):
        open_ += change
        most = max(most, open_)
    assert most == 2
    assert cell.requests[0].token_ids == cell.requests[3].token_ids


def test_arrivals_are_when_a_request_is_due_and_waiting_is_idle(tmp_path: Path) -> None:
    load = Load(rate=20.0)
    cell = measured(tmp_path, settings(), load, "none")
    assert [request.arrival_s for request in cell.requests] == load.due_s(4, 0)
    assert cell.shares is not None
    assert 0 < cell.shares.idle_s < cell.duration_s
    assert cell.max_guesses == 0


def test_a_longer_prompt_is_left_out_and_all_of_them_are_an_error(tmp_path: Path) -> None:
    cell = measured(tmp_path, settings(longest=4), Load(batch=1))
    assert {request.prompt for request in cell.requests} == {"w/0", "w/1"}
    with pytest.raises(ConfigError, match="no prompt of the workload w has 1 tokens or fewer"):
        measured(tmp_path / "again", settings(longest=1), Load(batch=1))
