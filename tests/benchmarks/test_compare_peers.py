"""The comparison with other engines: its arithmetic, its runner protocol, and one whole run of a stand-in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from peers.protocol import Answer, batches, measure  # noqa: E402
from peers.runner_process import EngineConfig  # noqa: E402
from peers.table import Measurement, common_prefix, markdown, rows  # noqa: E402

STAND_IN = """
import sys
sys.path.insert(0, {peers!r})
from protocol import Answer, build_parser, run

class StandIn:
    name, version = "stand-in", "1"

    def __init__(self, options):
        self.setting = {{"precision": options.precision}}
        print("noise on standard output")

    def generate(self, prompts, new_tokens):
        if new_tokens == 13:
            raise ValueError("thirteen")
        return [Answer(ids[:1] * new_tokens, 0.5, 1.0) for ids in prompts], 2.0

run(build_parser("stand-in"), StandIn)
"""


class Fixed:
    """Answers every prompt with the same tokens at the same times."""

    name, version = "fixed", "1"

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self.setting: dict[str, str] = {}

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[Answer], float]:  # noqa: ARG002
        return self.answers, 2.0


def test_rates_count_from_the_first_token_to_the_last() -> None:
    engine = Fixed([Answer([1, 2, 3], 0.5, 1.5), Answer([4, 5, 6], 0.7, 1.0, first_tokens=2)])
    record = measure(engine, [[0], [0]], 3)
    assert record["ttft_s"] == pytest.approx(0.6)
    assert record["decode_s"] == pytest.approx(1.0)
    assert record["decode_tok_s"] == pytest.approx(3.0)
    assert record["end_to_end_tok_s"] == pytest.approx(3.0)


def test_an_engine_that_stops_early_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="asked for 1 x 3"):
        measure(Fixed([Answer([1, 2], 0.1, 0.2)]), [[0]], 3)


def test_each_repeat_takes_other_prompts() -> None:
    assert list(batches([[1], [2], [3]], 1, 4)) == [[[1]], [[2]], [[3]], [[1]]]
    assert list(batches([[1], [2], [3]], 2, 2)) == [[[1], [2]], [[3], [1]]]
    with pytest.raises(ValueError, match="batch 4"):
        list(batches([[1], [2], [3]], 4, 1))


def test_ratios_pair_the_repeats_and_compare_like_with_like() -> None:
    engines = [
        EngineConfig("ours", "paceline", "py", "m"),
        EngineConfig("ours ngram", "paceline", "py", "m", speculation="ngram"),
        EngineConfig("theirs", "vllm", "py", "m"),
        EngineConfig("another precision", "vllm", "py", "m", precision="int8"),
    ]
    rates = {
        "ours": [10, 40, 30],
        "ours ngram": [20, 80, 60],
        "theirs": [5, 10, 30],
        "another precision": [1],
    }
    measurements = [
        Measurement(label, "s", 1, repeat, 0.1, 1.0, 1.0, 8, rate, rate, 0.0, 0.0, False, [[1, 2, repeat]])
        for label, each in rates.items()
        for repeat, rate in enumerate(each)
    ]
    table = {row.label: row for row in rows(engines, measurements)}
    assert table["theirs"].end_to_end_ratio == 2.0
    assert table["theirs"].best_ratio == 4.0
    assert table["theirs"].agreement == 3.0
    assert table["another precision"].end_to_end_ratio is None
    assert "| theirs | 100 | 10.0 | 10.0 | 2.00x | 2.00x | 4.00x | 3 | 0/3 |" in markdown(
        "t", list(table.values())
    )


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1], [1, 2]) == 1
    assert common_prefix([], [1]) == 0


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="reads /proc")
def test_a_whole_run(tmp_path: Path) -> None:
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(STAND_IN.format(peers=str(BENCHMARKS / "peers")), encoding="utf-8")
    prompts = tmp_path / "prompts.json"
    prompts.write_text(
        json.dumps({"sets": {"one": [{"token_ids": [7, 8]}, {"token_ids": [9]}]}}), encoding="utf-8"
    )
    runner, python = json.dumps(str(stand_in)), json.dumps(sys.executable)
    engine = f'[[engine]]\nlabel = "a"\nrunner = {runner}\npython = {python}\n'
    absent = '[[engine]]\nlabel = "b"\nrunner = "vllm"\npython = "no-such-interpreter"\nmodel = "m"\n'
    config = tmp_path / "peers.toml"
    config.write_text(
        f'prompts = {json.dumps(str(prompts))}\n{engine}model = "m"\nbatches = [1, 2]\n{absent}',
        encoding="utf-8",
    )
    command = [sys.executable, str(BENCHMARKS / "compare_peers.py"), f"--config={config}", "--sets=one"]
    command += ["--batches", "1", "2", "--repeats=1", "--new-tokens=4", "--wait-idle=0", "--tries=1"]
    command += [f"--json={tmp_path / 'out.json'}", f"--logs={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [(run["label"], run["batch"], run["end_to_end_tok_s"]) for run in result["runs"]] == [
        ("a", 1, 2.0),
        ("a", 2, 4.0),
    ]
    assert list(result["failures"]) == ["b"]
    assert "noise" in (tmp_path / "00-stand_in.log").read_text(encoding="utf-8")
