"""`placement = auto`: what decides, and what is measured only where nothing else does."""

from __future__ import annotations

import os
from typing import Any

import pytest

from paceline.config import Config, load_config
from paceline.engine import auto_placement
from paceline.engine.auto_placement import Costs, overlapped_rate, serial_rate, settled
from paceline.errors import ConfigError
from paceline.modes import MODES


def config(**options: Any) -> Config:
    return load_config(options={"placement": "auto", "draft": "a/model", "device": "cpu", **options})


def test_in_turn_each_guess_costs_a_draft_pass() -> None:
    even = (1.0, 1.0, 1.0)
    assert serial_rate(Costs(even, 0.1), 0.5) == pytest.approx(1.75 / 1.2)
    assert serial_rate(Costs(even, 1.0), 0.5) == 1.0, "guesses that cost more than they bring are not made"
    assert serial_rate(Costs((1.0, 1.5), 0.0), 0.5) == 1.0, "nor where verifying them does"


def test_at_the_same_time_a_guess_costs_nothing_but_must_have_grown() -> None:
    even = (1.0, 1.0, 1.0, 1.0)
    assert overlapped_rate(Costs(even, 0.5), 0.5) == 1.75
    assert overlapped_rate(Costs(even, 0.1), 0.5) == 1.875
    assert overlapped_rate(Costs(even, 2.0), 0.5) == 1.0
    assert overlapped_rate(Costs((1.0, 3.0), 0.1), 0.5) == 1.0


# ---------------------------------------------------------------- what decides


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> Costs:
        raise AssertionError("measured")

    monkeypatch.setattr(auto_placement, "load", never)
    monkeypatch.setattr(auto_placement, "_measured", never)


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("options", "placement"),
    [
        ({"draft": "ngram"}, "serial"),
        ({"draft": "none"}, "serial"),
        ({"draft": None, "draft_address": "tcp://a:1", "draft_key_file": "k"}, "disaggregated"),
        *(({"mode": name}, "disaggregated" if mode.separate else "serial") for name, mode in MODES.items()),
        ({"mode": "overlapped", "draft": "ngram"}, "disaggregated"),
    ],
    ids=str,
)
def test_what_is_said_decides(options: dict[str, Any], placement: str) -> None:
    assert settled(config(**options)).groups.placement == placement


@pytest.mark.usefixtures("unmeasured")
def test_a_drafter_of_the_callers_own_stays_in_this_process() -> None:
    assert settled(config(), own_drafter=True).groups.placement == "serial"


@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("placement", [None, "serial", "disaggregated"])
def test_what_is_not_left_open_stays(placement: str | None) -> None:
    asked = config(placement=placement)
    assert settled(asked) is asked


# ---------------------------------------------------------------- what is measured


def measuring(monkeypatch: pytest.MonkeyPatch, in_turn: Costs, at_once: Costs, cores: int = 8) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(auto_placement, "load", lambda name: name)
    monkeypatch.setattr(auto_placement, "is_head", lambda name: name == "head")

    def measured(*found: Any, together: bool) -> Costs:
        target, draft = found[-1]
        assert bool(set(target.cores) & set(draft.cores)) <= (not together)
        return at_once if together else in_turn

    monkeypatch.setattr(auto_placement, "_measured", measured)


SLOW, FAST = Costs((1.0,) * 8, 0.9), Costs((1.0,) * 8, 0.1)


def test_the_faster_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch, in_turn=SLOW, at_once=FAST)
    assert settled(config(threads=8)).groups.placement == "disaggregated"
    measuring(monkeypatch, in_turn=FAST, at_once=SLOW)
    found = settled(config(threads=8, draft_devices="7", draft_timeout=9.0)).groups
    assert (found.placement, found.draft_devices, found.draft_timeout) == ("serial", "", 2.0)


def test_a_hair_is_not_worth_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    just = Costs((1 / serial_rate(FAST) / 1.02,), 1.0)
    measuring(monkeypatch, in_turn=FAST, at_once=just)
    assert settled(config(threads=8)).groups.placement == "serial"


@pytest.mark.parametrize(
    ("cores", "options"),
    [
        (1, {}),
        (4, {"target_devices": "0-3"}),
        (4, {"target_devices": "0-2", "draft_devices": "2-3"}),
    ],
    ids=str,
)
def test_where_they_would_share_cores_nothing_is_measured(
    cores: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring(monkeypatch, SLOW, FAST, cores)
    monkeypatch.setattr(auto_placement, "_measured", None)
    assert settled(config(threads=cores, **options)).groups.placement == "serial"


def test_what_cannot_be_given_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch, SLOW, FAST)
    with pytest.raises(ConfigError, match="write numbers"):
        settled(config(draft_devices="a"))


def test_a_head_stays_beside_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch, SLOW, FAST)
    assert settled(config(draft="head")).groups.placement == "serial"
