"""`paceline simulate --paper`: figures of a study, computed again beside the published values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import paceline
from paceline.cli._options import refuse_unused
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.sim.acceptance import TraceSet
    from paceline.sim.papers.figures import Row

_ABOUT = {
    "figure1": "measured with vLLM; ours predicted from what n-grams really match",
    "figure10": "as the study's own simulator has it",
    "figure12": "as the study's own simulator has it",
}
_USED = ("paper", "traces", "more_traces", "draft_charge", "check", "json_output", "quiet")
_SHARED = Path("shared") / "data" / "traces"
_NAMES = ("acceptance_llama3.1-8b_*.jsonl", "combined_*.jsonl")


def run(name: str, values: Mapping[str, Any]) -> None:
    """values: `traces` and `more_traces` (paths, if any), `draft_charge`, `check`, `json_output`.

    Exits with 1 where `check` is asked for and a value is out of tolerance. Raises ConfigError.
    """
    from paceline.sim.acceptance import read_traces
    from paceline.sim.papers.figures import figure

    refuse_unused(_USED, "a figure of a study")
    paths = _paths([*values["traces"], *values["more_traces"]])
    sets = [read_traces(path) for path in paths]
    if len({traces.name for traces in sets}) < len(sets):
        sets = [replace(traces, name=str(path)) for traces, path in zip(sets, paths, strict=True)]
    rows: list[Row] = []
    printed = not values.get("json_output")
    for row in figure(name, sets, charge=values.get("draft_charge") or "published"):  # type: ignore[arg-type]
        if printed:
            _print(name, row, rows[-1] if rows else None, sets)
        rows.append(row)
    verdict = _verdict(rows)
    if not printed:
        click.echo(json.dumps(_object(name, rows, verdict)))
    elif verdict is not None:
        click.echo("\n" + _said(rows))
    if values.get("check"):
        _check(name, verdict)


def _check(name: str, verdict: bool | None) -> None:
    if verdict is None:
        raise ConfigError(
            f"--check: {name} has no published value for these traces: their files' names must hold that "
            "of a published data set, as gsm8k or instructcoder."
        )
    if not verdict:
        raise SystemExit(1)


# ---------------------------------------------------------------- where the traces are


def _paths(given: Sequence[Path]) -> list[Path]:
    if given:
        return list(given)
    found = next((paths for folder in _folders() if (paths := _published(folder))), None)
    if found is None:
        raise ConfigError(
            f"there are no published traces in {_SHARED} here or above: give --traces FILE; they are in "
            "data/ of the study's repository, SpecDecode-Bench/simulator on GitHub."
        )
    return found


def _folders() -> Iterator[Path]:
    here, package = Path.cwd(), Path(paceline.__file__).resolve()
    for folder in (here, *here.parents, *package.parents):
        yield folder / _SHARED


def _published(folder: Path) -> list[Path]:
    return sorted(path for name in _NAMES for path in folder.glob(name))


# ---------------------------------------------------------------- what is said


def _print(name: str, row: Row, before: Row | None, sets: Iterable[TraceSet]) -> None:
    """One row, and what stands over a file's first one."""
    there = next(len(traces.requests) for traces in sets if traces.name == row.traces)
    if before is None or before.traces != row.traces:
        click.echo(f"{'' if before is None else chr(10)}{name}, {_ABOUT[name]}")
        click.echo(f"{row.traces}: {there} requests, speed-ups by batch size\n")
        click.echo(_line("", "", [str(batch) for batch in row.batches]))
    label = f"{row.drafter} {row.length}" + (f" ({row.requests})" if row.requests != there else "")
    click.echo(_line(label, "ours", [f"{ours:.3f}" for ours in row.ours]))
    if row.theirs is None:
        return
    relative = row.within is not None and row.within.relative
    click.echo(_line("", "published", [f"{theirs:.{3 if relative else 2}f}" for theirs in row.theirs]))
    differences = [f"{each:+.1%}" if relative else f"{each:+.3f}" for each in row.differences]
    mark = "  out of tolerance" if row.agrees is False else ""
    click.echo(_line("", "difference", differences) + mark)


def _line(label: str, kind: str, cells: Iterable[str]) -> str:
    return f"{label:<24}{kind:<10}" + "".join(f"{cell:>8}" for cell in cells)


def _verdict(rows: Iterable[Row]) -> bool | None:
    judged = [row.agrees for row in rows if row.agrees is not None]
    return all(judged) if judged else None


def _said(rows: Iterable[Row]) -> str:
    judged = [row for row in rows if row.agrees is not None]
    out = sum(not row.agrees for row in judged)
    return f"{len(judged) - out} of {len(judged)} rows are within their tolerance at every batch size"


def _object(name: str, rows: Iterable[Row], verdict: bool | None) -> dict[str, Any]:
    return {
        "figure": name,
        "rows": [
            {
                "traces": row.traces,
                "drafter": row.drafter,
                "length": row.length,
                "requests": row.requests,
                "batches": row.batches,
                "ours": row.ours,
                "published": row.theirs,
                "differences": row.differences,
                "tolerance": row.within.most if row.within else None,
                "relative": row.within.relative if row.within else None,
                "agrees": row.agrees,
            }
            for row in rows
        ],
        "agrees": verdict,
    }
