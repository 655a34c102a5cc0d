"""An engine's event log, run again by the simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.errors import EngineError
from paceline.tracing.replayed import replayed
from tests.cases.lab import random_prompt
from tests.loading.heads import LAYERS, write_head
from tests.tiny import ENGINE, write_random

PROMPTS = [random_prompt(1, 30), [7, 8, 9, 7, 8, 9, 7, 8], random_prompt(2, 90), [5], random_prompt(3, 12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logs")
    write_random(folder / "target", layers=LAYERS, eos=[292])
    write_head(folder / "head")
    return folder


def recorded(folder: Path, path: Path, draft: str, **options: object) -> list[list[int]]:
    params = [
        SamplingParams(max_tokens=20 + 3 * number, temperature=0.3 * (number % 2), seed=number)
        for number in range(len(PROMPTS))
    ]
    with LLM(folder / "target", draft=draft, record=path, max_num_seqs=2, **ENGINE, **options) as llm:  # type: ignore[arg-type]
        return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("draft", ["none", "ngram", "layers", "ngram+suffix+head"])
def test_a_log_is_simulated_to_identical_work(folder: Path, tmp_path: Path, draft: str) -> None:
    path = tmp_path / "events.jsonl"
    texts = recorded(folder, path, draft.replace("head", str(folder / "head")))
    result = replayed(path)
    assert sorted(each.times.tokens or 0 for each in result.requests) == sorted(map(len, texts))
    last = json.loads(path.read_text().splitlines()[-1])
    assert max(each.times.end_s for each in result.requests) == pytest.approx(last["now"], abs=1e-9)


def test_requests_that_wait_and_are_preempted(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    recorded(folder, path, "ngram", kv_tokens=120, context_length=120, max_batch_tokens=32)
    result = replayed(path)
    assert result.preemptions > 0


def test_what_differs_is_named(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    recorded(folder, path, "layers")
    lines = path.read_text().splitlines()
    number = next(
        at for at, line in enumerate(lines) if '"tree_tokens":[' in line and '"tree_slots":[]' not in line
    )
    changed = json.loads(lines[number])
    for work in changed["work"]:
        if work["type"] == "RunTarget":
            work["step"] += 1
    path.write_text("\n".join([*lines[:number], json.dumps(changed), *lines[number + 1 :]]) + "\n")
    with pytest.raises(EngineError, match=f"events.jsonl:{number + 1}: the core asks for"):
        replayed(path)
    path.write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(EngineError, match="the log ends before the simulation does"):
        replayed(path)
    path.write_text("\n".join(lines[:2]) + "\n")
    with pytest.raises(EngineError, match="has no token yet: it is cut short"):
        replayed(path)
    path.write_text("\n".join([*lines[:2], *lines[1:]]) + "\n")
    with pytest.raises(EngineError, match="arrives twice"):
        replayed(path)


def test_runs_that_cannot_be_simulated(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with LLM(folder / "target", draft="ngram", record=path, **ENGINE) as llm:
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=20))
        next(stream)
        stream.close()
    with pytest.raises(EngineError, match="a run with RequestAborted cannot be simulated"):
        replayed(path)
