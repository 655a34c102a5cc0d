"""Options that nobody would look at are refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import LLM
from paceline.config import load_config
from paceline.drafters.ngram import NgramDrafter
from paceline.engine.device_groups import parse_devices
from paceline.errors import ConfigError
from paceline.modes import mode_of

THERE = {"draft_address": "tcp://nowhere:1", "draft_key_file": "key"}


@pytest.mark.parametrize(
    ("options", "cause", "remedy"),
    [
        (
            {**THERE, "placement": "disaggregated", "draft_devices": "0"},
            "draft_devices is set but groups.draft_address too",
            "--cores",
        ),
        (
            {**THERE, "placement": "auto", "draft": "embedded"},
            "draft is embedded but groups.draft_address is set",
            "leave it out",
        ),
        ({**THERE, "mode": "swiftspec", "draft_dtype": "int8"}, "draft_dtype is int8 but", "leave it out"),
        (
            {**THERE, "placement": "disaggregated", "draft": "none"},
            "draft_address is set but speculation.draft is none",
            "leave out one",
        ),
        (
            {**THERE, "mode": "autoregressive"},
            "draft_address is set but groups.mode is autoregressive",
            "leave out one",
        ),
        (
            {**THERE, "placement": "auto", "mode": "serial-chain"},
            "the drafter runs in the target's process",
            "choose placement = disaggregated",
        ),
        (
            {"draft_timeout": 5.0},
            "draft_timeout is 5 but the drafter runs in the target's process",
            "choose placement = disaggregated",
        ),
        (
            {"draft": NgramDrafter(2, 4), "placement": "auto", "mode": "swiftspec"},
            "draft is an object of this process",
            "give a name",
        ),
    ],
    ids=str,
)
def test_it_is_refused_with_cause_and_remedy(options: dict[str, Any], cause: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(model="a folder that does not exist", **options)
    assert cause in str(caught.value)
    assert remedy in str(caught.value)


def test_two_files_of_one_name_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give each a file of its own"):
        LLM(record=tmp_path / "out", trace=tmp_path / "." / "out")


def test_no_range_of_cores_is_built_that_no_machine_has() -> None:
    with pytest.raises(ConfigError, match="no machine has a core or device 99999999999"):
        parse_devices("0-99999999999", "groups.target_devices", "cpu")


@pytest.mark.parametrize("options", [{"num_speculative_tokens": 5}, {"length_by_batch_size": ((1, 3),)}])
@pytest.mark.parametrize("nothing", [{"draft": "none"}, {"mode": "autoregressive"}])
def test_no_length_where_nothing_is_guessed(options: dict[str, object], nothing: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is set but .*: leave one of them out"):
        mode_of(load_config(options=options | nothing))
