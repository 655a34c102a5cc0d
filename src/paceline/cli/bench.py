"""`paceline bench`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from paceline.cli._options import (
    config_of,
    options_of_several_drafters,
    params_of,
    print_config,
    sampling_options,
)
from paceline.config import Config, load_config
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.bench.report import Bound, Report
    from paceline.bench.run import Matrix, Measured
    from paceline.bench.settings import Settings
    from paceline.bench.store import CellStore
    from paceline.sim.metrics import Slo

Function = TypeVar("Function", bound=Callable[..., Any])

_PATH = click.Path(path_type=Path)
_DRAFTERS = "none,auto"
_TIMEOUT_S = 600.0
_NO_PREFIX_CACHE = "scheduler.prefix_cache=false"
"""Every prompt recurs at every load: what is kept of it would be measured instead of its computing. `--set`
goes before."""

_MATRIX = [
    click.option(
        "--drafters",
        metavar="LIST",
        help="none, and what --draft takes elsewhere, options behind a colon, as in none,ngram:k=3,eagle3.  "
        f"[default: {_DRAFTERS}]",
    ),
    click.option("--workloads", metavar="LIST", help="Of chat, code, edit, maths, summary.  [default: all]"),
    click.option(
        "--data", type=_PATH, metavar="DIR", help="Their prompt files; without it a few of our own serve."
    ),
    click.option(
        "--prompts", type=_PATH, multiple=True, metavar="FILE", help="A workload of yours, JSONL; repeatable."
    ),
    click.option("--batch", metavar="LIST", help="Requests in flight.  [default: 1,4,16]"),
    click.option("--rate", metavar="LIST", help="Requests per second, instead or besides."),
    click.option("--burstiness", type=float, default=1.0, metavar="X", help="Shape of gaps; 1 = Poisson."),
    click.option("--requests", type=int, default=16, metavar="N", show_default=True, help="Per cell."),
    click.option("--repeats", type=int, default=3, metavar="N", show_default=True),
    click.option("--warm-up", type=int, default=16, metavar="N", show_default=True, help="Tokens, untimed."),
    click.option("--longest", type=int, default=1500, metavar="N", show_default=True, help="Prompt tokens."),
    click.option("--raw", is_flag=True, help="Send prompts without the chat template."),
    click.option(
        "--turns",
        type=click.Choice(["workload", "repeat"]),
        default="workload",
        show_default=True,
        help="How long one engine stays before the next takes its turn.",
    ),
]
_SERVERS = [
    click.option(
        "--url",
        "urls",
        multiple=True,
        metavar="[NAME=]URL",
        help="An OpenAI-compatible server instead of an engine here; repeatable.",
    ),
    click.option("--api-key-env", metavar="NAME", help="Environment variable that holds its key."),
    click.option("--timeout", type=float, metavar="S", help="Of a server, per request.  [default: 600]"),
]
_REPORT = [
    click.option("--slo", "slos", multiple=True, metavar="SLO", help="ttft=0.5,tpot=0.05 or a preset."),
    click.option("--bounds", type=_PATH, metavar="FILE", help="Bounds to draw, JSON."),
    click.option("--out", type=_PATH, default=Path("bench"), metavar="DIR", show_default=True),
    click.option("--no-html", is_flag=True, help="Only report.json, which needs no extra."),
    click.option("--report-only", is_flag=True, help="Of the cells that are finished; measure nothing."),
    click.option("--check", is_flag=True, help="Exit code 1 where a check of the report fails."),
    click.option("--quiet", "-q", is_flag=True, help="No progress bar and no table."),
]


def _options(options: Sequence[Callable[[Any], Any]]) -> Callable[[Function], Function]:
    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


@click.command("bench")
@_options(_MATRIX)
@_options(_SERVERS)
@_options(_REPORT)
@options_of_several_drafters
@sampling_options
def command(**values: Any) -> None:
    """Measure every drafter with every workload at every load, and write a report.

    Drafters take turns, and outputs are compared with those without speculation. Finished cells are kept in
    DIR: stopped, the same command goes on where it was.
    """
    base = config_of({**values, "overrides": (_NO_PREFIX_CACHE, *values["overrides"])})
    if values["print_config"]:
        print_config(base)
        return
    from paceline.bench.report import read_bounds
    from paceline.bench.store import CellStore
    from paceline.sim.metrics import parse_slo

    # Everything is refused before the first model is loaded.
    matrix = _matrix(base, values)
    slos = [parse_slo(text) for text in values["slos"]]
    bounds = read_bounds(values["bounds"]) if values["bounds"] is not None else []
    if not values["no_html"]:
        from paceline.bench.plots import check_plots

        check_plots()
    store = CellStore(values["out"])
    if not values["report_only"]:
        _measure(matrix, store, quiet=values["quiet"])
    report = _written(matrix, store, slos, bounds, values)
    if values["check"] and any(check.passed is False for check in report.checks):
        click.get_current_context().exit(1)


def _matrix(base: Config, values: dict[str, Any]) -> Matrix:
    from paceline.bench.matrix import loads_of
    from paceline.bench.prompts import workloads_of
    from paceline.bench.run import Matrix

    settings = _settings(values)
    loads = loads_of(values["batch"], values["rate"], values["burstiness"])
    workloads = workloads_of(_listed("--workloads", values["workloads"]), values["data"], values["prompts"])
    if values["repeats"] < 1:
        raise ConfigError(f"--repeats is {values['repeats']}: give a whole number from 1.")
    contenders: Sequence[Measured]
    if values["urls"]:
        contenders = _servers(base, settings, values)
    else:
        for name in ("api_key_env", "timeout"):
            if values[name] is not None:
                raise ConfigError(f"--{name.replace('_', '-')} is for a server: add --url, or leave it out.")
        from paceline.bench.engine_client import EngineContender
        from paceline.bench.matrix import contenders_of

        names = _listed("--drafters", values["drafters"] or _DRAFTERS)
        contenders = [EngineContender(each, settings) for each in contenders_of(names, base, loads)]
    return Matrix(contenders, workloads, loads, values["repeats"], settings, values["turns"])


def _settings(values: dict[str, Any]) -> Settings:
    """Sampled without a seed, outputs could not be compared."""
    from paceline.bench.settings import Settings

    params = params_of({"temperature": 0.0, "max_tokens": 128, "seed": 0} | _given(values))
    return Settings(
        params=replace(params, seed=0 if params.seed is None else params.seed),
        requests=values["requests"],
        longest=values["longest"],
        warm_up=values["warm_up"],
        raw=values["raw"],
        seed=params.seed or 0,
    )


def _given(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _listed(option: str, text: str | None) -> list[str]:
    """Commas between names; one within the options of a drafter is followed by another option."""
    if text is None:
        return []
    names: list[str] = []
    for part in text.split(","):
        within = "=" in part and names and ":" in names[-1] and ":" not in part
        if within:
            names[-1] += f",{part}"
        else:
            names.append(part.strip())
    if not all(names):
        raise ConfigError(f"{option} is {text}: give names with commas between them.")
    return names


def _servers(base: Config, settings: Settings, values: dict[str, Any]) -> Sequence[Measured]:
    from paceline.bench.servers import servers_of

    if values["drafters"] is not None:
        raise ConfigError("--drafters are engines of this process, --url is a server with its own: give one.")
    if base != load_config(None, [_NO_PREFIX_CACHE], {"model": base.model}):
        raise ConfigError(
            "an option says how an engine of this process decodes, but --url measures a server: leave it out."
        )
    if values["model"] is None:
        raise ConfigError("--url needs --model: the name by which the server knows its model.")
    timeout_s = _TIMEOUT_S if values["timeout"] is None else values["timeout"]
    return servers_of(values["urls"], values["model"], settings, values["api_key_env"], timeout_s)


def _measure(matrix: Matrix, store: CellStore, *, quiet: bool) -> None:
    from tqdm import tqdm

    from paceline.bench.run import run
    from paceline.bench.store import CellStore

    total = len(list(matrix.keys()))
    found = sum(not cell.failed for cell in matrix.finished(store))
    with tqdm(total=total, initial=found, desc="bench", unit="cell", disable=True if quiet else None) as bar:

        def done(cell: Any) -> None:
            bar.set_postfix_str(f"{cell.contender}, {cell.workload}", refresh=False)
            bar.update()

        try:
            run(matrix, store, done)
        except KeyboardInterrupt:
            bar.close()
            # Read again: what was interrupted may have been the note that a cell is on disk.
            finished = len(matrix.finished(CellStore(store.path.parent)))
            click.echo(
                f"stopped: {finished} of {total} cells are in {store.path}; the same command goes on from "
                "there, --report-only makes a report of them.",
                err=True,
            )
            raise


def _written(
    matrix: Matrix, store: CellStore, slos: Sequence[Slo], bounds: Sequence[Bound], values: dict[str, Any]
) -> Report:
    from paceline.bench.report import report_of, write_report

    cells = matrix.finished(store)
    if not cells:
        raise ConfigError(f"{store.path} has no finished cell of this matrix: leave out --report-only.")
    expected = len(list(matrix.keys()))
    report = report_of(cells, matrix.settings, expected=expected, slos=slos, bounds=bounds)
    html = None
    if not values["no_html"]:
        from paceline.bench.page import page_of
        from paceline.bench.plots import plots_of

        html = page_of(report, plots_of(report))
    written = write_report(report, values["out"], html)
    if not values["quiet"]:
        _say(report, len(store) - len(cells))
        click.echo(f"written: {', '.join(map(str, written))}", err=True)
    return report


def _say(report: Report, others: int) -> None:
    from paceline.bench.matrix import PLAIN
    from paceline.bench.page import throughput

    if PLAIN not in report.contenders:
        click.echo(f"without {PLAIN} among the contenders there are no speed-ups.", err=True)
    for cells in throughput(report):
        click.echo("| " + " | ".join(cells) + " |")
    for check in report.checks:
        click.echo(check.line())
    if others:
        click.echo(
            f"{others} cells in the same file are of another configuration or version and were not used.",
            err=True,
        )
