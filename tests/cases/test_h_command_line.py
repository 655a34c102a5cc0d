"""H. What is said on the command line is what runs."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from paceline import SamplingParams
from paceline.cli import cli
from paceline.cli._options import SAMPLING_NAMES
from paceline.cli.generate import command
from paceline.config import OPTION_PATHS
from tests.cases.lab import Lab
from tests.tiny import ENGINE, write_random

ENGINE_VALUES: dict[str, object] = {
    "model": "some/model",
    "draft": "none",
    "num_speculative_tokens": 7,
    "placement": "disaggregated",
    "mode": "swiftspec",
    "growth": "chain",
    "target_devices": "0-3",
    "draft_devices": "4",
    "draft_address": "tcp://drafter:7077",
    "draft_key_file": "paceline.key",
    "dtype": "bfloat16",
    "draft_dtype": "bfloat16",
    "exact": True,
    "unpickle_head": True,
    "device": "cpu",
    "threads": 3,
}
SAMPLING_VALUES: dict[str, Any] = {
    "max_tokens": 7,
    "temperature": 1.5,
    "top_k": 3,
    "top_p": 0.3,
    "min_p": 0.2,
    "repetition_penalty": 1.9,
    "presence_penalty": 1.9,
    "frequency_penalty": 1.9,
    "stop": "t",
    "seed": 12,
    "ignore_eos": True,
    "logprobs": 2,
}
TEXT = "the quick brown"
# Options that matter only to a sampled request are given together with these.
SAMPLED = {"temperature": 3.0, "seed": 5}
NEEDS_SAMPLING = {"top_k", "top_p", "min_p", "seed"}


def given(values: dict[str, Any]) -> list[str]:
    """Values as command line arguments."""
    arguments: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        arguments += [flag] if value is True else [flag, str(value)]
    return arguments


def run(arguments: list[str]) -> str:
    result = CliRunner().invoke(cli, ["generate", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_option_is_looked_at() -> None:
    """H08 The two tables here miss no option of the command."""
    names = {param.name for param in command.params if isinstance(param, click.Option)}
    assert names & set(OPTION_PATHS) - {"seed"} == set(ENGINE_VALUES)
    assert names & set(SAMPLING_NAMES) == set(SAMPLING_VALUES)


@pytest.mark.parametrize("name", ENGINE_VALUES)
def test_engine_options_are_in_force(name: str) -> None:
    """H08 Every option of the engine that is given shows in the configuration in force."""
    place: Any = tomllib.loads(run([*given({name: ENGINE_VALUES[name]}), "--print-config"]))
    for part in OPTION_PATHS[name]:
        place = place[part]
    assert place == ENGINE_VALUES[name]


@pytest.fixture(scope="module")
def ending(models: Path, lab: Lab) -> Lab:
    """The random model, with an end token that comes late in its greedy answer to TEXT."""
    (output,) = lab.plain.generate(TEXT, SamplingParams(max_tokens=60))
    tokens = output.token_ids
    eos = max(tokens, key=tokens.index)
    return Lab(write_random(models / "ending", eos=[eos]))


@pytest.mark.parametrize("name", SAMPLING_VALUES)
def test_sampling_options_reach_the_request(ending: Lab, name: str) -> None:
    """H08 Every sampling option of the command does what the same value does in a program, and shows."""
    base: dict[str, Any] = {"max_tokens": 60, **(SAMPLED if name in NEEDS_SAMPLING else {})}
    values = base | {"seed": 5} | {name: SAMPLING_VALUES[name]}
    engine = dict(ENGINE) | {"model": ending.model, "draft": "ngram"}
    shown = json.loads(run(["--raw", "--json", *given(engine), *given(values), TEXT]))
    (same,) = ending.plain.generate(TEXT, SamplingParams(**values))
    assert (shown["token_ids"], shown["finish_reason"]) == (same.token_ids, same.finish_reason)
    (without,) = ending.plain.generate(TEXT, SamplingParams(**base))
    if name == "logprobs":
        assert [len(entry["top"]) for entry in shown["logprobs"]] == [2] * len(same.token_ids)
    else:
        assert (same.token_ids, same.text) != (without.token_ids, without.text)
