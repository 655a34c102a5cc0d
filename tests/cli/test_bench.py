"""`paceline bench` on tiny models and on a server that answers with a script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from paceline.bench.store import CELLS
from paceline.cli import cli
from tests.bench.fake_server import Script, serving
from tests.tiny import successor_logits, write_markov

PROMPTS = [{"prompt": f"abcdeabcde{letter}"} for letter in "abc"]
FEW = ["--requests", "2", "--max-tokens", "8", "--warm-up", "2", "--repeats", "2"]


def bench(*arguments: Any) -> Result:
    return CliRunner().invoke(cli, ["bench", *map(str, arguments)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It writes the first five letters, round and round."""
    around = successor_logits(26, {at: (at + 1) % 5 for at in range(5)}, default=0)
    return write_markov(tmp_path_factory.mktemp("tiny") / "model", around)


@pytest.fixture
def common(tmp_path: Path, model: Path) -> list[str]:
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in PROMPTS))
    engine = ["--model", str(model), "--dtype", "float32", "--threads", "1", "--raw"]
    return [*engine, "--prompts", str(prompts), "--out", str(tmp_path / "out"), *FEW]


def report(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "out" / "report.json").read_text())
    return found


def cells(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out" / CELLS).read_text().splitlines()]


def test_a_matrix_its_checks_and_its_report(tmp_path: Path, common: list[str]) -> None:
    pytest.importorskip("matplotlib")
    slo = ["--slo", "ttft=5", "--check"]
    result = bench(*common, "--drafters", "none,ngram:k=3", "--batch", "1,2", "--rate", "50", *slo)
    assert result.exit_code == 0, result.output
    found = report(tmp_path)
    assert (found["expected"], found["cells"]) == (12, 12)
    assert found["contenders"] == ["none", "ngram:k=3"]
    assert found["loads"] == ["batch 1", "batch 2", "50 req/s"]
    assert all(check["passed"] for check in found["checks"]), found["checks"]
    for row in found["rows"]:
        assert row["output_tokens_per_s"] > 0
        assert (row["requests"], row["failed"], row["repeats"]) == (4, 0, 2)
        assert row["rss_peak"] >= row["rss_before"] > 0
        assert row["memory"][0] == {
            "name": "target",
            "weight_bytes": row["memory"][0]["weight_bytes"],
            "kv_bytes_per_token": 2 * 8 * 4,
            "feature_bytes_per_token": 0,
        }
        assert sum(row["shares"].values()) - row["shares"]["draft_beside"] == pytest.approx(1.0, abs=1e-6)
        assert row["goodput"] == {"ttft=5": pytest.approx(row["requests_per_s"], rel=0.5)}
    plain = found["rows"][0]
    assert (plain["speedup"], plain["acceptance"]["num_drafts"]) == (1.0, 0)
    assert found["rows"][3]["acceptance"]["length"] > 2
    assert "<svg" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "passed: outputs equal those without speculation" in result.stdout


def test_a_drafter_beside_the_target(tmp_path: Path, common: list[str], model: Path) -> None:
    """Its time is no part of the sum; the options of a drafter stand behind a colon."""
    beside = f"{model}:mode=overlapped,draft_dtype=float32"
    options = [*common, "--drafters", f"none,{beside}", "--batch", "1", "--no-html", "--check"]
    result = bench(*options)
    assert result.exit_code == 0, result.output
    row = report(tmp_path)["rows"][1]
    assert row["contender"] == beside
    assert row["shares"]["draft"] == 0.0
    assert row["shares"]["draft_beside"] > 0.0
    assert row["memory"][1]["weight_bytes"] > 0


def test_it_goes_on_where_it_was_and_measures_anew_what_changed(tmp_path: Path, common: list[str]) -> None:
    options = [*common, "--drafters", "ngram", "--batch", "1", "--no-html"]
    assert bench(*options).exit_code == 0
    before = cells(tmp_path)
    path = tmp_path / "out" / CELLS
    path.write_bytes(path.read_bytes()[:-30])  # as a kill in the middle of a line leaves it
    assert bench(*options).exit_code == 0
    after = cells(tmp_path)
    assert [cell["key"] for cell in after] == [cell["key"] for cell in before]
    assert after[0] == before[0]
    assert after[1]["duration_s"] != before[1]["duration_s"]
    result = bench(*options, "--num-speculative-tokens", "2")
    assert len(cells(tmp_path)) == 4
    assert "2 cells in the same file are of another configuration" in result.stderr
    assert report(tmp_path)["cells"] == 2


def test_a_report_of_what_is_finished(tmp_path: Path, common: list[str]) -> None:
    options = [*common, "--batch", "1", "--no-html"]
    result = bench(*options, "--drafters", "ngram", "--report-only")
    assert result.exit_code == 2
    assert "no finished cell of this matrix" in result.stderr
    assert bench(*options, "--drafters", "ngram").exit_code == 0
    assert bench(*options, "--drafters", "none,ngram", "--report-only").exit_code == 0
    assert (report(tmp_path)["expected"], report(tmp_path)["cells"]) == (4, 2)


@pytest.mark.skipif(os.name != "posix", reason="SIGINT to a child needs POSIX")
def test_ctrl_c_leaves_what_is_finished(tmp_path: Path, common: list[str]) -> None:
    options = [
        *common[: -len(FEW)],
        "--requests",
        "2",
        "--max-tokens",
        "200",
        "--repeats",
        "400",
        "--ignore-eos",
    ]
    command = [sys.executable, "-m", "paceline", "bench", *options, "--drafters", "none", "--batch", "1"]
    with subprocess.Popen([*command, "--no-html"], stderr=subprocess.PIPE, text=True) as process:
        path = tmp_path / "out" / CELLS
        while not (path.exists() and path.stat().st_size) and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    finished = len(cells(tmp_path))
    assert f"stopped: {finished} of 400 cells are in" in stderr
    assert not (tmp_path / "out" / "report.json").exists()


def test_a_failed_check_is_exit_code_1(tmp_path: Path, common: list[str]) -> None:
    options = [*common, "--drafters", "none,ngram", "--batch", "1", "--no-html"]
    assert bench(*options, "--check").exit_code == 0
    path = tmp_path / "out" / CELLS
    lines = path.read_text().splitlines()
    wrong = json.loads(lines[-1])
    wrong["requests"][0]["token_ids"][3] += 1
    path.write_text("".join(f"{line}\n" for line in [*lines[:-1], json.dumps(wrong)]))
    result = bench(*options, "--check")
    assert result.exit_code == 1
    assert "FAILED: outputs equal those without speculation, 1 of" in result.stdout
    assert "another token 3" in result.stdout
    assert bench(*options).exit_code == 0


def test_servers_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("httpx2")
    slow, fast = Script(pause_s=0.03), Script(pause_s=0.005)
    with serving(slow) as one, serving(fast) as two:
        urls = ["--url", f"none={one}", "--url", f"fast={two}", "--model", "m"]
        options = [*urls, "--workloads", "chat", "--batch", "2", *FEW, "--no-html", "--check"]
        result = bench(*options, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    found = report(tmp_path)
    assert found["contenders"] == ["none", "fast"]
    assert found["rows"][1]["speedup"] > 1.5
    assert found["rows"][1]["acceptance"]["length"] == 2.5
    assert found["rows"][1]["shares"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafters", "none,egle3"], "did you mean `eagle3`"),
        (["--drafters", "none,"], "give names with commas"),
        (["--workloads", "edits"], "did you mean `edit`"),
        (["--data", "nowhere"], "there is no spec_bench.jsonl in nowhere"),
        (["--prompts", "nowhere.jsonl"], "there is no file nowhere.jsonl"),
        (["--batch", "0"], "--batch is '0'"),
        (["--repeats", "0"], "--repeats is 0"),
        (["--requests", "0"], "--requests is 0"),
        (["--slo", "ttft=nan"], "'nan' is no number of seconds"),
        (["--bounds", "nowhere.json"], "cannot read the bounds nowhere.json"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--timeout", "5"], "--timeout is for a server"),
        (["--api-key-env", "KEY"], "--api-key-env is for a server"),
        (["--url", "http://a"], "--url needs --model"),
        (["--url", "http://a", "--model", "m", "--drafters", "none"], "give one"),
        (["--url", "http://a", "--model", "m", "--dtype", "int8"], "--url measures a server"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_loaded(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = (
        arguments if "--model" in arguments or "--url" in arguments else [*arguments, "--model", "none-such"]
    )
    result = bench(*asked)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert not (tmp_path / "bench").exists()


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = bench("--model", "none-such", "--out", tmp_path / "out")
    assert result.exit_code == 2
    assert "pip install 'paceline[bench]', or choose --no-html" in result.stderr
    monkeypatch.setitem(sys.modules, "httpx2", None)
    result = bench("--url", "http://a", "--model", "m", "--no-html", "--out", tmp_path / "out")
    assert "--url needs httpx2" in result.stderr


def test_commas_within_the_options_of_a_drafter() -> None:
    from paceline.cli.bench import _listed

    text = "none,ngram:k=3,prompt_lookup_max=5,ngram+suffix:k=2,eagle3"
    assert _listed("--drafters", text) == [
        "none",
        "ngram:k=3,prompt_lookup_max=5",
        "ngram+suffix:k=2",
        "eagle3",
    ]


@pytest.mark.model
def test_the_embedded_model(tmp_path: Path) -> None:
    few = ["--requests", "1", "--max-tokens", "16", "--repeats", "1", "--warm-up", "2", "--no-html"]
    options = ["--drafters", "none,ngram", "--workloads", "edit", "--batch", "1", "--check"]
    result = bench(*options, *few, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    plain, ngram = report(tmp_path)["rows"]
    assert plain["output_tokens"] == ngram["output_tokens"] == 16
    assert plain["memory"][0]["kv_bytes_per_token"] > 0
    assert 0 < plain["shares"]["sample"] < plain["shares"]["verify"] < 1


def test_prompts_are_computed_every_time_unless_asked_for() -> None:
    assert "prefix_cache = false" in bench("--print-config").stdout
    assert "prefix_cache = true" in bench("--print-config", "--set", "scheduler.prefix_cache=true").stdout
