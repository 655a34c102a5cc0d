"""The published simulator: the same numbers as the study's figures, and as a plain restatement of it."""

from __future__ import annotations

import random

import pytest

from paceline.sim.acceptance import RequestTrace, TraceSet, read_traces
from paceline.sim.papers.figures import Row, dataset_of, figure
from paceline.sim.papers.study import COMBINED, Charge, Setting, chance_found, speedups, usable
from tests.sim.data import needs_traces, published, request

KV, TOKEN, FIXED = 3.92645679e-8, 2.10103129e-5, 5.88590713e-3
HEAD_KV, HEAD_TOKEN, HEAD_FIXED = 2.37768493e-9, 8.41429603e-7, 2.13526175e-3
LOOKUP, OVERHEAD = 0.005875, 1.20683946e-3


def restated(
    traces: list[RequestTrace], setting: Setting, found: float, batch: int, charge: Charge = "published"
) -> float:
    """One clone after the other, without arrays."""
    rng = random.Random(42)
    rates: tuple[list[float], list[float]] = [], []
    for trace in rng.sample(traces, min(300, len(traces))):
        ngram, head = (trace.drafters[name].accepted for name in ("ngram", "eagle"))
        total = {"ngram": len(ngram), "eagle": len(head)}.get(setting.drafter, min(len(ngram), len(head)))
        prompt = len(trace.prompt)
        prefill = FIXED + TOKEN * batch * prompt + OVERHEAD
        plain = prefill + sum(
            FIXED + KV * batch * (prompt + at) + TOKEN * batch + OVERHEAD for at in range(1, total)
        )
        clones, at = [prefill] * batch, 1
        while at < total:
            pair = ngram[min(at, len(ngram)) - 1], head[min(at, len(head)) - 1]
            right = {"ngram": pair[0], "eagle": pair[1]}.get(setting.drafter, max(pair))
            length = right if setting.guesses is None else setting.guesses + 1
            sizes = [length] * batch
            if setting.drafter == "ngram" and setting.guesses is not None and right == 1:
                sizes = [length if rng.random() < found else 1 for _ in range(batch)]
            kv = batch * (prompt + at)
            verify = FIXED + KV * kv + TOKEN * sum(sizes)
            last = at + min(right, length) >= total
            for clone in range(batch):
                asked_head = HEAD_FIXED + HEAD_KV * kv + HEAD_TOKEN * length
                lookup = LOOKUP * verify
                if setting.drafter == "ngram":
                    draft = lookup if sizes[clone] > 1 else 0.0
                elif setting.drafter == "eagle":
                    draft = asked_head
                else:
                    draft = {
                        "published": lookup,
                        "winner": asked_head if pair[1] > pair[0] else lookup,
                        "always": asked_head + lookup,
                    }[charge]
                clones[clone] += verify + draft + OVERHEAD
                kv += -(prompt + at) if last else min(right, length)
            at += min(right, length)
        rates[0].append(batch * total / plain)
        rates[1].append(batch * total / (sum(clones) / batch))
    return sum(rates[1]) / sum(rates[0])


def made_up(seed: int, count: int = 7) -> list[RequestTrace]:
    rng = random.Random(seed)

    def lengths(size: int) -> list[int]:
        return [1, *(rng.choice([1, 1, 2, 3, 5, 9]) for _ in range(size - 1))]

    requests = []
    for index in range(count):
        size, other = rng.randrange(1, 30), rng.randrange(1, 30)
        prompt = [rng.randrange(9) for _ in range(rng.randrange(1, 20))]
        output = [rng.randrange(9) for _ in range(size)]
        requests.append(request(str(index), prompt, output, ngram=lengths(size), eagle=lengths(other)))
    return requests


@pytest.mark.parametrize("drafter", ["ngram", "eagle", COMBINED])
@pytest.mark.parametrize("guesses", [1, 3, None])
@pytest.mark.parametrize("batch", [1, 5])
def test_as_restated(drafter: str, guesses: int | None, batch: int) -> None:
    setting, traces = Setting(drafter, guesses), made_up(3)
    (ours,) = speedups(traces, setting, 0.4, [batch])
    assert ours == pytest.approx(restated(traces, setting, 0.4, batch), rel=1e-12)


@pytest.mark.parametrize("charge", ["winner", "always"])
def test_charges_as_restated(charge: Charge) -> None:
    setting, traces = Setting(COMBINED, None), made_up(4)
    (ours,) = speedups(traces, setting, 0.0, [3], charge)
    assert ours == pytest.approx(restated(traces, setting, 0.0, 3, charge), rel=1e-12)


