"""`paceline plan`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import click

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.cli._plan_inputs import Asked
    from paceline.sim.plan.search import Found
    from paceline.sim.plan.sensitivity import Sensitivity

_FILE = click.Path(path_type=Path)
_GOALS = ("auto", "throughput", "goodput", "p50", "p95")
_WAYS = "serial,overlapped,disaggregated"


@click.command("plan")
@click.option("--traces", type=_FILE, multiple=True, metavar="FILE", help="Acceptance traces; repeatable.")
@click.option("--concurrency", type=int, metavar="N", help="So many requests at any time: a batch size.")
@click.option("--rate", type=float, metavar="R", help="Requests per second, at random.")
@click.option("--burstiness", type=float, metavar="G", help="Shape of their gaps.  [default: 1 = Poisson]")
@click.option("--lengths", type=_FILE, metavar="CSV", help="Arrivals and lengths, as Azure's traces of 2023.")
@click.option("--speed", type=float, metavar="X", help="--lengths, X times faster.")
@click.option("--max-output", type=int, default=1024, show_default=True, help="Longer answers are cut.")
@click.option("--max-context", type=int, default=0, metavar="N", help="Longer requests are cut; 0 = none.")
@click.option("--gpu", metavar="NAME", help="A roofline: H100, H800, H200, A100, L40S; with --target.")
@click.option("--gpus", type=int, metavar="N", help="So many in the host.  [default: 1]")
@click.option("--target", metavar="SHAPE", help="The target: a known name, or a config.json.")
@click.option("--costs", type=_FILE, metavar="FILE", help="A measured machine instead, of paceline profile.")
@click.option("--published", metavar="NAME", help='Published costs instead, as "llama3.1-8b@h100".')
@click.option(
    "--draft", multiple=True, metavar="NAME[=SHAPE]", help="A drafter that may be used; repeatable."
)
@click.option("--checkpoint", multiple=True, metavar="NAME=MODEL", help="A drafter's weights, for exports.")
@click.option("--weight-bits", type=float, help="Per weight of both models.  [default: 16]")
@click.option("--efficiency", multiple=True, metavar="NAME=X", help="Of the roofline, as bandwidth=0.7.")
@click.option("--tensor-parallel", metavar="LIST", help="Degrees of the target.  [default: all that divide]")
@click.option("--draft-tensor-parallel", metavar="LIST", help="The same, of a draft model.")
@click.option("--pad-heads", is_flag=True, help="Heads are padded, so that every even degree serves.")
@click.option("--message-us", type=float, help="One way between groups of GPUs.  [default: 50]")
@click.option("--placements", default=_WAYS, show_default=True, metavar="LIST", help="Ways to try.")
@click.option("--guesses", default="1,2,3,5,7,10,auto", show_default=True, metavar="LIST", help="Per step.")
@click.option(
    "--chunks", default="2048,512,8192", show_default=True, metavar="LIST", help="Tokens of a pass."
)
@click.option("--objective", type=click.Choice(_GOALS), default="auto", show_default=True)
@click.option("--latency", type=click.Choice(("ttft", "tpot", "e2e")), default="e2e", show_default=True)
@click.option("--slo", metavar="LIMITS", help='As "ttft=0.5,tpot=0.03", or mlperf-llama3.1-8b, ...')
@click.option("--budget-seconds", type=float, default=120.0, show_default=True, help="Most time to take.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of draws and arrivals.")
@click.option("--vllm-out", type=_FILE, metavar="FILE", help="Write vLLM's --speculative-config.")
@click.option("--sglang-out", type=_FILE, metavar="FILE", help="Write SGLang's adaptive steps.")
@click.option("--max-batch", type=int, default=256, show_default=True, help="Largest batch of these tables.")
@click.option("--quiet", "-q", is_flag=True, help="No progress bar.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the text.")
def command(**values: Any) -> None:
    """Find out whether guessing pays, and how: drafter, number of guesses, devices, sizes of passes.

    Every way to decode is simulated on your workload and the costs of your machine, briefly first, and what
    is good at length. The gain is over plain decoding at its best on the same hardware.
    """
    from paceline.cli._plan_inputs import asked

    started = perf_counter()
    budget = values["budget_seconds"]
    if not 0 < budget < float("inf"):
        raise ConfigError(f"--budget-seconds is {budget}: give a number above 0.")
    wanted = asked(values)
    with _progress(quiet=values["quiet"]) as told:
        found, sensitive = _planned(wanted, started + budget, told)
    _report(wanted, found, sensitive, values)


def _planned(
    wanted: Asked, end: float, told: Callable[[float, str], None]
) -> tuple[Found, Sensitivity | None]:
    from paceline.sim.plan.search import ROUNDS, search
    from paceline.sim.plan.sensitivity import sensitivity

    left = end - perf_counter()
    found = search(
        wanted.world,
        wanted.space,
        wanted.candidates,
        rounds=ROUNDS,
        seconds=0.65 * left,
        progress=lambda share, what: told(0.65 * share, what),
    )
    left = end - perf_counter()
    if left <= 0:
        return found, None
    return found, sensitivity(
        wanted.world,
        found,
        effort=ROUNDS[1].effort,
        runs=1,
        seconds=0.95 * left,
        progress=lambda share, what: told(0.65 + 0.35 * share, what),
    )


def _report(wanted: Asked, found: Found, sensitive: Sensitivity | None, values: dict[str, Any]) -> None:
    from paceline.cli._plan_exports import exported
    from paceline.cli._plan_report import json_of, text_of

    exports = exported(wanted, found, values["vllm_out"], values["sglang_out"], values["max_batch"])
    if values["as_json"]:
        click.echo(json.dumps(json_of(wanted, found, sensitive, exports)))
    else:
        click.echo(text_of(wanted, found, sensitive, exports))


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[float, str], None]]:
    from tqdm import tqdm

    shape = "{l_bar}{bar}| {elapsed}"
    with tqdm(total=100, desc="planning", disable=quiet, leave=False, bar_format=shape) as bar:

        def told(share: float, what: str) -> None:
            bar.set_description(what, refresh=False)
            bar.update(max(0, round(100 * share) - bar.n))

        yield told
