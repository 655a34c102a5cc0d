"""`paceline train`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from paceline.cli._interrupt import told_to_stop
from paceline.config import Device, Dtype, load_config
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.engine.llm import LLM
    from paceline.engine.model_setup import ModelSetup
    from paceline.train.pipeline import Places
    from paceline.train.prompts import TrainingPrompt

Function = TypeVar("Function", bound=Callable[..., Any])

_STAGES = ("answers", "capture", "train")
_PATH = click.Path(path_type=Path)

_PLACES = [
    click.option(
        "--target", required=True, help='"embedded", a directory, a GGUF file or a Hugging Face name.'
    ),
    click.option("--out", required=True, type=_PATH, metavar="DIR", help="Where all goes."),
    click.option("--answers", type=_PATH, metavar="FILE", help="[default: DIR/answers.jsonl]"),
    click.option("--features", type=_PATH, metavar="DIR", help="[default: DIR/features]"),
    click.option("--stage", "stages", multiple=True, type=click.Choice(_STAGES), help="Only this one."),
]
_ANSWERS = [
    click.option(
        "--data", type=_PATH, multiple=True, metavar="FILE", help="Prompts, JSONL, .gz or not; repeatable."
    ),
    click.option("--exclude", type=_PATH, multiple=True, metavar="FILE", help="Prompts to keep away from."),
    click.option("--invent", type=int, metavar="N", help="N more prompts, written by the target."),
    click.option("--temperature", type=float, help="Of answers to prompts without one.  [default: 0]"),
    click.option("--max-tokens", type=int, metavar="N", help="Of an answer.  [default: 256]"),
    click.option("--raw", is_flag=True, default=None, help="Continue prompts without the chat template."),
    click.option("--max-num-seqs", type=int, default=48, show_default=True, help="Answers at once."),
]
_HEAD = [
    click.option("--capture", metavar="LIST", help="Layers at whose entry features are taken, as 2,15,27."),
    click.option("--layout", type=click.Choice(["eagle3", "speculators"]), default="eagle3"),
    click.option("--draft-vocab-size", type=int, metavar="N", help="Tokens it can say.  [default: 8192]"),
    click.option("--intermediate-size", type=int, metavar="N", help="[default: the target's]"),
    click.option("--num-kv-heads", type=int, metavar="N", help="[default: the target's]"),
    click.option("--norm-before-residual/--no-norm-before-residual", default=None),
    click.option("--fc-norm/--no-fc-norm", default=None, help="EAGLE 3.1.  [default: fc-norm]"),
    click.option("--norm-output/--no-norm-output", default=None, help="EAGLE 3.1."),
]
_TRAINING = [
    click.option("--minutes", type=float, help="Train for so long, instead of --epochs."),
    click.option("--epochs", type=int, help="Passes over the answers.  [default: 4]"),
    click.option("--loss", type=click.Choice(["kl", "lk_hybrid", "lk_alpha"]), help="[default: lk_hybrid]"),
    click.option("--start", "--init", type=click.Choice(["fit", "target", "random"]), help="[default: fit]"),
    click.option("--steps", type=int, help="Of the training-time test.  [default: 5]"),
    click.option("--ramp", type=float, help="Share of the training in which they grow.  [default: 0.15]"),
    click.option("--decay", type=float, help="Weight of a step against the last.  [default: 0.8]"),
    click.option("--thin/--no-thin", default=None, help="Drop rows instead of weighting.  [default: thin]"),
    click.option("--train-lm-head/--keep-lm-head", default=None, help="[default: train]"),
    click.option("--batch-tokens", type=int, metavar="N", help="Of an update.  [default: 1024]"),
    click.option("--learning-rate", type=float, help="[default: 0.0005]"),
    click.option("--final-rate", type=float, help="The last, as a share of that.  [default: 0.05]"),
    click.option("--warmup", type=float, help="Share of the training.  [default: 0.03]"),
    click.option("--weight-decay", type=float, help="[default: 0.01]"),
    click.option("--clip", type=float, help="Largest norm of a gradient.  [default: 1]"),
    click.option("--ema", type=float, help="Decay of the averaged weights; 0 = none.  [default: 0.99]"),
    click.option("--held-out", type=float, help="Share of the prompts not trained on.  [default: 0.03]"),
    click.option("--evaluate-every", type=float, metavar="MINUTES", help="[default: 5]"),
    click.option("--evaluate-sequences", type=int, metavar="N", help="[default: 96]"),
    click.option("--patience", type=int, metavar="N", help="End after N evaluations without gain."),
    click.option("--longest", type=int, metavar="N", help="Tokens of a sequence.  [default: 2048]"),
    click.option("--bf16/--fp32", "bf16", default=None, help="Products of the head.  [default: bf16]"),
    click.option("--seed", type=int),
]
_MACHINE = [
    click.option("--dtype", type=click.Choice(get_args(Dtype)), help="Of the target's weights."),
    click.option("--device", type=click.Choice(get_args(Device))),
    click.option("--threads", type=int, metavar="N", help="Processor cores to use; 0 = all."),
    click.option("--quiet", "-q", is_flag=True, help="No progress bars."),
]


def _options(function: Function) -> Function:
    decorated: Any = function
    for option in reversed([*_PLACES, *_ANSWERS, *_HEAD, *_TRAINING, *_MACHINE]):
        decorated = option(decorated)
    result: Function = decorated
    return result


@click.group("train")
def command() -> None:
    """Train a draft head for a model."""


@command.command("eagle3")
@_options
def eagle3(**values: Any) -> None:
    """Train an EAGLE-3 head for --target on its own answers.

    Three stages, each of which goes on where it was stopped and is skipped when it is done: the target
    answers the prompts of --data (without --data, --answers are used as they are); the target reads its
    answers, and what it computes is kept; a head is trained on that. DIR/head is the best head so far.
    """
    import torch

    from paceline.train.pipeline import Places, answer_stage, capture_stage, check_capture, train_stage
    from paceline.train.recipe import Recipe

    recipe = Recipe(**_given(values, {each.name for each in fields(Recipe)}))
    stages = values["stages"] or _STAGES
    out, quiet = values["out"], values["quiet"]
    places = Places(out, values["answers"] or out / "answers.jsonl", values["features"] or out / "features")
    prompts = _prompts(values, places) if "answers" in stages else []
    layers = _layers(values["capture"])
    setup = setup_of(values)
    check_capture(setup, layers)
    _make_folders(out, places.features)
    torch.set_num_threads(setup.group.threads)
    if prompts or ("answers" in stages and values["invent"]):
        answer_stage(
            setup,
            lambda: engine_of(setup, values["max_num_seqs"]),
            prompts,
            places,
            _plan(values),
            quiet=quiet,
        )
    if "capture" in stages:
        capture_stage(setup, places, layers, recipe.longest, quiet=quiet)
    if "train" in stages:
        with told_to_stop() as stop:
            over = train_stage(setup, places, recipe, layout=values["layout"], quiet=quiet, stop=stop.is_set)
        _say_what_came_out(places, over=over)
        if not over:
            click.get_current_context().exit(stop.exit_code)


def _make_folders(*folders: Path) -> None:
    """Before hours of work. Raises ConfigError."""
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be a folder: {error.strerror}. Give another with --out or --features."
            ) from None


def _given(values: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names and value is not None}


def _prompts(values: dict[str, Any], places: Places) -> list[TrainingPrompt]:
    from paceline.train.prompts import read_prompts, without

    if not values["data"] and not values["invent"]:
        if places.answers.exists():
            return []
        raise click.UsageError("Give --data FILE or --invent N, or --answers FILE with the target's answers.")
    prompts = [prompt for path in values["data"] for prompt in read_prompts(path)]
    excluded = [prompt for path in values["exclude"] for prompt in read_prompts(path)]
    kept = without(prompts, excluded)
    if len(kept) < len(prompts):
        click.echo(f"{len(prompts) - len(kept)} of {len(prompts)} prompts are excluded", err=True)
    if prompts and not kept:
        raise ConfigError("all prompts are excluded: give others with --data.")
    return kept


def _plan(values: dict[str, Any]) -> Any:
    from paceline.train.generate import AnswerPlan

    named = {"temperature", "max_tokens", "raw", "seed"}
    return AnswerPlan(**_given(values, named), invented=values["invent"] or 0)


def setup_of(values: dict[str, Any]) -> ModelSetup:
    """Of --target, --dtype, --device and --threads. Raises ConfigError for what this machine cannot hold."""
    from paceline.engine.device_groups import DeviceGroup
    from paceline.engine.machine import num_threads, resolve_device, resolve_precision
    from paceline.engine.model_setup import ModelSetup
    from paceline.loading import load
    from paceline.train.pipeline import check_fits

    config = load_config(options={name: values[name] for name in ("dtype", "device", "threads")})
    device = resolve_device(config)
    precision = resolve_precision(config.dtype, device)
    group = DeviceGroup((), num_threads(config.threads))
    setup = ModelSetup(load(values["target"]), precision, device, group)
    check_fits(setup)
    return setup


def engine_of(setup: ModelSetup, max_num_seqs: int) -> LLM:
    """A model of that setup that drafts nothing."""
    from paceline.engine.llm import LLM

    return LLM(
        setup.model.name,
        draft="none",
        dtype=setup.precision,
        device=setup.device,
        threads=setup.group.threads,
        max_num_seqs=max_num_seqs,
    )


def _layers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.UsageError(f"--capture is {text!r}: give numbers of layers, as 2,15,27.") from None


def _say_what_came_out(places: Places, *, over: bool) -> None:
    from paceline.train.curves import PICTURE

    if not over:
        click.echo("stopped; the same command goes on from here", err=True)
    if places.head.exists():
        click.echo(f"the head is {places.head}: use it with --draft {places.head}", err=True)
    if not (places.out / PICTURE).exists():
        click.echo("for pictures of the training install the extra: pip install 'paceline[train]'", err=True)
