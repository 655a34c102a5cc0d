"""Fits what is fitted of `published("llama3.1-8b@h100-calibrated")`, and says how well it predicts.

    python benchmarks/study_costs.py TRACE.jsonl ... [--held-out TRACE.jsonl ...] [--sharpness P ...]

Two constants are fitted, by least squares of relative errors, to the speed-ups that figure 1 of arXiv
2601.11580 measured on the data sets of the traces: seconds per token of a pass (which tell the share of the
hardware's arithmetic that is reached), and the host's seconds per request and step. Nothing else is. For
every sharpness of the overlap of memory and compute, and for the published, linear costs, the largest errors
are printed: of the traces fitted on, and of those held out.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from scipy.optimize import least_squares

from paceline.sim.acceptance import read_traces
from paceline.sim.costs.forms import RooflinePass
from paceline.sim.costs.model import CostModel
from paceline.sim.costs.published import published
from paceline.sim.guesses import HEADS, NGRAM
from paceline.sim.papers.figures import dataset_of
from paceline.sim.papers.real_match import decoded, priced
from paceline.sim.papers.study import Setting
from paceline.sim.papers.study_values import HEAD, MEASURED
from paceline.sim.steps import Answer

Decoded = dict[str, dict[Setting, list[Answer]]]
SETTINGS = [Setting(NGRAM, 3), Setting(NGRAM, 5), Setting(HEADS[0], 3)]
START = np.array([2.5e-5, 1.5e-5])  # seconds per token; seconds per request


def read(paths: Sequence[Path]) -> Decoded:
    found: Decoded = {}
    for path in paths:
        traces = read_traces(path)
        dataset = dataset_of(traces)
        if dataset is None:
            raise SystemExit(f"{path}: nothing was measured on such a data set")
        found[dataset] = decoded(traces.requests, SETTINGS)
    return found


def errors(data: Decoded, costs: CostModel) -> dict[str, list[float]]:
    """Relative, by drafter and length."""
    found: dict[str, list[float]] = {}
    for dataset, answers in data.items():
        for setting, each in answers.items():
            series = NGRAM if setting.drafter == NGRAM else HEAD
            measured = MEASURED.get((dataset, series, setting.guesses))
            if measured is None:
                continue
            speedups = priced({setting: each}, costs)[setting].speedups
            name = f"{setting.drafter} k={setting.guesses}"
            found.setdefault(name, []).extend(a / b - 1 for a, b in zip(speedups, measured, strict=True))
    return found


def with_constants(per_token: float, per_request: float, sharpness: float) -> CostModel:
    costs = published("llama3.1-8b@h100-calibrated")
    assert isinstance(costs.target, RooflinePass)
    target = msgspec.structs.replace(costs.target, per_token_s=per_token, sharpness=sharpness)
    return replace(costs, target=target, request_overhead_s=per_request)


def fitted(data: Decoded, sharpness: float) -> CostModel:
    def residuals(factors: np.ndarray) -> np.ndarray:
        costs = with_constants(*map(float, factors * START), sharpness)
        return np.array([each for row in errors(data, costs).values() for each in row])

    found = least_squares(residuals, np.ones(2), bounds=(0.0, 5.0), diff_step=1e-3, xtol=1e-3, ftol=1e-3)
    return with_constants(*map(float, found.x * START), sharpness)


def report(name: str, costs: CostModel, fit: Decoded, held: Decoded) -> None:
    said = []
    for label, data in (("fitted on", fit), ("held out", held)):
        worst = ", ".join(f"{series} {max(map(abs, row)):.1%}" for series, row in errors(data, costs).items())
        said += [f"{label}: {worst}"] if worst else []
    print(f"{name}; largest errors {'; '.join(said)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--held-out", type=Path, nargs="+", default=[])
    parser.add_argument("--sharpness", type=float, nargs="+", default=[1.0, 1.5, 2.0, 3.0])
    args = parser.parse_args()
    fit, held = read(args.traces), read(args.held_out)
    report("published, linear", published("llama3.1-8b@h100"), fit, held)
    report("calibrated, as it is", published("llama3.1-8b@h100-calibrated"), fit, held)
    for sharpness in args.sharpness:
        costs = fitted(fit, sharpness)
        assert isinstance(costs.target, RooflinePass)
        name = (
            f"sharpness {sharpness}: {costs.target.per_token_s * 1e6:.2f} us per token, "
            f"{costs.request_overhead_s * 1e6:.2f} us per request"
        )
        report(name, costs, fit, held)


if __name__ == "__main__":
    main()
