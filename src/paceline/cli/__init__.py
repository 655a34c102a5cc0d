"""The command line. A command's module is imported when the command runs, so that help is immediate."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module
from typing import Any

import click

from paceline import __version__
from paceline.errors import ConfigError, PacelineError, RequestError

_COMMANDS = {
    "generate": "Complete one prompt.",
    "chat": "Talk with the model.",
    "draft": "Draft for an engine on another host.",
    "bench": "Measure drafters, or servers, and write a report.",
    "simulate": "Simulate an engine on recorded texts.",
    "trace": "Record what drafters are worth along a target's answers.",
    "train": "Train a draft head for a model.",
    "explain-acceptance": "Find out why a draft head's guesses are not accepted.",
    "profile": "Measure what passes take, and when guessing pays.",
    "plan": "Choose drafter, guesses and devices for a workload.",
    "version": "Print the version.",
}

_INTERRUPTED = 130
_BROKEN_PIPE = 141
"""128 + the signal's number, as a shell reports a command that the signal ended."""


class Commands(click.Group):
    """Commands imported on demand, and the one place where errors become exit codes."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"paceline.cli.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        _open_closed_streams()
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except PacelineError as error:
            click.echo(f"error: {' '.join(str(error).split())}", err=True)
            ctx.exit(2 if isinstance(error, ConfigError | RequestError) else 1)
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)
        except BrokenPipeError:
            _mute_stdout()
            ctx.exit(_BROKEN_PIPE)
        except OSError as error:
            _mute_stdout()
            click.echo(f"error: {error}", err=True)
            ctx.exit(1)
        return result


def _open_closed_streams() -> None:
    """A shell may start us with a standard stream closed, which Python shows as None."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for good


def _mute_stdout() -> None:
    """Stdout takes no more: without this the interpreter complains again when it flushes at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "--version", prog_name="paceline")
def cli() -> None:
    """Speculative decoding for large language models: exactly the target's output, only sooner."""


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        # A model may emit characters that the terminal's encoding lacks.
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    cli(prog_name="paceline")
