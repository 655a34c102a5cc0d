"""Which cores or devices each group gets, and what is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest

from paceline.config import Config, load_config
from paceline.engine.device_groups import drafter_group, groups_of, parse_devices
from paceline.errors import ConfigError
from paceline.execution.parallel import Place


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def config(**options: Any) -> Config:
    return load_config(options={"threads": 8, **options})


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0", [(0,)]),
        ("0-3", [(0, 1, 2, 3)]),
        ("0-2,5", [(0, 1, 2, 5)]),
        (" 1 , 3-3 ", [(1, 3)]),
        ("0-1/2-3", [(0, 1), (2, 3)]),
        ("7/0/3", [(7,), (0,), (3,)]),
    ],
)
def test_cores_are_read_rank_by_rank(text: str, ranks: list[tuple[int, ...]]) -> None:
    assert parse_devices(text, "groups.target_devices", "cpu") == tuple(map(Place, ranks))


def test_on_cuda_each_rank_has_one_device() -> None:
    assert parse_devices("0/2", "groups.target_devices", "cuda") == (
        Place(device="cuda:0"),
        Place(device="cuda:2"),
    )
    with pytest.raises(ConfigError, match=r"on CUDA each rank has one device, as in 0/1"):
        parse_devices("0-1", "groups.target_devices", "cuda")


@pytest.mark.parametrize(
    ("text", "device", "problem"),
    [
        ("a", "cpu", "write numbers as in 0-3,8"),
        ("", "cpu", "write numbers"),
        ("0-", "cpu", "write numbers"),
        ("-1", "cpu", "write numbers"),
        ("3-1", "cpu", "write numbers"),
        ("0,,1", "cpu", "write numbers"),
        ("0/", "cpu", "write numbers"),
        ("0.5", "cpu", "write numbers"),
        ("0-2/2-3", "cpu", "core 2 is named twice; give each rank its own"),
        ("0,1,0", "cpu", "core 0 is named twice"),
        ("1/1", "cuda", "cuda:1 is named twice"),
        ("6-9", "cpu", "may not use core 8; its cores are 0, 1, 2, 3, 4, 5, 6, 7"),
    ],
)
def test_what_cannot_be_given_is_refused_by_name(text: str, device: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_devices(text, "groups.draft_devices", device)
    assert "groups.draft_devices is" in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(("threads", "shares"), [(2, (1, 1)), (3, (2, 1)), (4, (3, 1)), (8, (6, 2))])
def test_cores_that_nobody_assigned_are_split(threads: int, shares: tuple[int, int]) -> None:
    target, draft = groups_of(config(threads=threads), "cpu", separate=True)
    assert (len(target.cores), len(draft.cores)) == shares == (target.threads, draft.threads)
    assert sorted(target.cores + draft.cores) == list(range(threads))


def test_with_one_core_nobody_is_pinned() -> None:
    assert [group.cores for group in groups_of(config(threads=1), "cpu", separate=True)] == [(), ()]


def test_in_one_process_both_have_all_threads() -> None:
    for group in groups_of(config(threads=5), "cpu", separate=False):
        assert (group.places, group.threads) == ((), 5)


def test_what_is_assigned_is_what_each_gets() -> None:
    asked = config(target_devices="0-1/2-3", draft_devices="6", placement="disaggregated")
    target, draft = groups_of(asked, "cpu", separate=True)
    assert (target.cores, target.threads, len(target.places)) == ((0, 1, 2, 3), 4, 2)
    assert (draft.cores, draft.threads, len(draft.places)) == ((6,), 1, 1)


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({"target_devices": "0-5"}, ((0, 1, 2, 3, 4, 5), (6, 7))),
        ({"target_devices": "1,3/2,4"}, ((1, 3, 2, 4), (0, 5, 6, 7))),
        ({"draft_devices": "0"}, ((1, 2, 3, 4, 5, 6, 7), (0,))),
        ({"target_devices": "0-1", "threads": 3}, ((0, 1), (2,))),
    ],
    ids=str,
)
def test_what_one_does_not_get_the_other_gets(options: dict[str, Any], shares: Any) -> None:
    groups = groups_of(config(placement="disaggregated", **options), "cpu", separate=True)
    assert tuple(group.cores for group in groups) == shares


@pytest.mark.parametrize("key", ["target_devices", "draft_devices"])
def test_who_takes_all_cores_leaves_none(key: str) -> None:
    asked = config(placement="disaggregated", **{key: "0-7"})
    with pytest.raises(ConfigError, match=rf"groups.{key} has all the cores .* give it fewer, or choose"):
        groups_of(asked, "cpu", separate=True)


@pytest.mark.parametrize(
    "nobody",
    [
        {"draft": "none"},
        {"mode": "autoregressive"},
        {"draft_address": "tcp://a:1", "draft_key_file": "k"},
    ],
    ids=str,
)
def test_without_a_drafter_here_the_target_may_have_all(nobody: dict[str, Any]) -> None:
    given = config(placement="disaggregated", target_devices="0-7", **nobody)
    assert groups_of(given, "cpu", separate=True)[0].cores == tuple(range(8))
    open_ = groups_of(config(placement="disaggregated", **nobody), "cpu", separate=True)[0]
    assert (open_.cores, open_.threads) == ((), 8)


def test_cores_in_common_are_told(caplog: pytest.LogCaptureFixture) -> None:
    asked = config(placement="disaggregated", target_devices="0-4", draft_devices="3-5")
    target, draft = groups_of(asked, "cpu", separate=True)
    assert (target.cores, draft.cores) == ((0, 1, 2, 3, 4), (3, 4, 5))
    assert "the cores 3, 4 in common: they will wait for each other" in caplog.text


def test_in_one_process_the_drafter_has_the_targets_cores() -> None:
    for text, cores in (("2-3", (2, 3)), ("0-1/4-5", (0, 1, 4, 5))):
        target, draft = groups_of(config(target_devices=text), "cpu", separate=False)
        assert [place.cores for place in draft.places] == [cores]
        assert (draft.threads, target.cores) == (len(cores), cores)
    target, draft = groups_of(config(target_devices="1/3"), "cuda", separate=False)
    assert draft.places == (Place(device="cuda:1"),)


def test_where_the_system_does_not_say_all_cores_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    target, draft = groups_of(config(threads=4), "cpu", separate=True)
    assert (target.cores, draft.cores) == ((0, 1, 2), (3,))
    with pytest.raises(ConfigError, match="may not use core 4"):
        parse_devices("4", "groups.target_devices", "cpu")


def test_a_drafter_of_this_process_has_no_cores_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"draft_devices is set .* choose placement = disaggregated"):
        groups_of(config(draft_devices="0"), "cpu", separate=False)


def test_the_drafters_own_process_takes_the_cores_it_was_pinned_to() -> None:
    assert drafter_group(config(), "cpu", (6, 7)).cores == (6, 7)
    asked = config(draft_devices="4/5", placement="disaggregated")
    assert [place.cores for place in drafter_group(asked, "cpu", (4, 5)).places] == [(4,), (5,)]
    assert drafter_group(config(threads=3), "cpu", ()).threads == 3
