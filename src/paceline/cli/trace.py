"""`paceline trace`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli._options import config_of, engine_options, params_of, print_config, sampling_options
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.tracing.pipeline import TracePlan, TraceReport

_PATH = click.Path(path_type=Path)


@click.command("trace")
@engine_options
@sampling_options
@click.option("--data", type=_PATH, metavar="FILE", help="Prompts, JSONL, .gz or not.")
@click.option("--out", type=_PATH, metavar="FILE", help="The traces, JSONL.")
@click.option("--depth", type=int, default=20, metavar="N", show_default=True, help="Guesses at each place.")
@click.option(
    "--top", type=int, default=8, metavar="N", show_default=True, help="Candidates kept of the first guess."
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N prompts.")
@click.option("--raw", is_flag=True, help="Continue prompts without the chat template.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar and no summary.")
def command(**values: Any) -> None:
    """Record what drafters are worth, at every place of the target's answers to --data.

    The target answers each prompt once. Then every drafter of --draft (as eagle3+suffix+ngram) is asked for
    --depth guesses after each token of the answer, and it is recorded how many of them the target agrees
    with, how sure the drafter was, and what else it thought of. `paceline simulate` replays such files.

    Stopped, the same command goes on where it was.
    """
    config = config_of(values)
    if values["print_config"]:
        print_config(config)
        return
    if values["data"] is None or values["out"] is None:
        raise click.UsageError("Give --data FILE with prompts and --out FILE for the traces.")
    params = params_of(values)
    if values["out"].is_dir():
        raise ConfigError(f"--out is {values['out']}, which is a folder: give the name of a file.")
    from paceline.tracing.pipeline import TracePlan
    from paceline.tracing.tracer import Depth

    greedy = replace(params, temperature=0.0) if params.temperature is None else params
    plan = TracePlan(
        config=config,
        data=values["data"],
        params=replace(greedy, seed=None),
        seed=params.seed or 0,
        depth=Depth(values["depth"], values["top"]),
        raw=values["raw"],
        limit=values["limit"],
    )
    report = _trace(plan, values["out"], quiet=values["quiet"])
    if not values["quiet"]:
        _say(report, values["out"])


def _trace(plan: TracePlan, out: Path, *, quiet: bool) -> TraceReport:
    from tqdm import tqdm

    from paceline.tracing.pipeline import trace

    with tqdm(desc="tracing", unit="request", disable=quiet) as bar:

        def progress(done: int, total: int, tokens: int) -> None:
            bar.total = total
            bar.n = done
            bar.set_postfix(tokens=tokens)

        return trace(plan, out, progress=progress)


def _say(report: TraceReport, out: Path) -> None:
    for name, problems in report.problems.items():
        for problem, count in problems.items():
            click.echo(f"{name} drafted nothing at {count} places: {problem}", err=True)
    click.echo(
        f"{out} has {report.requests} requests, {report.tokens} tokens of them from this run", err=True
    )
