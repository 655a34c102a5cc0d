from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

import paceline
from paceline.cli import cli

from .fake import FakeLLM


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    """The class that stands for `paceline.LLM`; tests set its attributes."""
    fake = type("Fake", (FakeLLM,), {"made": []})
    monkeypatch.setitem(vars(paceline), "LLM", fake)
    return fake


@pytest.fixture
def run(engine: type[FakeLLM]) -> Callable[..., Result]:  # noqa: ARG001 - no test may load a model unasked
    def invoke(*arguments: str, input: str | bytes | None = None) -> Result:
        return CliRunner().invoke(cli, list(arguments), input=input)

    return invoke