def test_what_has_no_record_is_left_out() -> None:
    traces = [
        request("both", [1], [2, 3], ngram=[1, 1], eagle=[1, 2]),
        request("lookup", [1], [2, 3], ngram=[1, 1]),
        request("neither", [1], [2, 3]),
        request("empty", [1], [], ngram=[], eagle=[]),
    ]
    by_drafter = {
        name: [each.request_id for each in usable(traces, Setting(name, 3))]
        for name in ("ngram", "eagle", COMBINED)
    }
    # What n-grams match is found in the text where it is not recorded.
    assert by_drafter == {"ngram": ["both", "lookup", "neither"], "eagle": ["both"], COMBINED: ["both"]}


def test_chance_found_is_counted_for_other_data_sets() -> None:
    # After 1 2 3 the lookup offers 4, which is wrong; nothing is found before any other token.
    trace = request("a", [1, 2, 3, 4, 1, 2], [3, 9, 9, 9])
    assert chance_found(None, [trace]) == 0.25
    assert chance_found("cnn", [trace]) == 0.4


def test_names_of_data_sets() -> None:
    assert dataset_of(TraceSet("acceptance_llama3.1-8b_GSM8K", None, ())) == "gsm8k"
    assert dataset_of(TraceSet("mine", None, ())) is None
    assert dataset_of(TraceSet("gsm8k", {"target": "mine"}, ())) is None


# ---------------------------------------------------------------- the published values


def rows(name: str, dataset: str, charge: Charge = "published") -> dict[tuple[str, str], Row]:
    found = figure(name, [read_traces(published(dataset))], charge=charge)  # type: ignore[arg-type]
    return {(row.drafter, row.length): row for row in found}


@needs_traces
@pytest.mark.parametrize("dataset", ["gsm8k", "instructcoder"])
def test_figures_10_and_12(dataset: str) -> None:
    ten, twelve = rows("figure10", dataset), rows("figure12", dataset)
    assert set(twelve) - set(ten) == {(COMBINED, "oracle")}
    assert len(ten) == 8
    for row in twelve.values():
        assert row.theirs is not None
        assert row.ours == pytest.approx(row.theirs, abs=0.01)
        assert row.agrees


@needs_traces
@pytest.mark.parametrize(
    ("dataset", "charge", "audited"),
    [
        ("instructcoder", "winner", [4.33, 3.69, 3.24, 2.72, 2.21, 1.82]),
        ("instructcoder", "always", [3.84, 3.35, 2.98, 2.55, 2.11, 1.76]),
        ("gsm8k", "winner", [2.37]),
        ("gsm8k", "always", [2.17]),
    ],
)
def test_one_switch_corrects_the_combination(dataset: str, charge: Charge, audited: list[float]) -> None:
    traces = read_traces(published(dataset)).requests
    ours = speedups(traces, Setting(COMBINED, None), 0.0, [1, 8, 16, 32, 64, 128][: len(audited)], charge)
    assert ours == pytest.approx(audited, abs=0.01)


@needs_traces
@pytest.mark.parametrize("dataset", ["gsm8k", "instructcoder"])
def test_figure_1(dataset: str) -> None:
    found = rows("figure1", dataset)
    for (drafter, length), row in found.items():
        within = {("ngram", "k=3"): 0.03, ("ngram", "k=5"): 0.04, ("eagle", "k=3"): 0.06}[drafter, length]
        if row.theirs is None:
            assert (dataset, drafter, length) == ("gsm8k", "ngram", "k=5")  # nobody measured it
            continue
        assert row.ours == pytest.approx(row.theirs, rel=within)
        assert row.agrees


# ---------------------------------------------------------------- traces that nobody has seen


@pytest.mark.parametrize("name", ["figure1", "figure10", "figure12"])
def test_any_traces_of_the_format(name: str) -> None:
    traces = TraceSet("mine", None, (*made_up(5, 12), request("one", [1], [2]), request("none", [1, 2], [])))
    found = list(figure(name, [traces]))  # type: ignore[arg-type]
    assert {row.drafter for row in found} >= {"ngram", "eagle"}
    assert all(0.2 < value < 12 for row in found for value in row.ours)
    assert all(row.theirs is None and row.agrees is None and row.differences == [] for row in found)


@pytest.mark.parametrize("name", ["figure1", "figure10", "figure12"])
def test_traces_without_a_head(name: str) -> None:
    traces = TraceSet("gsm8k", None, (request("a", [1, 2, 3, 4], [1, 2, 3, 4, 1, 2]), request("b", [1], [2])))
    assert {row.drafter for row in figure(name, [traces])} == {"ngram"}  # type: ignore[arg-type]


def test_only_single_tokens_gain_nothing() -> None:
    traces = TraceSet("mine", None, (request("a", [1], [2], ngram=[1], eagle=[1]),))
    for name in ("figure1", "figure12"):
        assert {value for row in figure(name, [traces]) for value in row.ours} == {1.0}  # type: ignore[arg-type]
