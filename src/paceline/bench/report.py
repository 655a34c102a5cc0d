"""The report as data, `report.json`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from paceline import __version__
from paceline.bench.checks import Check, checks_of
from paceline.bench.matrix import Load
from paceline.bench.records import Cell
from paceline.bench.settings import Settings, machine
from paceline.bench.summary import Row, rows_of
from paceline.errors import ConfigError, EngineError
from paceline.sim.metrics import Slo

JSON = "report.json"


class Bound(Struct, forbid_unknown_fields=True, kw_only=True):
    """A speed-up that something could reach at most, to be drawn beside what was: a `sim.bounds.Bound`
    with the workload and the batch that it is of, None = every one."""

    name: str
    speedup: float
    workload: str | None = None
    batch: int | None = None
    tokens_per_s: float | None = None
    requests: int | None = None
    charged: str | None = None


class _SimulatedBound(Struct):
    name: str
    tokens_per_s: float
    speedup: float
    charged: str


class _SimulatedBounds(Struct):
    batch: int
    rows: list[_SimulatedBound]


class _Simulation(Struct):
    """What `paceline simulate --json` prints, as far as it is about bounds."""

    bounds: _SimulatedBounds


class Report(Struct, kw_only=True):
    """expected: cells of the matrix; `cells` of them are finished."""

    format: str = "paceline-bench"
    version: int = 1
    paceline: str = __version__
    created: str
    machine: str
    settings: dict[str, Any]
    contenders: list[str]
    workloads: list[str]
    loads: list[str]
    slos: list[str]
    expected: int
    cells: int
    rows: list[Row]
    checks: list[Check]
    bounds: list[Bound] = []


def report_of(
    cells: Sequence[Cell],
    settings: Settings,
    *,
    expected: int,
    slos: Sequence[Slo] = (),
    bounds: Sequence[Bound] = (),
) -> Report:
    """Times of creation are in UTC."""
    return Report(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(),
        settings=settings.description,
        contenders=_in_order(cell.contender for cell in cells),
        workloads=_in_order(cell.workload for cell in cells),
        loads=_in_order(Load(cell.batch, cell.rate, cell.burstiness).name for cell in cells),
        slos=[slo.name for slo in slos],
        expected=expected,
        cells=len(cells),
        rows=rows_of(cells, slos),
        checks=checks_of(cells),
        bounds=list(bounds),
    )


def _in_order(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def read_bounds(path: Path) -> list[Bound]:
    """A JSON list of objects with name, speedup and, optionally, workload and batch, or what
    `paceline simulate --json` printed. Raises ConfigError."""
    try:
        read = msgspec.json.decode(path.read_bytes(), type=list[Bound] | _Simulation)
    except OSError as error:
        raise ConfigError(f"cannot read the bounds {path}: {error.strerror}.") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path} holds no bounds ({error}): give what `paceline simulate --json` prints, or a list of "
            "objects with name, speedup and, where they do not hold everywhere, workload and batch."
        ) from None
    bounds = read if isinstance(read, list) else _of_simulation(read.bounds)
    wrong = next((bound for bound in bounds if bound.speedup <= 0), None)
    if wrong is not None:
        raise ConfigError(f"{path}: the bound {wrong.name} is {wrong.speedup:g}: give a number above 0.")
    return bounds


def _of_simulation(said: _SimulatedBounds) -> list[Bound]:
    """They are of the simulated run's own mean batch."""
    return [
        Bound(
            name=each.name,
            speedup=each.speedup,
            batch=said.batch,
            tokens_per_s=each.tokens_per_s,
            charged=each.charged,
        )
        for each in said.rows
    ]


def write_report(report: Report, folder: Path, html: str | None) -> list[Path]:
    """The files written. Raises EngineError."""
    contents = {JSON: msgspec.json.format(msgspec.json.encode(report), indent=1)}
    if html is not None:
        contents["report.html"] = html.encode()
    written = []
    for name, content in contents.items():
        path = folder / name
        try:
            path.write_bytes(content)
        except OSError as error:
            raise EngineError(f"cannot write {path}: {error.strerror}.") from None
        written.append(path)
    return written
