"""`paceline simulate`, from files to a report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from paceline.sim.acceptance import write_traces
from paceline.sim.costs.model import save_costs
from tests.sim.lab import COSTS, record

Run = Callable[..., Result]
LENGTHS = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02d}.5,{40 + second},{5 + second % 7}\n" for second in range(30)
)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    found = {name: tmp_path / name for name in ("traces.jsonl", "costs.json", "lengths.csv")}
    write_traces(found["traces.jsonl"], {"target": "t"}, [record(number, top=True) for number in range(12)])
    save_costs(found["costs.json"], COSTS)
    found["lengths.csv"].write_text(LENGTHS)
    return found


def given(files: dict[str, Path]) -> list[Any]:
    return ["--traces", files["traces.jsonl"], "--costs", files["costs.json"]]


def simulate(run: Run, *arguments: Any) -> dict[str, Any]:
    result = run("simulate", *map(str, arguments), "--json")
    assert result.exit_code == 0, result.stderr
    said: dict[str, Any] = json.loads(result.stdout)
    return said


@pytest.mark.parametrize(
    "options",
    [
        ["--draft", "none"],
        ["--draft", "ngram"],
        ["--draft", "suffix", "--rate", "40"],
        ["--draft", "ngram+head", "--concurrency", "3"],
        ["--draft", "tree", "--mode", "serial-tree"],
        ["--draft", "tree", "--mode", "swiftspec"],
        ["--draft", "tree", "--mode", "overlapped", "--shares", "0.8,0.6"],
        ["--draft", "tree", "--mode", "discard"],
        ["--draft", "head", "--num-speculative-tokens", "3", "--burstiness", "0.3", "--rate", "20"],
    ],
    ids=" ".join,
)
def test_every_policy_writes_all_that_was_recorded(
    run: Run, files: dict[str, Path], options: list[str]
) -> None:
    said = simulate(run, *given(files), *options)
    assert said["requests"] == 12
    assert said["output_tokens"] == 12 * 40
    assert said["failed"] == 0
    assert said["latency"]["tpot_s"]["mean"] > 0
    assert said["accepted"] <= said["verified"]
    assert ("none" in options) == (said["verified"] == 0)


def test_lengths_bring_their_arrivals(run: Run, files: dict[str, Path]) -> None:
    said = simulate(run, *given(files), "--lengths", files["lengths.csv"], "--draft", "ngram+head")
    assert said["requests"] == 30
    assert said["output_tokens"] == sum(5 + second % 7 for second in range(30))
    assert 29 < said["duration_s"] < 30
    options = ["--speed", 10, "--requests", 20, "--slo", "ttft=9"]
    faster = simulate(run, *given(files), "--lengths", files["lengths.csv"], *options)
    assert faster["requests"] == 20
    assert faster["duration_s"] < 3.5
    assert faster["goodput"]["ttft=9"] == pytest.approx(faster["requests_per_s"])


def test_the_table_names_what_took_the_time(run: Run, files: dict[str, Path]) -> None:
    arguments = [*map(str, given(files)), "--draft", "tree", "--mode", "swiftspec"]
    result = run("simulate", *arguments, "--slo", "mlperf-llama3.1-8b")
    assert result.exit_code == 0, result.stderr
    for said in ("swiftspec, disaggregated, drafter tree", "a round", "leaf hit", "itl per chunk", "goodput"):
        assert said in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--costs", "COSTS"], "give --traces"),
        (["--traces", "TRACES"], "nothing says what passes take"),
        (["--traces", "TRACES", "--costs", "COSTS", "--gpu", "H100"], "both say"),
        (["--traces", "TRACES", "--gpu", "H100"], "give --target"),
        (["--traces", "TRACES", "--gpu", "G100", "--target", "llama-3.1-8b"], "H100"),
        (["--traces", "TRACES", "--costs", "COSTS", "--target", "llama-3.1-8b"], "leave it out"),
        (["--traces", "TRACES", "--published", "llama3.1-8b@h1000"], "llama3.1-8b@h100"),
        (["--traces", "TRACES", "--costs", "COSTS", "--draft", "eagle"], "they hold head, tree"),
        (["--traces", "TRACES", "--costs", "COSTS", "--draft", "ngram+ngram"], "once"),
        (["--traces", "TRACES", "--costs", "COSTS", "--requests", "0"], "from 1 to 10,000,000"),
        (["--traces", "TRACES", "--costs", "COSTS", "--requests", "99999999999"], "from 1 to 10,000,000"),
        (["--traces", "TRACES", "--costs", "COSTS", "--rate", "1", "--concurrency", "2"], "leave one out"),
        (["--traces", "TRACES", "--costs", "COSTS", "--draft-charge", "winner"], "--paper figure12"),
        (["--traces", "TRACES", "--costs", "COSTS", "--tensor-parallel", "4"], "says something of --gpu"),
        (["--traces", "TRACES", "--costs", "COSTS", "--speed", "2"], "--speed is that of --lengths"),
        (["--traces", "TRACES", "--costs", "COSTS", "--burstiness", "0.5"], "the gaps of a --rate"),
        (["--traces", "TRACES", "--costs", "COSTS", "--rate", "-1"], "rate"),
        (["--traces", "TRACES", "--costs", "COSTS", "--rate", "nan"], "rate"),
        (["--traces", "TRACES", "--costs", "COSTS", "--shares", "0.5,0.5"], "leave the shares out"),
        (["--traces", "TRACES", "--costs", "COSTS", "--shares", "half"], "two numbers"),
        (["--traces", "TRACES", "--costs", "COSTS", "--lengths", "LENGTHS", "--rate", "1"], "leave one out"),
        (["--traces", "TRACES", "--costs", "COSTS", "--slo", "mlperf-llama3.1"], "did you mean"),
        (["--traces", "TRACES", "--costs", "COSTS", "--placement", "auto"], "auto"),
        (["--traces", "TRACES", "--costs", "COSTS", "--draft", "ngram", "--mode", "swiftspec"], "no trees"),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    run: Run, files: dict[str, Path], arguments: list[str], said: str
) -> None:
    names = {"TRACES": "traces.jsonl", "COSTS": "costs.json", "LENGTHS": "lengths.csv"}
    result = run("simulate", *[str(files[names[each]]) if each in names else each for each in arguments])
    assert result.exit_code == 2
    assert said in result.stderr


def test_broken_files_are_named_with_the_line(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_bytes(files["traces.jsonl"].read_bytes() + b'{"id": "x", \n')
    result = run("simulate", "--traces", str(broken), "--costs", str(files["costs.json"]))
    assert result.exit_code == 2
    assert f"{broken}, line 14" in result.stderr
    files["lengths.csv"].write_text(LENGTHS + "now,NaN,3\n")
    result = run("simulate", *map(str, given(files)), "--lengths", str(files["lengths.csv"]))
    assert result.exit_code == 2
    assert "lengths.csv, line 32" in result.stderr
    text = files["costs.json"].read_text().replace("0.005", "NaN", 1)
    files["costs.json"].write_text(text)
    result = run("simulate", *map(str, given(files)))
    assert result.exit_code == 2
    assert "costs.json" in result.stderr


@pytest.mark.parametrize("mode", ["serial-chain", "overlapped"])
def test_what_was_recorded_is_replayed(run: Run, files: dict[str, Path], tmp_path: Path, mode: str) -> None:
    log = tmp_path / "log.jsonl"
    first = simulate(run, *given(files), "--draft", "tree", "--mode", mode, "--rate", 50, "--record", log)
    again = simulate(run, "--replay", log)
    assert again["identical"]
    assert again["events"] == first["events"]
    if mode == "overlapped":
        assert "at the same time" in again["not_simulated"]
    else:
        assert again["simulated"]["output_tokens"] == first["output_tokens"]
        assert again["simulated"]["accepted"] == first["accepted"]
        assert again["simulated"]["duration_s"] == pytest.approx(first["duration_s"])
    refused = run("simulate", "--replay", str(log), "--draft", "ngram")
    assert refused.exit_code == 2
    assert "--draft says nothing" in refused.stderr
    lines = log.read_text().splitlines()
    log.write_text("\n".join([*lines[:3], lines[5], *lines[4:]]) + "\n")
    broken = run("simulate", "--replay", str(log))
    assert broken.exit_code == 1
    assert f"{log}:" in broken.stderr


def test_an_empty_answer_is_no_workload(run: Run, files: dict[str, Path]) -> None:
    empty = replace(record(1), output=(), drafters={})
    write_traces(files["traces.jsonl"], {"target": "t"}, [empty])
    result = run("simulate", *map(str, given(files)), "--draft", "ngram")
    assert result.exit_code == 2
    assert "no request of the traces has an output" in result.stderr


def test_requests_that_fail_say_why(run: Run, files: dict[str, Path]) -> None:
    arguments = ["simulate", *map(str, given(files)), "--kv-tokens", "2", "--no-bounds"]
    told = json.loads(run(*arguments, "--json").stdout)
    assert told["failed"] == sum(told["errors"].values()) == 12
    assert all("the KV cache holds 2" in error for error in told["errors"])
    table = run(*arguments).stdout.splitlines()
    assert 1 <= sum(line.startswith("failed") and "KV cache" in line for line in table) <= 3


def test_a_simulation_needs_no_torch(files: dict[str, Path]) -> None:
    arguments = ["simulate", *map(str, given(files)), "--draft", "ngram+suffix+head", "--json"]
    script = (
        "import sys\nfrom paceline.cli import cli\n"
        f"cli({arguments!r}, standalone_mode=False)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
