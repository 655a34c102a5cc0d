"""`paceline train`."""

from __future__ import annotations

import signal
import threading
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import click

from paceline.config import Device, Dtype, load_config

_STAGES = ("capture", "train")


@click.group("train")
def command() -> None:
    """Train a draft head for a model."""


@command.command("eagle3")
@click.option("--target", required=True, help='"embedded", a directory, a GGUF file or a Hugging Face name.')
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="DIR", help="Where all goes.")
@click.option(
    "--answers",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The target's answers.  [default: DIR/answers.jsonl]",
)
@click.option(
    "--features",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Captured features.  [default: DIR/features]",
)
@click.option(
    "--stage", "stages", multiple=True, type=click.Choice(_STAGES), help="Only this; may be repeated."
)
@click.option("--capture", metavar="LIST", help="Layers at whose entry features are taken, as 2,15,27.")
@click.option("--layout", type=click.Choice(["eagle3", "speculators"]), default="eagle3", show_default=True)
@click.option("--minutes", type=float, help="Train for so long, instead of --epochs.")
@click.option("--epochs", type=int, help="Passes over the answers.  [default: 4]")
@click.option("--loss", type=click.Choice(["kl", "lk_hybrid", "lk_alpha"]), help="[default: lk_hybrid]")
@click.option(
    "--start", "--init", type=click.Choice(["fit", "target", "random"]), help="First weights.  [default: fit]"
)
@click.option("--steps", type=int, help="Of the training-time test.  [default: 5]")
@click.option("--ramp", type=float, help="Share of the training over which they grow.  [default: 0.15]")
@click.option("--decay", type=float, help="Weight of a step against the one before it.  [default: 0.8]")
@click.option("--thin/--no-thin", default=None, help="Drop rows instead of weighting steps.  [default: thin]")
@click.option("--draft-vocab-size", type=int, metavar="N", help="Tokens the head can say.  [default: 8192]")
@click.option("--intermediate-size", type=int, metavar="N", help="[default: the target's]")
@click.option("--num-kv-heads", type=int, metavar="N", help="[default: the target's]")
@click.option("--train-lm-head/--keep-lm-head", default=None, help="[default: train]")
@click.option("--norm-before-residual/--no-norm-before-residual", default=None)
@click.option("--fc-norm/--no-fc-norm", default=None, help="EAGLE 3.1.  [default: fc-norm]")
@click.option("--norm-output/--no-norm-output", default=None, help="EAGLE 3.1.")
@click.option("--batch-tokens", type=int, metavar="N", help="Answer tokens per update.  [default: 1024]")
@click.option("--learning-rate", type=float, help="[default: 0.0005]")
@click.option("--final-rate", type=float, help="The last rate, as a share of the first.  [default: 0.05]")
@click.option("--warmup", type=float, help="Share of the training.  [default: 0.03]")
@click.option("--weight-decay", type=float, help="[default: 0.01]")
@click.option("--clip", type=float, help="Largest norm of a gradient.  [default: 1]")
@click.option("--ema", type=float, help="Decay of the averaged weights; 0 = none.  [default: 0.99]")
@click.option("--held-out", type=float, help="Share of the prompts that is not trained on.  [default: 0.03]")
@click.option("--evaluate-every", type=float, metavar="MINUTES", help="[default: 5]")
@click.option("--evaluate-sequences", type=int, metavar="N", help="[default: 96]")
@click.option("--patience", type=int, metavar="N", help="Stop after N evaluations without gain.")
@click.option("--longest", type=int, metavar="N", help="Tokens of prompt and answer.  [default: 2048]")
@click.option("--bf16/--fp32", "bf16", default=None, help="Products in bfloat16.  [default: bf16]")
@click.option("--seed", type=int)
@click.option("--dtype", type=click.Choice(get_args(Dtype)), help="Of the target's weights.")
@click.option("--device", type=click.Choice(get_args(Device)))
@click.option("--threads", type=int, metavar="N", help="Processor cores to use; 0 = all.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bars.")
def eagle3(**values: Any) -> None:
    """Train an EAGLE-3 head for --target on its own answers.

    Each stage goes on where it was stopped and is skipped when it is done: the target reads its answers and
    what it computes is kept; a head is trained on that. DIR/head is the best head so far.
    """
    import torch

    from paceline.train.pipeline import Places, capture_stage, train_stage
    from paceline.train.recipe import Recipe

    names = {each.name for each in fields(Recipe)}
    recipe = Recipe(**{name: value for name, value in values.items() if name in names and value is not None})
    setup = _setup(values)
    torch.set_num_threads(setup.group.threads)
    out = values["out"]
    places = Places(out, values["answers"] or out / "answers.jsonl", values["features"] or out / "features")
    stages, quiet = values["stages"] or _STAGES, values["quiet"]
    if "capture" in stages:
        capture_stage(setup, places, _layers(values["capture"]), recipe.longest, quiet=quiet)
    if "train" in stages:
        stop = _until_told()
        train_stage(setup, places, recipe, layout=values["layout"], quiet=quiet, stop=stop.is_set)


def _setup(values: dict[str, Any]) -> Any:
    from paceline.engine.device_groups import DeviceGroup
    from paceline.engine.machine import num_threads, resolve_device, resolve_precision
    from paceline.engine.model_setup import ModelSetup
    from paceline.loading import load

    names = ("dtype", "device", "threads")
    config = load_config(options={name: values[name] for name in names})
    device = resolve_device(config)
    precision = resolve_precision(config.dtype, device)
    group = DeviceGroup((), num_threads(config.threads))
    return ModelSetup(load(values["target"]), precision, device, group)


def _layers(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.UsageError(f"--capture is {text!r}: give numbers of layers, as 2,15,27.") from None


def _until_told() -> threading.Event:
    """Set by the first Ctrl-C or SIGTERM, which lets the update under way end; the second does not wait."""
    stop = threading.Event()

    def note(signum: int, frame: FrameType | None) -> None:
        if stop.is_set():
            signal.default_int_handler(signum, frame)
        stop.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, note)
    return stop
