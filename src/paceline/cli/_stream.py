"""One request, its text shown as it comes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

import click

from paceline.cli._counters import counters
from paceline.errors import EngineError, RequestError

if TYPE_CHECKING:
    from paceline import LLM, RequestOutput
    from paceline.core.params import SamplingParams


def stream(
    llm: LLM,
    prompt: str | list[int],
    params: SamplingParams,
    *,
    silent: bool = False,
    live: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> tuple[str, RequestOutput | None]:
    """The text, and its output unless `stopped` became true first (then the request is aborted).

    live: whether counters are shown meanwhile, if standard error is a terminal.

    Raises RequestError or EngineError if the request ended with an error.
    """
    text, output = "", None
    with (
        closing(llm.stream(prompt, params)) as chunks,
        counters(llm, wanted=live, beside_text=not silent) as note,
    ):
        for chunk in chunks:
            if not silent:
                click.echo(chunk.text, nl=False)
            note(len(chunk.token_ids))
            text += chunk.text
            output = chunk.output
            if stopped():
                break
    if not silent and text and not text.endswith("\n"):
        click.echo()
    if output is not None and output.finish_reason == "error":
        kind = EngineError if output.engine_fault else RequestError
        raise kind(output.error or "the request failed.")
    return text, output
