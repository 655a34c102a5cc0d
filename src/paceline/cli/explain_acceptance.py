"""`paceline explain-acceptance`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
import msgspec

from paceline.config import Device, Dtype

if TYPE_CHECKING:
    from paceline.train.explain import Explanation


@click.command("explain-acceptance")
@click.option("--target", required=True, help='"embedded", a directory, a GGUF file or a Hugging Face name.')
@click.option("--draft", required=True, metavar="HEAD", help="A head's directory or Hugging Face name.")
@click.option("--unpickle-head", is_flag=True, help="Read its pickled weights, if you trust their author.")
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Prompts, JSONL, .gz or not.",
)
@click.option("--prompts", "count", type=int, default=16, show_default=True, help="So many of them.")
@click.option("--max-tokens", type=int, default=64, show_default=True, help="Of an answer.")
@click.option("--dtype", type=click.Choice(get_args(Dtype)), help="Of the target's weights.")
@click.option("--device", type=click.Choice(get_args(Device)))
@click.option("--threads", type=int, metavar="N", help="Processor cores to use; 0 = all.")
@click.option("--quiet", "-q", is_flag=True, help="Do not say what is being done.")
@click.option("--json", "json_output", is_flag=True, help="Print one JSON object instead of the table.")
def command(**values: Any) -> None:
    """Find out why a draft head's guesses are not accepted.

    The target answers some prompts; on these answers the head is measured as it is loaded, and with one thing
    changed at a time: flags, captured layers, pairing, rope, precision, chat template.
    """
    import torch

    from paceline.cli.train import engine_of, setup_of
    from paceline.loading.heads import load_head
    from paceline.train.explain import explain
    from paceline.train.prompts import read_prompts

    if values["count"] < 1 or values["max_tokens"] < 3:
        raise click.UsageError("--prompts must be at least 1 and --max-tokens at least 3.")
    prompts = read_prompts(values["data"])[: values["count"]]
    setup = setup_of(values)
    torch.set_num_threads(setup.group.threads)
    head = load_head(values["draft"], setup.model, unpickle=values["unpickle_head"])

    def say(what: str) -> None:
        if not values["quiet"]:
            click.echo(f"measuring: {what}", err=True)

    found = explain(
        setup,
        head,
        lambda: engine_of(setup, max_num_seqs=min(len(prompts), 48)),
        prompts,
        max_tokens=values["max_tokens"],
        progress=say,
    )
    click.echo(_json(found) if values["json_output"] else _table(found))


def _table(found: Explanation) -> str:
    lines = [f"{'':32}{'tokens per pass':>16}{'first guess':>13}{'gain':>8}"]
    for each in found.measured:
        gain = f"{each.gain:+8.2f}" if each is not found.measured[0] else ""
        lines.append(f"{each.change.name:32}{each.length:16.2f}{each.first:13.1%}{gain}")
    lines.append("")
    lines.append(
        f"{found.outside:.1%} of the target's tokens are outside the draft vocabulary: at most "
        f"{found.ceiling:.2f} tokens per pass"
    )
    return "\n".join([*lines, "", "likely causes:", *(f"  * {cause}" for cause in found.causes)])


def _json(found: Explanation) -> str:
    measured = [
        {"name": each.change.name, "length": each.length, "first": each.first, "gain": each.gain}
        for each in found.measured
    ]
    return msgspec.json.encode(
        {"measured": measured, "outside": found.outside, "ceiling": found.ceiling, "causes": found.causes}
    ).decode()
