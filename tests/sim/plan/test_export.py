"""What is written for other engines is what they accept, and says what the schedule says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cli import cli
from paceline.config import load_config, to_toml
from paceline.errors import ConfigError
from paceline.sim.plan.candidates import Candidate, Placed
from paceline.sim.plan.export import (
    check_sglang,
    check_vllm,
    options_line,
    sglang_config,
    vllm_config,
    write_json,
)
from paceline.sim.plan.schedule import Row, Schedule, schedule
from paceline.sim.plan.world import Effort
from tests.sim.plan.plans import Made, chain


def as_read_by_vllm(table: list[list[int]], batch: int, most: int) -> int:
    """What its scheduler looks up: inclusive ranges; a gap, and what comes after the last, as before."""
    found = None
    for low, _, length in table:
        if low <= batch:
            found = length
    assert found is not None
    return min(found, most)


def as_read_by_sglang(config: dict[str, Any], batch: int) -> list[int]:
    """The slot that is nearest."""
    key = min(config, key=lambda each: abs(int(each) - batch))
    steps: list[int] = config[key]["candidate_steps"]
    return steps


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    lengths = sorted(draw(st.sets(st.integers(0, 16), min_size=1)), reverse=True)
    rows, low = [], 1
    for length in lengths:
        high = low + draw(st.integers(0, 40))
        near = tuple(sorted({length, *draw(st.sets(st.integers(0, 16), max_size=3))}))
        rows.append(Row(low, high, length, near, 1.0))
        low = high + 1
    return Schedule("eagle3", tuple(rows))


@settings(max_examples=60, deadline=None)
@given(schedules())
def test_every_schedule_comes_back(table: Schedule) -> None:
    if table.longest == 0:
        with pytest.raises(ConfigError, match="gains nothing"):
            vllm_config(table, "eagle3", model="m")
        with pytest.raises(ConfigError, match="gains nothing"):
            sglang_config(table)
        return
    vllm = json.loads(json.dumps(vllm_config(table, "eagle3", model="m")))
    check_vllm(vllm)
    sglang = json.loads(json.dumps(sglang_config(table)))
    check_sglang(sglang)
    for row in table.rows:
        for batch in (row.low, row.high):
            rows = vllm["num_speculative_tokens_per_batch_size"]
            assert as_read_by_vllm(rows, batch, vllm["num_speculative_tokens"]) == row.length
        assert as_read_by_sglang(sglang, row.low) == list(row.near)


GOOD = {
    "method": "ngram",
    "num_speculative_tokens": 5,
    "num_speculative_tokens_per_batch_size": [[1, 16, 5], [17, 128, 1], [129, 512, 0]],
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"method": "medusa"}, "method 'medusa'"),
        ({"method": "eagle3"}, "names no model"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min 5"),
        ({"num_speculative_tokens_per_batch_size": []}, "must be a list"),
        ({"num_speculative_tokens_per_batch_size": [[2, 16, 5]]}, "2 to 16 where 1 comes next"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 5], [6, 9, 1]]}, "6 to 9 where 5 comes next"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 5], [4, 9, 1]]}, "4 to 9 where 5 comes next"),
        ({"num_speculative_tokens_per_batch_size": [[1, 0, 5]]}, "1 to 0"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 6]]}, "wants 6 guesses"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 1], [5, 9, 3]]}, "rises from 1 to 3"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4, -1]]}, "whole numbers"),
        ({"num_speculative_tokens_per_batch_size": [[1, 4]]}, "each row is"),
    ],
)
def test_what_vllm_would_refuse_or_misread_is_refused(change: dict[str, Any], told: str) -> None:
    check_vllm(GOOD)
    with pytest.raises(ConfigError, match=told):
        check_vllm({**GOOD, **change})


def test_a_measured_rise_is_allowed() -> None:
    rising = {**GOOD, "num_speculative_tokens_per_batch_size": [[1, 4, 1], [5, 9, 3]]}
    check_vllm(rising, rising=True)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ([], "must be an object"),
        ({"8": {"candidate_steps": [1]}}, 'no "1"'),
        ({"1": {"candidate_steps": []}}, "candidate_steps is"),
        ({"1": {"candidate_steps": [3, 1]}}, "must rise"),
        ({"1": {"candidate_steps": [1.5]}}, "whole numbers"),
        ({"1": [1, 3]}, "candidate_steps is None"),
        ({"1": {"candidate_steps": [1]}, "big": {"candidate_steps": [1]}}, "key 'big'"),
        ({"1": {"candidate_steps": [0]}}, "never guess"),
    ],
)
def test_what_sglang_would_refuse_is_refused(config: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_sglang(config)


# ---------------------------------------------------------------- the table itself


def test_the_table_is_the_best_of_a_closed_form() -> None:
    made = Made(10e-3, {"head": 1e-3}, {"head": 3}, token_s=4e-4, lengths=(1, 2, 3, 5))
    table = schedule(made.world(), chain("head", 3), 64, (1, 2, 3, 5))
    assert table.rows[0].low == 1
    assert table.rows[-1].high == 64
    for row in table.rows:
        for batch in (row.low, row.high):
            best = max(made.rate("head", length, batch) for length in (0, 1, 2, 3, 5))
            assert made.rate("head", row.length, batch) >= best * 0.97
    assert not table.rising
    lengths = [row.length for row in table.rows]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 3


def test_the_table_is_what_simulation_says() -> None:
    """Of every batch size tried, its length is within a few percent of the best by simulation."""
    made = Made(10e-3, {"head": 1.5e-3}, {"head": 2}, token_s=1e-3, output=241)
    world = made.world()
    table = schedule(world, chain("head", 2), 48, (1, 2, 4))
    for batch in (2, 12, 40):
        crowd = replace(world, workload=replace(world.workload, concurrency=batch))
        effort = Effort(1, 1, 2.0, (1500, 40))
        rates = {
            length: crowd.value(chain("head", length) if length else Candidate(), 0, effort)
            for length in (0, 1, 2, 4)
        }
        row = next(each for each in table.rows if each.low <= batch <= each.high)
        assert rates[row.length] >= 0.96 * max(rates.values())


def test_several_drafters_have_no_table() -> None:
    made = Made(10e-3, {"head": 1e-3}, {"head": 3})
    with pytest.raises(ConfigError, match="has not one drafter"):
        schedule(made.world(), Candidate(("ngram", "head"), "serial-chain"), 8)


# ---------------------------------------------------------------- our own


@pytest.mark.parametrize(
    "candidate",
    [
        Candidate(),
        Candidate(("ngram",), "serial-chain", 5, chunk=512),
        Candidate(("ngram", "suffix"), "serial-chain"),
        Candidate(("draft",), "serial-tree", 15, 4, 2, placed=Placed(4, 4)),
        Candidate(("draft",), "overlapped", placed=Placed(6, 2, apart=True)),
    ],
    ids=str,
)
def test_the_options_to_paste_are_the_configuration_that_was_simulated(candidate: Candidate) -> None:
    line = options_line(candidate, 8)
    result = CliRunner().invoke(cli, ["generate", *line.split(), "--print-config"])
    assert result.exit_code == 0, result.output
    config = candidate.config(8)
    devices = {"target_devices": "", "draft_devices": ""}
    if candidate.placed.devices > 1:
        devices["target_devices"] = "/".join(map(str, range(candidate.placed.target)))
    if candidate.placed.apart:
        devices["draft_devices"] = "6/7"
    groups = load_config(options={name: value or None for name, value in devices.items()}).groups
    mode = config.groups.mode
    expected = replace_groups(config, groups, mode)
    assert result.stdout.strip() == to_toml(expected).strip()


def replace_groups(config: Any, groups: Any, mode: Any) -> Any:
    from msgspec.structs import replace as with_

    return with_(config, groups=with_(groups, mode=mode))


def test_cores_are_no_ranks() -> None:
    candidate = Candidate(("small",), "overlapped", placed=Placed(2, 1, apart=True))
    line = options_line(candidate, 1, "folder/small", ranks=False)
    assert "--draft folder/small " in line
    assert line.endswith("--target-devices 0,1 --draft-devices 2")
    assert "devices" not in options_line(Candidate(placed=Placed(2)), 1, ranks=False)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    write_json(tmp_path / "file.json", {"a": 1})
    assert json.loads((tmp_path / "file.json").read_text()) == {"a": 1}
    with pytest.raises(ConfigError, match="cannot write"):
        write_json(tmp_path, {})
