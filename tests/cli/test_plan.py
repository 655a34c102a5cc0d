"""`paceline plan`, from files to a recommendation and to files for other engines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import pytest
from click.testing import Result

import paceline.sim.plan.search
from paceline.sim.acceptance import write_traces
from paceline.sim.costs.model import save_costs
from paceline.sim.plan.export import check_sglang, check_vllm
from tests.sim.lab import COSTS, record
from tests.sim.plan.plans import ROUNDS

Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def short_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paceline.sim.plan.search, "ROUNDS", ROUNDS)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    found = {"traces": tmp_path / "traces.jsonl", "costs": tmp_path / "costs.json"}
    write_traces(found["traces"], {"target": "t"}, [record(number, top=True) for number in range(8)])
    save_costs(found["costs"], COSTS)
    return found


def quick(files: dict[str, Path], *more: str) -> list[str]:
    """A small plan, unless `more` says otherwise."""
    given = ["--traces", str(files["traces"]), "--costs", str(files["costs"]), "--concurrency", "1"]
    few = ["--guesses", "2,auto", "--chunks", "512", "--draft", "ngram", "--draft", "head", "-q"]
    return ["plan", *given, *few, *more]


def test_a_plan_in_words(run: Run, files: dict[str, Path]) -> None:
    result = run(*quick(files))
    assert result.exit_code == 0, result.stderr
    said = " ".join(result.stdout.split())
    for title in ("recommended", "runner-up", "tried", "what would change it", "to paste"):
        assert title in said
    assert re.search(r"[\d.]+ times as good as plain decoding on the same hardware at its best", said)
    for axis in ("acceptance x0.9", "cost of verifying x1.1", "cost of drafting x0.9", "load x2"):
        assert axis in said
    assert "8 recorded requests" in said
    assert all(len(line) <= 100 for line in result.stdout.splitlines())


def test_a_plan_as_json_and_its_files(run: Run, files: dict[str, Path], tmp_path: Path) -> None:
    vllm, sglang = tmp_path / "vllm.json", tmp_path / "sglang.json"
    out = ["--vllm-out", str(vllm), "--sglang-out", str(sglang), "--checkpoint", "head=some/head"]
    result = run(*quick(files, "--json", *out, "--max-batch", "32"))
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    best, plain = plan["recommended"], plan["plain"]
    assert plan["gain"]["ratio"] == pytest.approx(best["value"] / plain["value"])
    assert plan["ranked"][0] == best
    assert plan["runner_up"]["in_words"] != best["in_words"]
    assert len(plan["sensitivity"]) == 8
    assert not plan["search"]["cut_short"]
    check_vllm(json.loads(vllm.read_text()))
    check_sglang(json.loads(sglang.read_text()))
    assert json.loads(vllm.read_text())["num_speculative_tokens_per_batch_size"][-1][1] == 32
    assert plan["written"] == [str(vllm), str(sglang)]
    pasted = run("generate", *plan["options"].replace("+some/head", "").split(), "--print-config")
    assert pasted.exit_code == 0, pasted.stderr


def test_gpus_that_are_not_at_hand(run: Run, files: dict[str, Path]) -> None:
    given = ["--traces", str(files["traces"]), "--gpu", "h100", "--gpus", "2", "--target", "llama-3.1-8b"]
    way = ["--draft", "tree=llama-3.2-1b", "--guesses", "3", "--chunks", "512", "--rate", "3", "--json", "-q"]
    ranks = ["--tensor-parallel", "1", "--draft-tensor-parallel", "1"]
    limits = ["--slo", "mlperf-llama3.1-8b", "--placements", "serial,disaggregated", *ranks]
    result = run("plan", *given, *way, *limits)
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["objective"]["goal"] == "goodput"
    ways = {(each["mode"], each["placed"]["apart"]) for each in plan["ranked"]}
    assert plan["search"]["of"] >= 8
    assert ways <= {
        ("autoregressive", False), ("serial-chain", False), ("serial-tree", False),
        ("swiftspec", True), ("overlapped", True),
    }  # fmt: skip


def test_the_time_bound_is_kept(run: Run, files: dict[str, Path]) -> None:
    started = perf_counter()
    result = run(*quick(files, "--concurrency", "64", "--budget-seconds", "3", "--json"))
    assert perf_counter() - started < 8.0
    if result.exit_code == 0:
        assert json.loads(result.stdout)["search"]["seconds"] < 4.0
    else:
        assert "raise --budget-seconds" in result.stderr


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--gpu", "H100"], "--costs and --gpu both say"),
        (["--burstiness", "0.5"], "--burstiness is for --rate"),
        (["--draft", "ngram=llama-3.2-1b"], "ngram has no model: write ngram alone"),
        (["--vllm-out", "/", "--checkpoint", "head=x"], "--vllm-out is /, which is a folder"),
        (["--rate", "3"], "several options say when requests come"),
        (["--draft", "heads"], "the traces hold no record of a drafter 'heads'"),
        (["--concurrency", "0"], "--concurrency is 0"),
        (["--slo", "ttft=1", "--objective", "p50"], "--slo has no meaning for --objective p50"),
        (["--objective", "goodput"], "give them with --slo"),
        (["--budget-seconds", "nan"], "--budget-seconds is nan"),
        (["--guesses", "x"], "--guesses is 'x'"),
        (["--guesses", "300"], "numbers up to 256"),
        (["--placements", "near"], "--placements has 'near'"),
        (["--vllm-out", "v.json"], "add --checkpoint head=MODEL"),
        (["--checkpoint", "head"], "write NAME=MODEL"),
        (["--checkpoint", "tree=x"], "which is no drafter of this plan"),
        (["--vllm-out", "no/where.json", "--checkpoint", "head=x"], "there is no such folder"),
        (["--target", "llama-3.1-8b"], "--target is for --gpu"),
        (["--gpus", "8"], "--gpus is for --gpu"),
        (["--weight-bits", "8"], "--weight-bits is for --gpu"),
        (["--efficiency", "bandwidth=0.5"], "--efficiency is for --gpu"),
        (["--message-us", "5"], "--message-us is for --gpu"),
        (["--pad-heads"], "--pad-heads is for --gpu"),
        (["--speed", "2"], "--speed is for --lengths"),
        (["--max-output", "1"], "--max-output is 1"),
        (["--message-us", "nan"], "--message-us is nan"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(
    run: Run, files: dict[str, Path], change: list[str], told: str
) -> None:
    result = run(*quick(files, *change))
    assert result.exit_code == 2
    assert told in result.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "there is no workload"),
        (["--traces", "{traces}"], "nothing says what passes take"),
        (["--traces", "{traces}", "--gpu", "H10", "--target", "llama-3.1-8b"], "did you mean 'H100'?"),
        (["--traces", "{traces}", "--gpu", "H100"], "--gpu needs the target's shape"),
        (["--traces", "{traces}", "--gpu", "H100", "--target", "llama-3-70b"], "fit no group of 1 x H100"),
        (
            [
                "--traces",
                "{traces}",
                "--gpu",
                "H100",
                "--gpus",
                "4",
                "--target",
                "llama-3.1-8b",
                "--tensor-parallel",
                "3",
            ],
            "does not divide the 32 heads",
        ),
        (["--traces", "{traces}", "--published", "llama"], "no published costs are named"),
        (["--traces", "{empty}", "--published", "llama3.1-8b@h100"], "holds no request"),
        (["--traces", "{traces}", "--costs", "{nan}"], "nan.json: target.fixed_s"),
        (
            ["--traces", "{traces}", "--gpu", "H100", "--target", "llama-3.1-8b", "--draft", "tree"],
            "write --draft tree=SHAPE",
        ),
        (
            ["--traces", "{traces}", "--gpu", "H100", "--target", "llama-3.1-8b", "--weight-bits", "nan"],
            "weight_bits is nan",
        ),
        (
            ["--traces", "{traces}", "--published", "llama3.1-8b@h100", "--draft", "ngram"],
            "nothing says when",
        ),
    ],
)
def test_inputs_that_make_no_plan(
    run: Run, files: dict[str, Path], tmp_path: Path, options: list[str], told: str
) -> None:
    names = {"traces": files["traces"], "empty": tmp_path / "empty.jsonl", "nan": tmp_path / "nan.json"}
    names["empty"].write_text("")
    names["nan"].write_text(files["costs"].read_text().replace("0.005", "NaN", 1))
    concurrency = [] if told == "nothing says when" else ["--concurrency", "1"]
    result = run("plan", *[each.format(**names) for each in options], *concurrency, "-q")
    assert result.exit_code == 2, result.stdout
    assert told in result.stderr
