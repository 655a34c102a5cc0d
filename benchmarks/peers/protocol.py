"""What every runner has in common: its options, its measurements and its output.

A runner is one script for one engine, run by that engine's own interpreter, so this file needs nothing but
the standard library. It works in one of two ways:

* alone: `--repeats` measurements of the prompt file, written to `--json`;
* under `compare_peers.py` (`--control`): a line `{"prompts": [[ids], ...], "new_tokens": n}` on standard
  input asks for one measurement, whose record (or `{"error": ...}`) is one line on standard output; end of
  input ends the runner.

Standard output carries records only: whatever an engine prints goes to standard error.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO, TypedDict

PRECISIONS = ("bf16", "int8", "fp32")


@dataclass(frozen=True)
class Answer:
    """One request's part of a measurement, in seconds since the whole batch was handed over.

    first_tokens: how many tokens had come at `first_s`; they are no part of the decode rate.
    """

    token_ids: list[int]
    first_s: float
    last_s: float
    first_tokens: int = 1


class Record(TypedDict):
    """One measurement. Rates are tokens per second of the whole batch.

    ttft_s: mean over the requests.  decode_s: earliest first token to last token.
    decode_tok_s counts the tokens that came after the first ones.
    """

    ttft_s: float
    decode_s: float
    total_s: float
    tokens: int
    decode_tok_s: float
    end_to_end_tok_s: float
    token_ids: list[list[int]]


class Engine(Protocol):
    """A loaded engine. setting: precision, speculation and whatever else distinguishes the run."""

    name: str
    version: str
    setting: dict[str, Any]

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[Answer], float]:
        """Decode `new_tokens` greedily for every prompt at once, past any end of text.

        Returns the answers in the order of the prompts, and the seconds of the whole call.
        """
        ...


@dataclass
class Options:
    """The options that all runners share; `extra` holds a runner's own."""

    model: str
    threads: int
    precision: str
    speculation: str
    num_speculative_tokens: int
    max_model_len: int
    max_batch: int
    extra: argparse.Namespace = field(default_factory=argparse.Namespace)


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """The shared options; a runner adds its own before `run`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="what the engine loads: a folder or a file")
    parser.add_argument("--prompts", type=Path, help="prompt file made by benchmarks/prompts.py")
    parser.add_argument("--set", dest="prompt_set", help="prompt set of that file (default: its first)")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1, help="prompts decoded at the same time")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the records")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--speculation", default="none", help="none, or the engine's name of a drafter")
    parser.add_argument("--num-speculative-tokens", type=int, default=5)
    parser.add_argument("--max-model-len", type=int, default=2048, help="tokens of context per request")
    parser.add_argument("--max-batch", type=int, default=8, help="requests the engine is set up for")
    parser.add_argument("--control", action="store_true", help="take measurements from standard input")
    return parser


def run(parser: argparse.ArgumentParser, load: Callable[[Options], Engine]) -> None:
    """Parse the options, load the engine and measure: a runner's `main`."""
    arguments = parser.parse_args()
    if arguments.control:
        die_with_parent()
    elif arguments.prompts is None:
        parser.error("--prompts is needed (or --control)")
    output = _claim_stdout()
    options = Options(
        model=arguments.model,
        threads=arguments.threads,
        precision=arguments.precision,
        speculation=arguments.speculation,
        num_speculative_tokens=arguments.num_speculative_tokens,
        max_model_len=arguments.max_model_len,
        max_batch=arguments.max_batch,
        extra=arguments,
    )
    engine = load(options)
    identity = {"engine": engine.name, "version": engine.version, "setting": engine.setting}
    if arguments.control:
        _serve(engine, identity, output)
    else:
        _measure_alone(engine, identity, arguments, output)


def die_with_parent() -> None:
    """Have Linux kill this process when its parent ends: a stopped runner cannot notice by itself."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def measure(engine: Engine, prompts: list[list[int]], new_tokens: int) -> Record:
    """One measurement. Raises RuntimeError if the engine returned another number of tokens."""
    answers, total_s = engine.generate(prompts, new_tokens)
    lengths = [len(answer.token_ids) for answer in answers]
    if lengths != [new_tokens] * len(prompts):
        raise RuntimeError(f"asked for {len(prompts)} x {new_tokens} tokens, got {lengths}")
    decode_s = max(a.last_s for a in answers) - min(a.first_s for a in answers)
    tokens = sum(lengths)
    after_first = tokens - sum(a.first_tokens for a in answers)
    return Record(
        ttft_s=statistics.fmean(a.first_s for a in answers),
        decode_s=decode_s,
        total_s=total_s,
        tokens=tokens,
        decode_tok_s=after_first / decode_s if decode_s > 0 else 0.0,
        end_to_end_tok_s=tokens / total_s,
        token_ids=[a.token_ids for a in answers],
    )


def load_prompts(path: Path, name: str | None = None) -> list[list[int]]:
    """Token ids of one prompt set. Raises KeyError for an unknown set."""
    sets = json.loads(path.read_text(encoding="utf-8"))["sets"]
    chosen = sets[name] if name else next(iter(sets.values()))
    return [prompt["token_ids"] for prompt in chosen]


def batches(prompts: list[list[int]], batch: int, repeats: int) -> Iterator[list[list[int]]]:
    """Repeat r takes the prompts from r * batch on, round and round: another one each time at batch 1."""
    if batch > len(prompts):
        raise ValueError(f"batch {batch} needs as many different prompts; there are {len(prompts)}")
    for repeat in range(repeats):
        start = repeat * batch
        yield [prompts[(start + i) % len(prompts)] for i in range(batch)]


def _measure_alone(
    engine: Engine, identity: dict[str, Any], arguments: argparse.Namespace, output: TextIO
) -> None:
    prompts = load_prompts(arguments.prompts, arguments.prompt_set)
    # Warm up on a text that is none of the prompts, so that nothing an engine remembers can help it.
    warm_up = [list(reversed(ids)) for ids in prompts[: arguments.batch]]
    engine.generate(warm_up, min(16, arguments.new_tokens))
    report: dict[str, Any] = {**identity, "batch": arguments.batch, "runs": []}
    for chosen in batches(prompts, arguments.batch, arguments.repeats):
        record = measure(engine, chosen, arguments.new_tokens)
        report["runs"].append(record)
        print(json.dumps({**identity, **record, "token_ids": "..."}), file=output)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


def _serve(engine: Engine, identity: dict[str, Any], output: TextIO) -> None:
    print(json.dumps({**identity, "pid": os.getpid()}), file=output)
    for line in sys.stdin:
        job = json.loads(line)
        answer: Record | dict[str, str]
        try:
            answer = measure(engine, job["prompts"], job["new_tokens"])
        except Exception as error:  # noqa: BLE001 - the orchestrator reports it and goes on
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=output)


def _claim_stdout() -> TextIO:
    """A private handle on standard output, which itself is turned into standard error."""
    sys.stdout.flush()
    private = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return private
