"""`paceline profile` where nothing is measured, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result

from paceline.sim.costs.model import load_costs, save_costs
from paceline.sim.costs.published import published
from paceline.sim.costs.roofline import roofline

Run = Callable[..., Result]
GPU = ("profile", "--gpu", "H100", "--target", "llama-3.1-8b")


def test_a_roofline_is_printed(run: Run) -> None:
    result = run(*GPU, "--requests", "1", "--contexts", "500", "--guesses", "3")
    assert result.exit_code == 0
    seconds = roofline("H100", "llama-3.1-8b").target.seconds(4, 500, 1)
    assert f"1 x 500 tokens       5.96{seconds * 1e3:9.2f}" in result.stdout.replace("    5.96", "5.96")
    assert "1.200 ms per step" in result.stdout
    assert "eagle3" in result.stdout


def test_what_is_shown_of_where_costs_come_from(run: Run, tmp_path: Path) -> None:
    path, costs = tmp_path / "costs.json", published("llama3.1-8b@h100")
    told = {"source": "a test", "device": "cpu", "mean_over_median": {"target": 1.016597658432458}}
    save_costs(path, replace(costs, provenance=told))
    assert run("profile", "--costs", str(path)).stdout.splitlines()[0] == "a test: device cpu"


def test_costs_are_written_shown_again_and_as_json(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    assert f"written to {path}" in run("profile", "--published", "llama3.1-8b@h100", "--out", path).stdout
    assert load_costs(path) == published("llama3.1-8b@h100")
    result = run(
        "profile", "--costs", path, "--json", "--requests", "1,64", "--guesses", "3", "--contexts", "500"
    )
    shown = json.loads(result.stdout)
    assert [(row["drafter"], row["requests"]) for row in shown["break_even"]] == [
        (drafter, requests) for drafter in ("ngram", "eagle") for requests in (1, 64)
    ]
    assert all(0.0 < row["acceptance"] < 0.5 for row in shown["break_even"])


def test_a_roofline_takes_efficiencies_and_ranks(run: Run) -> None:
    options = ("--tensor-parallel", "4", "--weight-bits", "4", "--efficiency", "bandwidth=0.5", "--json")
    result = run("profile", "--gpu", "h800", "--target", "llama-3-70b", *options)
    costs = json.loads(result.stdout)["costs"]
    assert costs["provenance"]["bandwidth"] == 0.5
    assert costs["target"]["read_s"] == pytest.approx(70.55e9 * 0.5 / 4 / (0.5 * 3.35e12), rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gpu", "H100"), "--gpu needs --target SHAPE"),
        (("--gpu", "H10O", "--target", "qwen3-8b"), "did you mean 'H100'"),
        (("--gpu", "H100", "--target", "qwen3-9b"), "did you mean 'qwen3-8b'"),
        ((*GPU[1:], "--model", "embedded"), "--model has no meaning where --gpu is given"),
        ((*GPU[1:], "--quick"), "--quick has no meaning where --gpu is given"),
        ((*GPU[1:], "--published", "x"), "--gpu and --published are two sources"),
        ((*GPU[1:], "--draft-tensor-parallel", "2"), "needs --draft-model"),
        ((*GPU[1:], "--efficiency", "bandwidth"), "write NAME=X"),
        ((*GPU[1:], "--efficiency", "speed=1"), "no efficiency is named 'speed'"),
        ((*GPU[1:], "--requests", "1,x"), "--requests is '1,x': give whole numbers"),
        ((*GPU[1:], "--guesses", "0"), "--guesses is '0': give whole numbers from 1"),
        ((*GPU[1:], "--guesses", "257"), "give whole numbers from 1 to 256"),
        (
            (*GPU[1:], "--weight-bits", "1e308"),
            "weight_bits is 1e+308: it must be a number above 0, 64 at most",
        ),
        ((*GPU[1:], "--efficiency", "bandwidth=1e-320"), "it must be a share of the data sheet"),
        ((*GPU[1:], "--out", "no/folder/costs.json"), "there is no such folder"),
        (("--out", "/"), "--out is /, which is a folder"),
        (("--target", "qwen3-8b"), "--target has no meaning where passes are measured: add --gpu"),
        (("--published", "llama"), "no published costs are named 'llama'"),
        (("--published", "llama3.1-8b@h100", "--set", "a=b"), "--set has no meaning"),
        (("--costs", "none.json"), "cannot read the costs none.json"),
        (("--cores", "0"), "--cores is '0'"),
        (("--mode", "swiftspec"), "No such option"),
    ],
)
def test_what_cannot_be_honoured_is_refused(run: Run, options: tuple[str, ...], message: str) -> None:
    result = run("profile", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
