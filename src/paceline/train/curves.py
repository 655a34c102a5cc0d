"""The training's metrics as files: one JSON line per record, and a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
PICTURE = "curves.svg"

_MEAN_OF = 20


class Metrics:
    """Appends records to a file. A resumed training forgets those after the state it starts from."""

    def __init__(self, path: Path, update: int) -> None:
        self.path = path
        kept = [line for line in _lines(path) if json.loads(line)["update"] <= update]
        path.write_text("".join(kept), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def add(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _lines(path)]


def _lines(path: Path) -> list[str]:
    """The complete ones."""
    if not path.exists():
        return []
    return [
        line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")
    ]


def draw(records: Sequence[dict[str, Any]], path: Path) -> bool:
    """Loss, shares of accepted tokens by step, and held-out acceptance lengths, as a picture whose kind the
    ending says. False if matplotlib (the extra `train`) is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    updates = [record for record in records if "loss" in record]
    evaluations = [record for record in records if "acceptance" in record]
    figure, (loss, alpha, length) = pyplot.subplots(1, 3, figsize=(14, 4), layout="constrained")
    loss.plot(*_means(updates, lambda record: record["loss"]))
    loss.set(title="loss", xlabel="update")
    for step in range(max((len(record["alpha"]) for record in updates), default=0)):
        having = [record for record in updates if len(record["alpha"]) > step]
        alpha.plot(*_means(having, lambda record, step=step: record["alpha"][step]), label=f"step {step + 1}")
    alpha.set(title="share accepted in training", xlabel="update")
    numbers = evaluations[0]["acceptance"]["all"] if evaluations else {}
    for depth in [name for name in numbers if name[0] == "k"]:
        values = [record["acceptance"]["all"][depth] for record in evaluations]
        length.plot([record["update"] for record in evaluations], values, marker="o", label=depth)
    length.set(title="held-out acceptance length", xlabel="update")
    for axes in (alpha, length):
        if axes.lines:
            axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
    return True


def _means(records: Sequence[dict[str, Any]], value: Any) -> tuple[list[int], list[float]]:
    groups = [records[at : at + _MEAN_OF] for at in range(0, len(records), _MEAN_OF)]
    return (
        [group[-1]["update"] for group in groups],
        [sum(map(value, group)) / len(group) for group in groups],
    )
