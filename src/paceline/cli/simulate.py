"""`paceline simulate`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from paceline.cli._options import refuse_unused
from paceline.config import Growth, Mode, Placement, load_config
from paceline.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from paceline.core.engine_core import CoreConfig
    from paceline.sim.acceptance import RequestTrace
    from paceline.sim.costs.model import CostModel
    from paceline.sim.run.requests import SimRequest

_STUDY = "paceline.cli._simulate_paper:run"
_PAPERS = {
    **dict.fromkeys(("figure1", "figure10", "figure12"), _STUDY),
    "swiftspec": "paceline.cli._simulate_swiftspec:run_paper",
}
"""What reproduces published figures, by name: "module:function", called with the name and the options."""
_OPTIONS = (
    "draft",
    "num_speculative_tokens",
    "mode",
    "placement",
    "growth",
    "max_num_seqs",
    "max_batch_tokens",
    "kv_tokens",
)
_MOST_BOUNDED = 100
"""Requests by which bounds are found, the first ones."""
_MOST_REQUESTS = 10**7
_FILE = click.Path(path_type=Path)


@click.command("simulate")
@click.option(
    "--traces",
    type=_FILE,
    multiple=True,
    metavar="FILE",
    help="Texts, and what drafters got.",
)
@click.argument("more_traces", type=_FILE, nargs=-1, metavar="")
@click.option("--lengths", type=_FILE, metavar="CSV", help="Arrivals and lengths, as Azure's traces of 2023.")
@click.option("--requests", "count", type=int, metavar="N", help="So many.  [default: all there are]")
@click.option("--rate", type=float, metavar="R", help="Requests per second, at random.")
@click.option(
    "--burstiness",
    type=float,
    metavar="G",
    help="Shape of their gaps; below 1 = bursts.  [default: 1, Poisson]",
)
@click.option("--concurrency", type=int, metavar="N", help="So many at any time, at most.")
@click.option("--speed", type=float, metavar="X", help="--lengths, X times faster.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of draws and arrivals.")
@click.option("--costs", type=_FILE, metavar="FILE", help="What passes take: a file of paceline profile.")
@click.option("--published", metavar="NAME", help='Published costs instead, as "llama3.1-8b@h100".')
@click.option("--gpu", metavar="NAME", help="A roofline instead: H100, H200, A100, ...; with --target.")
@click.option("--target", metavar="NAME", help="The model's shape, as llama-3.1-8b, or its config.json.")
@click.option("--draft-model", metavar="NAME", help='The same, of the drafter "draft".')
@click.option("--tensor-parallel", type=int, metavar="N", help="GPUs of the target.  [default: 1]")
@click.option(
    "--draft", help='"none", "ngram", "suffix", a recorded drafter\'s name; or several, joined by +.'
)
@click.option("--num-speculative-tokens", type=int, metavar="N", help="Guesses per step.")
@click.option("--placement", type=click.Choice(get_args(Placement)), help="Where draft and target run.")
@click.option("--mode", type=click.Choice(get_args(Mode)), help="How they work together.")
@click.option("--growth", type=click.Choice(get_args(Growth)), help="How trees grow.")
@click.option("--max-num-seqs", type=int, metavar="N", help="Requests running at once.")
@click.option("--max-batch-tokens", type=int, metavar="N", help="Tokens in one pass.")
@click.option("--kv-tokens", type=int, metavar="N", help="Tokens of KV cache in all.")
@click.option("--shares", metavar="T,D", help="Speeds of target and drafter while both use one device.")
@click.option("--config", "config_file", type=_FILE, metavar="FILE", help="TOML file, as of an engine.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set any configuration key.")
@click.option("--slo", "slos", multiple=True, metavar="NAME", help="Goodput under a service level.")
@click.option("--paper", type=click.Choice(sorted(_PAPERS)), help="Reproduce published figures.")
@click.option(
    "--draft-charge",
    type=click.Choice(["published", "winner", "always"]),
    help="Of figure12: whose drafting the oracle over both drafters pays for.",
)
@click.option("--check", is_flag=True, help="With --paper: exit with 1 if a value is out of tolerance.")
@click.option("--bounds/--no-bounds", default=True, help="What could be reached, beside what is.")
@click.option("--record", type=_FILE, metavar="LOG", help="Write the event log, as an engine does.")
@click.option("--replay", type=_FILE, metavar="LOG", help="An event log of an engine, run again.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
@click.option("--json", "json_output", is_flag=True, help="Print one JSON object instead of the table.")
def command(**values: Any) -> None:
    """Simulate an engine: the policy that is served, on recorded texts, at the costs of a machine.

    Give --traces, and what passes take by one of --costs, --published and --gpu.

    --paper figure10 and figure12 are the simulated figures of arXiv 2601.11580 as its own simulator has them,
    figure1 is what was measured there, predicted from what n-grams really match; swiftspec is arXiv
    2506.11309 by this simulator, its drafter's record drawn anew.
    """
    _check_paper(values)
    if values["paper"] is not None:
        module, _, function = _PAPERS[values["paper"]].partition(":")
        getattr(import_module(module), function)(values["paper"], values)
    elif values["replay"] is not None:
        _replay(values)
    else:
        _simulate(values)


def _check_paper(values: dict[str, Any]) -> None:
    if values["draft_charge"] and _PAPERS.get(values["paper"] or "") != _STUDY:
        raise ConfigError("--draft-charge is of the oracle over both drafters: give --paper figure12.")
    if values["check"] and values["paper"] is None:
        raise ConfigError(f"--check is of published figures: give --paper, one of {', '.join(_PAPERS)}.")


def _simulate(values: dict[str, Any]) -> None:
    from paceline.sim.metrics import parse_slo
    from paceline.sim.report import as_object, bounded, table
    from paceline.sim.run.setup import MODEL_FREE, composed, drafter_names
    from paceline.sim.run.simulator import simulate

    config = load_config(
        values["config_file"], values["overrides"], {name: values[name] for name in _OPTIONS}
    )
    slos = [parse_slo(name) for name in values["slos"]]
    costs, kv_tokens = _costs(values)
    recorded = [name for name in drafter_names(config) if name not in MODEL_FREE]
    traces, trees = _traces(values, recorded)
    setup = composed(config, costs, trees=trees, shares=_shares(values["shares"]), kv_tokens=kv_tokens)
    requests, number = _requests(values, traces, setup.core.limits.context_length)
    with _progress(number, quiet=values["quiet"]) as told, _recording(values["record"], setup.core) as seen:
        result = simulate(
            setup.core,
            requests,
            costs,
            setup.drafters,
            lanes=setup.lanes,
            concurrency=values["concurrency"],
            progress=told,
            observe=seen,
        )
    said = {
        "mode": setup.mode.name,
        "placement": "disaggregated" if setup.lanes.separate else "serial",
        "drafter": setup.names,
        "costs": dict(costs.provenance),
        **as_object(result, slos),
    }
    if values["bounds"]:
        again, _ = _requests(values, traces, setup.core.limits.context_length)
        sample = [each.trace for each in islice(again, _MOST_BOUNDED) if each.trace is not None]
        said["bounds"] = bounded(result, sample, costs, [each.needs.name for each in setup.drafters])
    if values["json_output"]:
        click.echo(json.dumps(said))
        return
    click.echo(f"{said['mode']}, {said['placement']}, drafter {said['drafter']}")
    for line in table(said):
        click.echo(line)


# ---------------------------------------------------------------- what is simulated


def _costs(values: dict[str, Any]) -> tuple[CostModel, int]:
    """And the tokens whose keys and values fit in memory, 0 = not known."""
    given = [name for name in ("costs", "published", "gpu") if values[name] is not None]
    if len(given) != 1:
        raise ConfigError(
            f"{'nothing says' if not given else ' and '.join(f'--{name}' for name in given) + ' both say'} "
            "what passes take: give one of --costs FILE, --published NAME and --gpu NAME."
        )
    if given != ["gpu"]:
        _refuse(values, ("target", "draft_model", "tensor_parallel"), "says something of --gpu")
    if given == ["costs"]:
        from paceline.sim.costs.model import load_costs

        return load_costs(values["costs"]), 0
    if given == ["published"]:
        from paceline.sim.costs.published import published

        return published(values["published"]), 0
    from paceline.sim.costs.roofline import kv_capacity, roofline

    if values["target"] is None:
        raise ConfigError("--gpu needs the target's shape: give --target NAME, as llama-3.1-8b.")
    gpu, target, ranks = values["gpu"], values["target"], _or(values["tensor_parallel"], 1)
    costs = roofline(gpu, target, ranks, draft=values["draft_model"])
    return costs, kv_capacity(gpu, target, ranks)


def _refuse(values: dict[str, Any], names: Iterable[str], reason: str) -> None:
    """Options that would be ignored."""
    for name in names:
        if values[name] is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {reason}: leave it out.")


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _traces(values: dict[str, Any], recorded: Iterable[str]) -> tuple[list[RequestTrace], bool]:
    """Those with the drafters' records, and whether candidates are among these."""
    from paceline.sim.acceptance import read_traces
    from paceline.sim.run.requests import usable

    paths = [*values["traces"], *values["more_traces"]]
    if not paths:
        raise ConfigError("there is nothing to simulate: give --traces FILE, as paceline trace records them.")
    names = list(recorded)
    kept = usable([each for path in paths for each in read_traces(path).requests], names)
    trees = bool(names) and all(each.drafters[name].top is not None for each in kept for name in names)
    return kept, trees


