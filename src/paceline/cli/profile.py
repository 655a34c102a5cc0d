"""`paceline profile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from paceline.cli._options import check_writable
from paceline.config import Config, Device, Dtype, load_config
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.cli._costs import Asked
    from paceline.profiling.fit import FitError
    from paceline.profiling.plan import Plan
    from paceline.sim.costs.model import CostModel

_MEASURED = ("model", "draft", "dtype", "draft_dtype", "device", "config_file", "overrides", "cores", "quick")
_ROOFLINE = ("target", "draft_model", "tensor_parallel", "draft_tensor_parallel", "weight_bits", "efficiency")
_FILE = click.Path(path_type=Path)


@click.command("profile")
@click.option("--model", help='"embedded", a directory, a GGUF file or a Hugging Face name.')
@click.option("--draft", help="Drafters, joined by +.  [default: all that need nothing more]")
@click.option("--dtype", type=click.Choice(get_args(Dtype)), help="How weights are held and multiplied.")
@click.option("--draft-dtype", type=click.Choice(get_args(Dtype)), help="The same, of drafters with weights.")
@click.option("--device", type=click.Choice(get_args(Device)))
@click.option("--config", "config_file", type=_FILE, metavar="FILE", help="TOML file.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set any configuration key.")
@click.option(
    "--cores",
    metavar="LIST",
    help="Numbers of them, as 2,1.  [default: all; if not --quick, half, too]",
)
@click.option("--quick", is_flag=True, help="Fewer sizes and repetitions.")
@click.option("--gpu", metavar="NAME", help="Measure nothing: a roofline of this GPU.")
@click.option("--target", metavar="SHAPE", help="Its target: a known name, or a config.json.")
@click.option("--draft-model", metavar="SHAPE", help="Its draft model.")
@click.option("--tensor-parallel", type=int, metavar="N", help="Devices of the target.")
@click.option("--draft-tensor-parallel", type=int, metavar="N", help="Devices of the draft model.")
@click.option("--weight-bits", type=float, metavar="X", help="Bits per weight of both.  [default: 16]")
@click.option("--efficiency", multiple=True, metavar="NAME=X", help="Of the roofline, as bandwidth=0.7.")
@click.option("--costs", type=_FILE, metavar="FILE", help="Measure nothing: show what this file holds.")
@click.option("--published", metavar="NAME", help="Measure nothing: published costs, as llama3.1-8b@h100.")
@click.option("--requests", metavar="LIST", help="Batch sizes of the tables.  [default: 1,4,16]")
@click.option("--contexts", metavar="LIST", help="Tokens of context of each.  [default: 128,768]")
@click.option("--guesses", default="1,3,5,7", metavar="LIST", show_default=True, help="Per request.")
@click.option("--out", type=_FILE, metavar="FILE", help="Write the costs, JSON, for paceline simulate.")
@click.option("--json", "as_json", is_flag=True, help="Print costs and break-even as JSON.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
def command(**values: Any) -> None:
    """Measure what passes and drafters take here, and from which acceptance on guessing pays.

    Target passes and every drafter's questions are timed over batch, context and number of guesses, through
    the engine's own executor, and fitted; points that the fit has not seen say how far it can be trusted.
    With --gpu and --target the same tables come from data sheets.
    """
    sources = [name for name in ("gpu", "costs", "published") if values[name] is not None]
    if len(sources) > 1:
        raise click.UsageError(f"--{sources[0]} and --{sources[1]} are two sources of costs: give one.")
    source = sources[0] if sources else "measured"
    _check_options(source, values)
    asked = _asked(values, measured=source == "measured")
    check_writable("--out", values["out"])
    costs, errors = _costs(source, values)
    _report(costs, errors, asked, values)


def _costs(source: str, values: dict[str, Any]) -> tuple[CostModel, dict[str, FitError]]:
    """errors: of measured costs."""
    if source == "gpu":
        return _roofline(values), {}
    if source == "costs":
        from paceline.sim.costs.model import load_costs

        return load_costs(values["costs"]), {}
    if source == "published":
        from paceline.sim.costs.published import published

        return published(values["published"]), {}
    return _measured(values)


def _report(costs: CostModel, errors: dict[str, FitError], asked: Asked, values: dict[str, Any]) -> None:
    from paceline.cli._costs import json_of, text_of
    from paceline.sim.costs.model import save_costs

    if values["out"] is not None:
        save_costs(values["out"], costs)
    click.echo(json.dumps(json_of(costs, asked)) if values["as_json"] else text_of(costs, asked, errors))
    if values["out"] is not None and not values["as_json"]:
        click.echo(f"\nwritten to {values['out']}")


# ---------------------------------------------------------------- options


def _check_options(source: str, values: dict[str, Any]) -> None:
    """Options of another source would be ignored, so they are refused."""
    others = {"gpu": _MEASURED, "measured": _ROOFLINE}.get(source, (*_MEASURED, *_ROOFLINE))
    given = [name for name in others if values[name] not in (None, (), False)]
    if given:
        option = {"config_file": "config", "overrides": "set"}.get(given[0], given[0]).replace("_", "-")
        cause = "passes are measured" if source == "measured" else f"--{source} is given"
        remedy = "add --gpu NAME, or leave it out" if source == "measured" else "leave out one of them"
        raise click.UsageError(f"--{option} has no meaning where {cause}: {remedy}.")
    if source == "gpu" and values["target"] is None:
        raise click.UsageError("--gpu needs --target SHAPE, the model whose passes are meant.")
    if values["draft_tensor_parallel"] is not None and values["draft_model"] is None:
        raise click.UsageError("--draft-tensor-parallel needs --draft-model SHAPE.")


def _asked(values: dict[str, Any], *, measured: bool) -> Asked:
    from paceline.cli._costs import Asked

    requests = values["requests"] or ("1,4,16" if measured else "1,8,32,128")
    contexts = values["contexts"] or ("128,768" if measured else "512,4096")
    return Asked(
        _numbers("--requests", requests),
        _numbers("--contexts", contexts, least=0),
        _numbers("--guesses", values["guesses"], most=256),
    )


def _numbers(option: str, text: str, least: int = 1, most: int = 2**24) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(least <= number <= most for number in numbers):
        raise ConfigError(f"{option} is {text!r}: give whole numbers from {least} to {most}, as 1,4,16.")
    return tuple(dict.fromkeys(numbers))


def _roofline(values: dict[str, Any]) -> CostModel:
    from paceline.sim.costs.roofline import efficiency_of, roofline

    settings: dict[str, float] = {}
    for given in values["efficiency"]:
        name, _, number = given.partition("=")
        try:
            settings[name] = float(number)
        except ValueError:
            raise ConfigError(f"--efficiency is {given!r}: write NAME=X, as in bandwidth=0.7.") from None
    return roofline(
        values["gpu"],
        values["target"],
        _or(values["tensor_parallel"], 1),
        draft=values["draft_model"],
        draft_tensor_parallel=_or(values["draft_tensor_parallel"], 1),
        weight_bits=_or(values["weight_bits"], 16.0),
        efficiency=efficiency_of(settings),
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


# ---------------------------------------------------------------- measuring


def _measured(values: dict[str, Any]) -> tuple[CostModel, dict[str, FitError]]:
    options = {name: values[name] for name in ("model", "draft", "dtype", "draft_dtype", "device")}
    config = _with_all_drafters(load_config(values["config_file"], values["overrides"], options))
    cores = _numbers("--cores", values["cores"]) if values["cores"] is not None else None
    from paceline.profiling.plan import QUICK, Plan

    plan = QUICK if values["quick"] else Plan()
    return _profile(config, plan, cores, quiet=values["quiet"])


def _with_all_drafters(config: Config) -> Config:
    """Those without weights, and the head that `auto` finds."""
    from msgspec.structs import replace

    from paceline.drafters.registry import drafters_of

    if config.speculation.draft != "auto":
        return config
    names = [each.name for each in drafters_of(config)]
    names += [name for name in ("ngram", "suffix") if name not in names]
    return replace(config, speculation=replace(config.speculation, draft="+".join(sorted(names))))


def _profile(
    config: Config, plan: Plan, cores: tuple[int, ...] | None, *, quiet: bool
) -> tuple[CostModel, dict[str, FitError]]:
    from tqdm import tqdm

    from paceline.profiling.profile import profile

    shape = "{l_bar}{bar}| {elapsed}"
    with tqdm(total=100, desc="profiling", disable=quiet, leave=False, bar_format=shape) as bar:

        def progress(share: float, what: str) -> None:
            bar.set_description(what, refresh=False)
            bar.update(max(0, round(100 * share) - bar.n))

        found = profile(config, plan, cores, progress)
    return found.costs, found.errors
