"""`paceline trace`, from prompts to a file that can be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from paceline.cli import cli
from paceline.sim.acceptance import read_traces
from tests.cli.test_train import prompts, target
from tests.tiny import ENGINE

MACHINE = [f"--{name}={value}" for name, value in ENGINE.items()]


def trace(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, ["trace", *map(str, arguments), *MACHINE])


def test_from_prompts_to_traces(tmp_path: Path) -> None:
    model, data, out = target(tmp_path), prompts(tmp_path, 5), tmp_path / "new" / "traces.jsonl"
    arguments = ["--model", model, "--draft", "ngram+layers", "--data", data, "--out", out]
    result = trace(*arguments, "--max-tokens", 9, "--depth", 6, "--limit", 3)
    assert result.exit_code == 0, result.stderr
    assert "has 3 requests" in result.stderr
    found = read_traces(out)
    assert [each.request_id for each in found.requests] == ["prompts/1", "prompts/2", "prompts/3"]
    assert found.drafters == ("ngram", "layers")
    assert found.header is not None
    assert found.header["sampling"] == {"max_tokens": 9, "temperature": 0.0, "seed": 0}
    assert all(len(each.output) == 9 for each in found.requests)

    changed = trace(*arguments, "--max-tokens", 9, "--depth", 7, "--limit", 3)
    assert changed.exit_code == 2
    assert "drafters.0.depth was 6, and is 7" in changed.stderr

    rest = trace(*arguments, "--max-tokens", 9, "--depth", 6, "--quiet")
    assert (rest.exit_code, rest.stderr) == (0, "")
    assert read_traces(out).requests[:3] == found.requests
    assert len(read_traces(out).requests) == 5


def test_what_it_needs(tmp_path: Path) -> None:
    assert "Give --data FILE with prompts and --out FILE" in trace("--data", tmp_path / "a").stderr
    missing = trace("--data", tmp_path / "a", "--out", tmp_path / "b", "--model", target(tmp_path))
    assert missing.exit_code == 2
    assert "give a JSONL file of prompts" in missing.stderr
    folder = trace("--data", tmp_path / "a", "--out", tmp_path)
    assert folder.exit_code == 2
    assert "which is a folder" in folder.stderr
