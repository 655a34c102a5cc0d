"""The options that several commands share, and what they become: a Config and SamplingParams."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

import click
from click.core import ParameterSource

from paceline.config import OPTION_PATHS, Config, Device, Dtype, Growth, Mode, Placement, load_config, to_toml
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])

_DRAFT_OPTION = click.option(
    "--draft",
    help='"auto", "ngram", "suffix", "layers", "eagle3", "mtp", "none", a model or a head; or several, '
    "joined by +.",
)
_ENGINE_OPTIONS = [
    click.option("--model", help='"embedded", a directory, a GGUF file or a Hugging Face name.'),
    click.option("--num-speculative-tokens", type=int, metavar="N", help="Guesses per step."),
    click.option("--placement", type=click.Choice(get_args(Placement)), help="Where draft and target run."),
    click.option("--mode", type=click.Choice(get_args(Mode)), help="How they work together."),
    click.option("--growth", type=click.Choice(get_args(Growth)), help="How a draft model's tree grows."),
    click.option("--target-devices", metavar="LIST", help="Cores or devices, as 0-3 or 0-3/4-7."),
    click.option("--draft-devices", metavar="LIST", help="The same, of a drafter in its own process."),
    click.option("--draft-address", metavar="TCP", help="tcp://HOST:PORT of `paceline draft`."),
    click.option("--draft-key-file", metavar="FILE", help="The key it was started with."),
    click.option("--dtype", type=click.Choice(get_args(Dtype)), help="How weights are held and multiplied."),
    click.option(
        "--draft-dtype", type=click.Choice(get_args(Dtype)), help="The same, of a drafter with weights."
    ),
    click.option(
        "--unpickle-head",
        is_flag=True,
        default=None,
        help="Read a head's pickled weights, if you trust them.",
    ),
    click.option(
        "--exact/--no-exact", default=None, help="Bit for bit equal to plain decoding on any kernel."
    ),
    click.option("--device", type=click.Choice(get_args(Device))),
    click.option("--threads", type=int, metavar="N", help="Processor cores to use; 0 = all."),
    click.option(
        "--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="TOML file."
    ),
    click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set any configuration key."),
    click.option("--print-config", is_flag=True, help="Print the configuration in force and leave."),
]

_SAMPLING_OPTIONS = [
    click.option("--max-tokens", type=int, metavar="N", help="Tokens to generate at most.  [default: 256]"),
    click.option(
        "--temperature", type=float, metavar="X", help="0 = greedy.  [default: the model's own, or 0]"
    ),
    click.option("--top-k", type=int, metavar="N", help="Keep the N likeliest tokens; 0 = all."),
    click.option(
        "--top-p", type=float, metavar="X", help="Keep the likeliest tokens of total probability X."
    ),
    click.option("--min-p", type=float, metavar="X", help="Keep tokens of at least X times the best's odds."),
    click.option("--repetition-penalty", type=float, metavar="X"),
    click.option("--presence-penalty", type=float, metavar="X"),
    click.option("--frequency-penalty", type=float, metavar="X"),
    click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; may be repeated."),
    click.option("--seed", type=int, metavar="N", help="Of the sampling noise."),
    click.option("--ignore-eos", is_flag=True, default=None, help="Go on after the model's end token."),
]

SAMPLING_NAMES = (
    "max_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "seed",
    "ignore_eos",
    "logprobs",
)


def engine_options(function: Function) -> Function:
    return _decorate(function, [_ENGINE_OPTIONS[0], _DRAFT_OPTION, *_ENGINE_OPTIONS[1:]])


def options_of_several_drafters(function: Function) -> Function:
    """For a command that names drafters in its own way."""
    return _decorate(function, _ENGINE_OPTIONS)


def sampling_options(function: Function) -> Function:
    return _decorate(function, _SAMPLING_OPTIONS)


def trace_option(function: Function) -> Function:
    path = click.Path(path_type=Path)
    text = "Write when draft and target ran, for ui.perfetto.dev."
    return click.option("--trace", type=path, metavar="FILE", help=text)(function)


def _decorate(function: Function, options: Sequence[Callable[[Any], Any]]) -> Function:
    decorated: Any = function
    for option in reversed(options):
        decorated = option(decorated)
    return cast(Function, decorated)


def refuse_unused(used: Collection[str], about: str) -> None:
    """Raises ConfigError for an option that was given to the command that runs and is none of `used`."""
    context = click.get_current_context(silent=True)
    for parameter in context.command.params if context else ():
        given = context is not None and context.get_parameter_source(parameter.name or "")
        if given is ParameterSource.COMMANDLINE and parameter.name not in used:
            raise ConfigError(f"{parameter.opts[0]} says nothing about {about}: leave it out.")


def check_writable(option: str, path: Path | None) -> None:
    """Before what takes long. Raises ConfigError for a file that could not be written at its end."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{option} is {path}: there is no such folder; make it, or choose another.")
    if path.is_dir():
        raise ConfigError(f"{option} is {path}, which is a folder: give the name of a file.")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{option} is {path}, which may not be written: choose another.")


def config_of(values: dict[str, Any]) -> Config:
    """The configuration that a command's option values ask for. Raises ConfigError."""
    # A command's --seed belongs to its requests.
    flat = {name: value for name, value in values.items() if name in OPTION_PATHS and name != "seed"}
    config = load_config(values["config_file"], values["overrides"], flat)
    if config.speculation.suffix_cache == "tenant":
        raise ConfigError(
            "speculation.suffix_cache is tenant but requests of the command line name no tenant, so that "
            "nothing would be learnt: choose shared, or off."
        )
    return config


def params_of(values: dict[str, Any]) -> SamplingParams:
    """Raises RequestError."""
    given = {name: values[name] for name in SAMPLING_NAMES if values.get(name) is not None}
    return SamplingParams(**given)


@contextmanager
def loading(config: Config) -> Iterator[None]:
    """Says on a terminal what takes so long: the first time, kernels are compiled and weights converted."""
    if not sys.stderr.isatty():
        yield
        return
    click.echo(f"loading {config.model} ...", err=True, nl=False)
    try:
        yield
    finally:
        click.echo("\r\x1b[K", err=True, nl=False)


def print_config(config: Config) -> None:
    click.echo(to_toml(config), nl=False)
