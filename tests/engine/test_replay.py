"""Damaged event logs name their file, their line and the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.engine.replay import replay
from paceline.errors import EngineError
from tests.tiny import ENGINE, write_random


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    path = folder / "events.jsonl"
    with LLM(write_random(folder / "model"), draft="ngram", record=path, **ENGINE) as llm:
        llm.generate([[5, 6, 7, 5, 6], [8, 9]], SamplingParams(max_tokens=12, temperature=1.0, seed=1))
    return path


def test_an_intact_log_replays(log: Path) -> None:
    assert replay(log) > 4


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (1, "{}"),
        (1, "[]"),
        (1, '{"format": 1, "config": {}}'),
        (3, "{not json"),
        (1, '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        (3, '{"now": 0}'),
        (3, '{"now": 0, "event": {"type": "Nonsense"}, "work": []}'),
        (3, '{"now": 0, "event": {"type": "StepDone", "step": "x"}, "work": []}'),
    ],
)
def test_a_damaged_line_is_named(log: Path, tmp_path: Path, line: int, text: str) -> None:
    lines = log.read_text(encoding="utf-8").splitlines()
    lines[line - 1] = text
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(EngineError, match=r"damaged\.jsonl.*record it again"):
        replay(damaged)


def test_other_work_than_recorded_is_an_error(log: Path, tmp_path: Path) -> None:
    lines = log.read_text(encoding="utf-8").splitlines()
    entry = json.loads(lines[1])
    entry["event"]["prompt"].append(9)
    lines[1] = json.dumps(entry)
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(EngineError, match="replay differs") as differs:
        replay(changed)
    assert len(str(differs.value)) < 400
    changed.write_text(lines[0] + "\n", encoding="utf-8")
    with pytest.raises(EngineError, match="holds no event"):
        replay(changed)


def test_a_missing_log_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot read the event log"):
        replay(tmp_path / "none.jsonl")


@pytest.mark.parametrize("selector", ["combined", "bandit"])
def test_several_drafters_replay_and_are_reported(tmp_path: Path, selector: str) -> None:
    path, model = tmp_path / "events.jsonl", write_random(tmp_path / "model")
    options = {"draft": "ngram+suffix", "selector": selector, "record": path}
    prompts = [[5, 6, 7, 5, 6, 7, 5], [8, 9, 8, 9, 8]]
    params = SamplingParams(max_tokens=40)
    with LLM(model, **options, **ENGINE) as llm:
        outputs = llm.generate(prompts, params)
        report = llm.speculation_report
        assert llm.lanes.drafters == report
    with LLM(model, draft="none", **ENGINE) as plain:
        assert [each.token_ids for each in plain.generate(prompts, params)] == [
            each.token_ids for each in outputs
        ]
    assert replay(path) > 4
    assert [each.name for each in report] == ["ngram", "suffix"]
    assert sum(each.num_questions for each in report) > 0
    for each in report:  # what is asked, and so judged, is a matter of measured times
        assert 0.0 <= (each.calibration_error or 0.0) <= 1.0
        assert all(
            count > 0 and 0.0 <= said <= 1.0 and 0.0 <= seen <= 1.0 for count, said, seen in each.reliability
        )
