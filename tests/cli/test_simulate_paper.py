"""`paceline simulate --paper figure...`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from tests.sim.data import needs_traces, published

Run = Callable[..., Result]

LINE = {
    "id": "a",
    "prompt_token_ids": [1, 2, 3, 4],
    "generated_token_ids": [1, 2, 3, 4, 1, 2, 9],
    "acc_ngram": {"acc_len": [1, 1, 1, 5, 4, 3, 1]},
    "acc_eagle": {"acc_len": [1, 3, 2, 1, 2]},
}


def traces(folder: Path, name: str, *lines: object) -> Path:
    path = folder / name
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


@pytest.mark.parametrize("figure", ["figure1", "figure10", "figure12"])
def test_traces_that_nobody_published(run: Run, tmp_path: Path, figure: str) -> None:
    one = traces(tmp_path, "one.jsonl", LINE)
    two = traces(
        tmp_path,
        "two.jsonl",
        LINE,
        LINE | {"id": "b", "generated_token_ids": [7], "acc_ngram": {"acc_len": [1]}},
    )
    result = run("simulate", "--paper", figure, "--traces", str(one), str(two))
    assert result.exit_code == 0, result.stderr
    assert "one: 1 requests" in result.stdout
    assert "two: 2 requests" in result.stdout
    assert "published" not in result.stdout.partition("\n")[2]
    again = run("simulate", "--paper", figure, "--traces", str(one), "--traces", str(two), "--json")
    found = json.loads(again.stdout)
    assert (found["figure"], found["agrees"]) == (figure, None)
    assert {row["traces"] for row in found["rows"]} == {"one", "two"}
    assert all(len(row["ours"]) == len(row["batches"]) for row in found["rows"])


def test_check_out_of_tolerance_is_1_and_without_anything_to_check_is_2(run: Run, tmp_path: Path) -> None:
    wrong = traces(tmp_path, "gsm8k.jsonl", LINE)
    result = run("simulate", "--paper", "figure10", "--traces", str(wrong), "--check")
    assert result.exit_code == 1
    assert "out of tolerance" in result.stdout
    assert "0 of 8 rows are within" in result.stdout
    assert run("simulate", "--paper", "figure10", "--traces", str(wrong)).exit_code == 0
    other = traces(tmp_path, "mine.jsonl", LINE)
    result = run("simulate", "--paper", "figure10", "--traces", str(other), "--check")
    assert result.exit_code == 2
    assert "figure10 has no published value for these traces" in result.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": ', "is not JSON"),
        (LINE | {"acc_ngram": {"acc_len": [1]}}, "acc_len has 1 entries and generated_token_ids 7"),
        (json.dumps(LINE).replace("[1, 3, 2, 1, 2]", "[1, NaN]"), "is not JSON"),
    ],
)
def test_bad_traces(run: Run, tmp_path: Path, line: object, said: str) -> None:
    path = traces(tmp_path, "bad.jsonl", LINE, line)
    result = run("simulate", "--paper", "figure1", "--traces", str(path))
    assert result.exit_code == 2
    assert "bad.jsonl, line 2" in result.stderr
    assert said in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--paper", "figure1", "--draft-charge", "winner"], "figure1 has no oracle over both drafters"),
        (["--check"], "--check"),
        (["--draft-charge", "winner"], "--draft-charge"),
    ],
)
def test_options_that_cannot_be_honoured(run: Run, tmp_path: Path, options: list[str], said: str) -> None:
    result = run("simulate", *options, "--traces", str(traces(tmp_path, "t.jsonl", LINE)))
    assert result.exit_code == 2
    assert said in result.stderr


def test_no_traces_anywhere(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.__file__", str(tmp_path / "paceline" / "__init__.py"))
    result = run("simulate", "--paper", "figure10")
    assert result.exit_code == 2
    assert "give --traces FILE" in result.stderr


def test_files_of_one_name_are_told_apart(run: Run, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = [str(traces(folder, "t.jsonl", LINE)) for folder in (tmp_path, tmp_path / "other")]
    result = run("simulate", "--paper", "figure10", "--traces", *paths)
    assert all(f"{path}: 1 requests" in result.stdout for path in paths)


@needs_traces
def test_the_switch(run: Run) -> None:
    arguments = ["simulate", "--paper", "figure12", "--traces", str(published("gsm8k")), "--json", "--check"]
    result = run(*arguments, "--draft-charge", "always")
    assert result.exit_code == 0
    rows = {row["drafter"]: row for row in json.loads(result.stdout)["rows"]}
    assert rows["combined, always"]["ours"][0] == pytest.approx(2.17, abs=0.005)
    assert rows["combined, always"]["agrees"] is None
    assert run(*arguments).exit_code == 0


def test_starts_at_once_and_never_imports_torch(tmp_path: Path) -> None:
    path = traces(tmp_path, "t.jsonl", LINE)
    script = (
        "import sys\nfrom paceline.cli import cli\n"
        f"cli(['simulate', '--paper', 'figure10', '--traces', {str(path)!r}], standalone_mode=False)\n"
        "print({'torch', 'transformers', 'tokenizers', 'scipy', 'matplotlib'} & set(sys.modules) or 'none')"
    )
    took = []
    for _ in range(3):
        started = time.perf_counter()
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        took.append(time.perf_counter() - started)
        assert result.stdout.splitlines()[-1] == "none"
        if took[-1] < 1.0:
            return
    raise AssertionError(f"took {took} seconds")
