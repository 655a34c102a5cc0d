"""`paceline simulate`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from paceline.errors import ConfigError

_STUDY = "paceline.cli._simulate_paper:run"
_PAPERS = dict.fromkeys(("figure1", "figure10", "figure12"), _STUDY)
"""What reproduces published figures, by name: "module:function", called with the name and the options."""
_FILE = click.Path(path_type=Path)


@click.command("simulate")
@click.option("--traces", type=_FILE, multiple=True, metavar="FILE...", help="Acceptance traces.")
@click.argument("more_traces", type=_FILE, nargs=-1, metavar="")
@click.option("--paper", type=click.Choice(sorted(_PAPERS)), help="Reproduce published figures.")
@click.option(
    "--draft-charge",
    type=click.Choice(["published", "winner", "always"]),
    help="Of figure12: whose drafting the oracle over both drafters pays for.",
)
@click.option("--check", is_flag=True, help="With --paper: exit with 1 if a value is out of tolerance.")
@click.option("--json", "json_output", is_flag=True, help="Print one JSON object instead of the table.")
def command(**values: Any) -> None:
    """Simulate speculative decoding on recorded texts, at the costs of a machine.

    --paper figure10 and figure12 are the simulated figures of arXiv 2601.11580 as its own simulator has them,
    figure1 is what was measured there, predicted from what n-grams really match.
    """
    _check_paper(values)
    if values["paper"] is None:
        raise ConfigError(f"there is nothing to simulate: give --paper, one of {', '.join(_PAPERS)}.")
    module, _, function = _PAPERS[values["paper"]].partition(":")
    getattr(import_module(module), function)(values["paper"], values)


def _check_paper(values: dict[str, Any]) -> None:
    for name in ("check", "draft_charge"):
        if values[name] and _PAPERS.get(values["paper"] or "") != _STUDY:
            raise ConfigError(
                f"--{name.replace('_', '-')} is of a study's figures: give --paper {min(_PAPERS)}."
            )
