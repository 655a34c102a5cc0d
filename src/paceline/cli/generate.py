"""`paceline generate`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from paceline.cli._options import (
    config_of,
    engine_options,
    loading,
    params_of,
    print_config,
    sampling_options,
    trace_option,
)
from paceline.cli._report import Comparison, as_object, summary
from paceline.cli._stream import stream
from paceline.config import Config
from paceline.core.params import SamplingParams
from paceline.drafters.registry import drafters_of
from paceline.errors import EngineError, RequestError

if TYPE_CHECKING:
    from paceline import LLM, RequestOutput


@click.command("generate")
@click.argument("prompt", required=False)
@engine_options
@sampling_options
@click.option("--logprobs", type=int, metavar="N", help="With --json: N alternatives per token.")
@click.option("--system", metavar="TEXT", help="System message before the prompt.")
@click.option("--raw", is_flag=True, help="Send the prompt as it is, without the chat template.")
@click.option(
    "--compare", is_flag=True, help="Also decode without speculation, twice each: compare speed and tokens."
)
@click.option("--record", type=click.Path(path_type=Path), metavar="FILE", help="Write the event log.")
@trace_option
@click.option("--quiet", "-q", is_flag=True, help="No counters while it runs and no summary.")
@click.option("--json", "json_output", is_flag=True, help="Print one JSON object instead of the text.")
def command(prompt: str | None, **values: Any) -> None:
    """Complete PROMPT ("-" reads it from standard input).

    The text streams to standard output; a summary follows on standard error. On a terminal, counters are
    shown meanwhile.
    """
    config = config_of(values)
    if values["print_config"]:
        print_config(config)
        return
    params = params_of(values)
    _check(config, params, values)
    text = _prompt_text(prompt)

    with loading(config):
        from paceline import LLM

        llm = LLM(config=config, record=values["record"], trace=values["trace"])
    with llm:
        tokens = text if values["raw"] else llm.chat_prompt(_messages(text, values["system"]))
        _run(llm, tokens, params, values)


def _check(config: Config, params: SamplingParams, values: dict[str, Any]) -> None:
    if values["raw"] and values["system"] is not None:
        raise click.UsageError("--system needs the chat template that --raw leaves out.")
    if params.logprobs is not None and not values["json_output"]:
        raise click.UsageError("--logprobs are only printed with --json.")
    speculation = config.speculation
    table = speculation.length_by_batch_size
    guesses = any(length for _, length in table) if table else speculation.num_speculative_tokens != 0
    none = not drafters_of(config) or config.groups.mode == "autoregressive"
    if values["compare"] and (none or not guesses):
        raise click.UsageError("--compare needs speculation, which this configuration turns off.")


def _prompt_text(prompt: str | None) -> str:
    if prompt is None:
        raise click.UsageError("Missing PROMPT: give a text, or - to read standard input.")
    if prompt != "-":
        text = prompt
    else:
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not UTF-8 text (byte {error.start}).") from None
    if not text.strip():
        raise RequestError("the prompt is empty: give some text.")
    return text


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": text}]


def _run(llm: LLM, prompt: str | list[int], params: SamplingParams, values: dict[str, Any]) -> None:
    silent, quiet = values["json_output"], values["quiet"]
    output = _complete(llm, prompt, params, silent=silent, live=not quiet)
    lanes = llm.lanes
    if not silent and not quiet:
        click.echo(summary(output, lanes), err=True)
    comparison = _compare(llm, prompt, params, output) if values["compare"] else None
    if silent:
        result = as_object(output, lanes)
        if comparison:
            result["comparison"] = comparison.as_object()
        click.echo(msgspec.json.encode(result))
    elif comparison:
        for line in comparison.lines():
            click.echo(line, err=True)
    if comparison and not comparison.identical:
        click.get_current_context().exit(1)


def _compare(llm: LLM, prompt: str | list[int], params: SamplingParams, output: RequestOutput) -> Comparison:
    """In turns, so that whatever else the machine does meets both."""
    # The same noise for all: the output says which seed was drawn.
    again = replace(params, seed=output.seed)
    plain = replace(again, num_speculative_tokens=0)
    outputs = [output, *(_complete(llm, prompt, each, silent=True) for each in (plain, again, plain))]
    return Comparison(outputs[::2], outputs[1::2])


def _complete(
    llm: LLM, prompt: str | list[int], params: SamplingParams, *, silent: bool, live: bool = False
) -> RequestOutput:
    _, output = stream(llm, prompt, params, silent=silent, live=live)
    if output is None:
        raise EngineError("the engine ended the request without a result.")
    return output
