"""`paceline version`."""

from __future__ import annotations

import click

from paceline import __version__


@click.command("version")
def command() -> None:
    """Print the version."""
    click.echo(f"paceline {__version__}")
