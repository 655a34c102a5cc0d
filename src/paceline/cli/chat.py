"""`paceline chat`."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from paceline.cli._interrupt import deferred_interrupt
from paceline.cli._options import (
    config_of,
    engine_options,
    loading,
    params_of,
    print_config,
    sampling_options,
    trace_option,
)
from paceline.cli._report import summary
from paceline.cli._stream import stream
from paceline.core.params import SamplingParams
from paceline.errors import RequestError

if TYPE_CHECKING:
    from paceline import LLM

_HELP = "/system TEXT sets the system message, /clear forgets the conversation, /exit (or Ctrl-D) leaves"
_SLASH_WORD = re.compile(r"/[a-z]+$")


@click.command("chat")
@engine_options
@sampling_options
@click.option("--system", metavar="TEXT", help="System message.")
@trace_option
@click.option("--stats", is_flag=True, help="Print a summary after each answer, and counters meanwhile.")
def command(**values: Any) -> None:
    """Talk with the model, one line at a time.

    Ctrl-C stops an answer; Ctrl-D or /exit leaves. /clear starts over, /system TEXT sets the system message.
    """
    config = config_of(values)
    if values["print_config"]:
        print_config(config)
        return
    params = params_of(values)

    with loading(config):
        from paceline import LLM

        llm = LLM(config=config, trace=values["trace"])
    with llm:
        _Conversation(llm, params, values["system"], values["stats"]).run()


class _Conversation:
    """`history` holds the user's and the assistant's messages in turn; a refused one leaves no trace."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, stats: bool) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._stats = stats
        self.history: list[dict[str, str]] = []

    def run(self) -> None:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - imported, it gives input() editing and history

        prompt = "> " if sys.stdin.isatty() else ""
        if prompt:
            click.echo(_HELP, err=True)
        while True:
            try:
                line = input(prompt).strip()
            except EOFError:
                break
            except KeyboardInterrupt:
                click.echo("\n(Ctrl-D or /exit leaves)", err=True)
                continue
            except UnicodeDecodeError:
                click.echo("error: this line is not UTF-8 text.", err=True)
                continue
            if line == "/exit":
                return
            self._handle(line)
        if prompt:
            click.echo()

    def _handle(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/clear":
            self.history.clear()
        elif word == "/system":
            self._system = rest.strip() or None
        elif _SLASH_WORD.match(word):
            click.echo(f"there is no {word}: {_HELP}", err=True)
        elif line:
            self._answer(line)

    def _answer(self, line: str) -> None:
        asked = [*self.history, {"role": "user", "content": line}]
        system = [{"role": "system", "content": self._system}] if self._system else []
        try:
            prompt = self._llm.chat_prompt([*system, *asked])
            with deferred_interrupt() as interrupted:
                text, output = stream(self._llm, prompt, self._params, live=self._stats, stopped=interrupted)
        except RequestError as error:
            click.echo(f"error: {error}", err=True)
            return
        self.history = [*asked, {"role": "assistant", "content": text}]
        if output is None:
            click.echo("(stopped)", err=True)
        elif self._stats:
            click.echo(summary(output, self._llm.lanes), err=True)
