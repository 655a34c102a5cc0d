"""`paceline generate`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from paceline.cli._options import config_of, engine_options, params_of, print_config, sampling_options
from paceline.cli._report import Comparison, as_object, summary
from paceline.cli._stream import stream
from paceline.config import Config
from paceline.core.params import SamplingParams
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
@click.option("--compare", is_flag=True, help="Then decode without speculation: compare speed and tokens.")
@click.option("--record", type=click.Path(path_type=Path), metavar="FILE", help="Write the event log.")
@click.option("--json", "json_output", is_flag=True, help="Print one JSON object instead of the text.")
def command(prompt: str | None, **values: Any) -> None:
    """Complete PROMPT ("-" reads it from standard input).

    The text streams to standard output; a summary follows on standard error.
    """
    config = config_of(values)
    if values["print_config"]:
        print_config(config)
        return
    params = params_of(values)
    _check(config, params, values)
    text = _prompt_text(prompt)

    from paceline import LLM

    with LLM(config=config, record=values["record"]) as llm:
        tokens = text if values["raw"] else llm.chat_prompt(_messages(text, values["system"]))
        _run(llm, tokens, params, values)


def _check(config: Config, params: SamplingParams, values: dict[str, Any]) -> None:
    if values["raw"] and values["system"] is not None:
        raise click.UsageError("--system needs the chat template that --raw leaves out.")
    if params.logprobs is not None and not values["json_output"]:
        raise click.UsageError("--logprobs are only printed with --json.")
    speculation = config.speculation
    lengths = [length for _, length in speculation.length_by_batch_size] or [
        speculation.num_speculative_tokens
    ]
    if values["compare"] and (speculation.draft == "none" or not any(lengths)):
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
    """Speculation's run first: the one without it then finds every cache warm, if anything to its gain."""
    silent = values["json_output"]
    output = _complete(llm, prompt, params, silent)
    comparison = None
    if values["compare"]:
        # The same noise: the output says which seed was drawn.
        plain = replace(params, num_speculative_tokens=0, seed=output.seed)
        comparison = Comparison(output, _complete(llm, prompt, plain, silent=True))
    if silent:
        result = as_object(output)
        if comparison:
            result["comparison"] = comparison.as_object()
        click.echo(msgspec.json.encode(result))
        return
    click.echo(summary(output), err=True)
    for line in comparison.lines() if comparison else []:
        click.echo(line, err=True)


def _complete(llm: LLM, prompt: str | list[int], params: SamplingParams, silent: bool) -> RequestOutput:
    _, output = stream(llm, prompt, params, silent=silent)
    if output is None:
        raise EngineError("the engine ended the request without a result.")
    return output
