"""Which processor cores or devices each group gets."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import Config
from paceline.drafters.registry import drafters_of
from paceline.engine.machine import num_threads, usable_cores
from paceline.errors import ConfigError, shown
from paceline.execution.parallel import Place

logger = logging.getLogger(__name__)

_KEYS = ("groups.target_devices", "groups.draft_devices")


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """The ranks of one model. threads: of a single rank that is not pinned to cores."""

    places: tuple[Place, ...]
    threads: int

    @property
    def cores(self) -> tuple[int, ...]:
        return tuple(core for place in self.places for core in place.cores)


def parse_devices(text: str, key: str, device: str) -> tuple[Place, ...]:
    """`0-3/4,5`: a rank with cores 0 to 3 and one with 4 and 5; on CUDA one device number per rank.

    Raises ConfigError that names `key`.
    """
    places = []
    for part in text.split("/"):
        numbers = _numbers(part, text, key)
        if device == "cuda":
            if len(numbers) != 1:
                raise ConfigError(f"{key} is {shown(text)}: on CUDA each rank has one device, as in 0/1.")
            places.append(Place(device=f"cuda:{numbers[0]}"))
        else:
            _check_cores(numbers, text, key)
            places.append(Place(tuple(numbers)))
    taken = [name for place in places for name in place.cores or (place.device,)]
    twice = next((name for name in taken if taken.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"{key} is {shown(text)}: {twice if device == 'cuda' else f'core {twice}'} is named twice; give "
            "each rank its own, or two would wait for each other."
        )
    return tuple(places)


def groups_of(config: Config, device: str, *, separate: bool) -> tuple[DeviceGroup, DeviceGroup]:
    """The target's group and the drafter's. separate: they run at the same time, so that cores which nobody
    assigned are split: the drafter gets the last one of every four, at least one; where one of the two was
    given its own, the other gets what is left.

    Raises ConfigError.
    """
    settings, threads = config.groups, num_threads(config.threads)
    if not separate:
        if settings.draft_devices:
            raise ConfigError(
                "groups.draft_devices is set but the drafter runs in the target's process: choose placement "
                "= disaggregated, or leave it out."
            )
        target = _group(settings.target_devices, _KEYS[0], device, threads)
        return target, _in_one_rank(target)
    target, draft = (
        _group(text, key, device, threads)
        for text, key in zip((settings.target_devices, settings.draft_devices), _KEYS, strict=True)
    )
    if device != "cpu" or settings.draft_address or not _has_drafter(config):
        return target, draft
    if not target.places and not draft.places:
        cores = usable_cores()[:threads]
        share = max(1, len(cores) // 4)
        return (_pinned(cores[:-share]), _pinned(cores[-share:])) if len(cores) > 1 else (target, draft)
    if not draft.places:
        return target, _rest(target, _KEYS[0], "drafter", threads)
    if not target.places:
        return _rest(draft, _KEYS[1], "target", threads), draft
    if both := sorted(set(target.cores) & set(draft.cores)):
        logger.warning(
            "target and drafter have the cores %s in common: they will wait for each other there",
            ", ".join(map(str, both)),
        )
    return target, draft


def _has_drafter(config: Config) -> bool:
    return bool(drafters_of(config)) and config.groups.mode != "autoregressive"


def _in_one_rank(group: DeviceGroup) -> DeviceGroup:
    """A drafter of the target's process, with all that the target has: they take turns."""
    if len(group.places) <= 1:
        return group
    place = Place(group.cores, group.places[0].device)
    return DeviceGroup((place,), group.threads)


def _rest(given: DeviceGroup, key: str, other: str, threads: int) -> DeviceGroup:
    """The cores that `given` leaves, for the other group, within the number of threads."""
    left = [core for core in usable_cores() if core not in given.cores]
    if not left:
        raise ConfigError(
            f"{key} has all the cores that this process may use, and leaves none for the {other}: give it "
            "fewer, or choose placement = serial."
        )
    return _pinned(left[: max(1, threads - len(given.cores))])


def drafter_group(config: Config, device: str, cores: Sequence[int]) -> DeviceGroup:
    """The drafter's group as its own process sees it. cores: that it was pinned to, if to any.

    Raises ConfigError.
    """
    if cores and not config.groups.draft_devices:
        return _pinned(list(cores))
    return _group(config.groups.draft_devices, _KEYS[1], device, num_threads(config.threads))


def _group(text: str, key: str, device: str, threads: int) -> DeviceGroup:
    places = parse_devices(text, key, device) if text else ()
    cores = sum(len(place.cores) for place in places)
    return DeviceGroup(places, cores or threads)


def _pinned(cores: list[int]) -> DeviceGroup:
    return DeviceGroup((Place(tuple(cores)),), len(cores))


_MOST_DIGITS = 5


def _numbers(part: str, text: str, key: str) -> list[int]:
    numbers: list[int] = []
    for piece in part.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ConfigError(f"{key} is {shown(text)}: write numbers as in 0-3,8 and ranks as in 0-3/4-7.")
        if len(last or first) > _MOST_DIGITS:
            raise ConfigError(f"{key} is {shown(text)}: no machine has a core or device {last or first}.")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers


def _check_cores(cores: list[int], text: str, key: str) -> None:
    usable = usable_cores()
    missing = sorted(set(cores) - set(usable))
    if missing:
        raise ConfigError(
            f"{key} is {shown(text)}: this process may not use core {missing[0]}; its cores are "
            f"{', '.join(map(str, usable))}."
        )