def _requests(
    values: dict[str, Any], traces: list[RequestTrace], context_length: int
) -> tuple[Iterator[SimRequest], int]:
    """And how many."""
    from paceline.sim.run.requests import arriving, sampled, with_lengths
    from paceline.workload import AtOnce, Bursts, Steady, faster, read_lengths, thinned

    count, seed, rate = values["count"], values["seed"], values["rate"]
    when = [f"--{name}" for name in ("lengths", "rate", "concurrency") if values[name] is not None]
    if len(when) > 1:
        raise ConfigError(f"{' and '.join(when)} both say when requests come: leave one out.")
    if count is not None and not 1 <= count <= _MOST_REQUESTS:
        raise ConfigError(f"--requests is {count}: give a whole number from 1 to {_MOST_REQUESTS:,}.")
    if rate is None:
        _refuse(values, ("burstiness",), "is the shape of the gaps of a --rate")
    if values["lengths"] is not None:
        rows = read_lengths(values["lengths"])
        rows = faster(rows if count is None else thinned(rows, count, seed), _or(values["speed"], 1.0))
        return with_lengths(rows, traces, seed, context_length), len(rows)
    _refuse(values, ("speed",), "is that of --lengths")
    arrivals: Any = AtOnce()
    if rate is not None:
        shape = _or(values["burstiness"], 1.0)
        arrivals = Steady(rate) if shape == float("inf") else Bursts(rate, shape, seed)
    chosen = traces if count is None else sampled(traces, count, seed)
    return arriving(chosen, arrivals), len(chosen)


