"""`paceline train eagle3`, from prompts to a head that speculates."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from paceline import LLM, SamplingParams
from paceline.cli import cli
from paceline.loading import load
from paceline.loading.heads import load_head
from paceline.train.curves import Metrics
from tests import tiny

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
QUICK = [
    *("--max-tokens", "12", "--max-num-seqs", "8", "--batch-tokens", "100", "--epochs", "2", "--steps", "2"),
    *("--draft-vocab-size", "120", "--held-out", "0.25", "--threads", "1", "--dtype", "float32", "--quiet"),
]


def target(folder: Path, layers: int = 8, template: str = TEMPLATE) -> Path:
    path = tiny.write_random(folder / "target", layers=layers)
    if template:
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return path


def prompts(folder: Path, count: int = 24) -> Path:
    path = folder / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"the {'lazy ' * (n % 5)}dog {n}"}) for n in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


def train(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, ["train", "eagle3", *map(str, arguments), *QUICK])


def test_all_stages_and_again(tmp_path: Path) -> None:
    model, data, out = target(tmp_path), prompts(tmp_path), tmp_path / "out"
    excluded = tmp_path / "excluded.jsonl"
    excluded.write_text('{"question": "The dog 0"}\n')
    arguments = ("--target", model, "--data", data, "--exclude", excluded, "--out", out)
    result = train(*arguments)
    assert result.exit_code == 0, result.output
    assert "1 of 24 prompts are excluded" in result.output
    assert f"the head is {out / 'head'}" in result.output
    assert len((out / "answers.jsonl").read_text().splitlines()) == 23
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [record["update"] for record in records if "loss" in record] == list(
        range(1, records[-1]["update"] + 1)
    )
    state = (out / "state.pt").read_bytes()
    (out / "state.pt").write_bytes(state[:1000])
    result = train(*arguments)
    assert result.exit_code == 1
    assert f"cannot read {out / 'state.pt'}" in result.output
    assert "delete it to start the training anew" in result.output
    (out / "state.pt").write_bytes(state)
    training = json.loads((out / "head" / "training.json").read_text())
    loaded = load(str(model))
    assert training["target"]["sha256"] == loaded.provenance.fingerprint
    assert training["recipe"]["steps"] == 2
    assert training["data"]["sequences"] == 23
    assert training["metrics"]["acceptance"]["all"]["k3"] >= 1
    assert load_head(out / "head", loaded).spec.draft_vocab_size == 120

    before = {
        path: path.stat().st_mtime_ns for path in out.rglob("*") if path.suffix in (".bin", ".safetensors")
    }
    again = train(*arguments)
    assert again.exit_code == 0, again.output
    for path, time in before.items():
        if path.suffix == ".safetensors":
            assert path.stat().st_mtime_ns == time, path
    assert (out / "metrics.jsonl").read_text().splitlines() == [json.dumps(record) for record in records]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_training_that_is_stopped_keeps_what_there_is_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals, code: int
) -> None:
    arguments = ("--target", target(tmp_path), "--data", prompts(tmp_path), "--out", tmp_path / "out")
    updates: list[dict[str, Any]] = []
    add = Metrics.add

    def stop_soon(metrics: Metrics, record: dict[str, Any]) -> None:
        add(metrics, record)
        updates.append(record)
        if len(updates) == 1:
            os.kill(os.getpid(), signum)

    monkeypatch.setattr(Metrics, "add", stop_soon)
    stopped = train(*arguments)
    assert stopped.exit_code == code, stopped.output
    assert "stopped; the same command goes on from here" in stopped.output
    assert (tmp_path / "out" / "state.pt").exists()
    seen = len(updates)
    finished = train(*arguments)
    assert finished.exit_code == 0, finished.output
    assert "stopped" not in finished.output
    assert updates[seen]["update"] > updates[0]["update"]


def test_the_head_drafts_for_its_target_and_changes_nothing(tmp_path: Path) -> None:
    model, out = target(tmp_path), tmp_path / "out"
    assert train("--target", model, "--data", prompts(tmp_path), "--out", out).exit_code == 0
    texts = ["the quick brown", "dogs and foxes"]
    params = SamplingParams(max_tokens=20, temperature=0.7, seed=5)
    outputs = []
    for draft in ("none", str(out / "head")):
        with LLM(str(model), draft=draft, **tiny.ENGINE) as llm:
            outputs.append([output.token_ids for output in llm.generate(texts, params)])
            assert draft == "none" or llm.speculation.num_draft_tokens > 0
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 4}, "has no three places to capture"),
        ({"template": ""}, "has no chat template"),
    ],
)
def test_a_target_that_does_not_do(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    result = train(
        "--target", target(tmp_path, **change), "--data", prompts(tmp_path), "--out", tmp_path / "o"
    )
    assert result.exit_code == 2
    assert message in result.output


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    data = prompts(tmp_path, 3)
    data.write_text(data.read_text() + "oops\n")
    result = train("--target", target(tmp_path), "--data", data, "--out", tmp_path / "o")
    assert result.exit_code == 2
    assert f"{data}, line 4 is not JSON" in " ".join(result.output.split())
    assert not (tmp_path / "o").exists()


def test_folders_that_cannot_be_made_are_named_before_the_work(tmp_path: Path) -> None:
    model, data = target(tmp_path), prompts(tmp_path)
    (tmp_path / "file").touch()
    for arguments in (
        ("--out", tmp_path / "file"),
        ("--out", tmp_path / "x", "--features", tmp_path / "file"),
    ):
        result = train("--target", model, "--data", data, *arguments)
        assert result.exit_code == 2, result.output
        assert f"{tmp_path / 'file'} cannot be a folder" in result.output
        assert "Give another with --out or --features" in result.output
    assert not (tmp_path / "x" / "answers.jsonl").exists()


@pytest.mark.parametrize("layers", ["1,99", "-1,2", "2,2,5", "2,4,8"])
def test_layers_that_the_target_does_not_have_are_named_before_the_work(tmp_path: Path, layers: str) -> None:
    model, data, out = target(tmp_path), prompts(tmp_path), tmp_path / "out"
    result = train("--target", model, "--data", data, "--out", out, f"--capture={layers}")
    assert result.exit_code == 2, result.output
    assert f"--capture is {layers}: give different layers of {model}, from 0 to 7." in result.output
    assert not (out / "answers.jsonl").exists()


def test_nothing_to_answer(tmp_path: Path) -> None:
    result = train("--target", target(tmp_path), "--out", tmp_path / "o")
    assert result.exit_code == 2
    assert "Give --data FILE or --invent N" in result.output


def test_a_full_disk_is_seen_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("paceline.train.pipeline.shutil.disk_usage", lambda _: usage)
    result = train("--target", target(tmp_path), "--data", prompts(tmp_path), "--out", tmp_path / "o")
    assert result.exit_code == 2
    assert "the features need 0.0 GB more" in result.output


def test_a_target_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.model_setup.free_memory", lambda _: 1000)
    result = train("--target", target(tmp_path), "--data", prompts(tmp_path), "--out", tmp_path / "o")
    assert result.exit_code == 2
    assert "choose a smaller target" in " ".join(result.output.split())