@contextmanager
def _recording(path: Path | None, core: CoreConfig) -> Iterator[Callable[..., None] | None]:
    if path is None:
        yield None
        return
    from paceline.engine.replay import EventLog

    log = EventLog(path)
    try:
        log.begin(core)
        yield log.append
    finally:
        log.close()


def _shares(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        target, draft = map(float, text.split(","))
    except ValueError:
        raise ConfigError(f"--shares {text}: give two numbers from 0 to 1, as 0.8,0.5.") from None
    return target, draft


@contextmanager
def _progress(number: int, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=number, unit=" requests", file=sys.stderr) as bar:

        def told(ended: int, tokens: int) -> None:
            bar.update(ended - bar.n)
            bar.set_postfix_str(f"{tokens:,} tokens", refresh=False)

        yield told


# ---------------------------------------------------------------- a run that was recorded


def _replay(values: dict[str, Any]) -> None:
    """The core alone asks for the same work; and, where models worked in turn, within simulated time."""
    from paceline.engine.replay import replay
    from paceline.sim.report import as_object, table
    from paceline.tracing.replayed import replayed

    refuse_unused(("replay", "json_output", "quiet"), "a log that is run again")
    events = replay(values["replay"])
    said: dict[str, Any] = {"events": events, "identical": True}
    try:
        said["simulated"] = as_object(replayed(values["replay"]))
    except EngineError as error:
        said["not_simulated"] = str(error)
    if values["json_output"]:
        click.echo(json.dumps(said))
        return
    click.echo(f"{events:,} events replayed: the work asked for is the recorded work, all of it")
    for line in ["", *table(said["simulated"])] if "simulated" in said else [said["not_simulated"]]:
        click.echo(line)
