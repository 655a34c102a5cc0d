"""`placement = auto`: which placement is faster here, from passes measured at start-up."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from paceline.config import Config, GroupsConfig
from paceline.core.scheduler import Limits
from paceline.drafters.registry import drafters_of
from paceline.engine.device_groups import DeviceGroup, groups_of
from paceline.engine.machine import resolve_device, resolve_precision
from paceline.engine.model_setup import ModelSetup
from paceline.errors import ConfigError
from paceline.execution.forward_batch import Segment
from paceline.execution.model_runner import ModelRunner
from paceline.loading import LoadedModel, load
from paceline.loading.heads import is_head
from paceline.modes import MODES

logger = logging.getLogger(__name__)

_CONTEXT = 128
_GUESSES = 7
_ACCEPTANCE = 0.8
"""Of one more guess in a row, before any was made: what draft models of a target's own family reach on mixed
text (docs/benchmarks.md). Both placements are judged by it, so that it decides only close cases."""
_PREFER_SERIAL = 1.03
_PASSES = 5

Settled = Literal["serial", "disaggregated"]
Groups = tuple[DeviceGroup, DeviceGroup]
"""The target's and the drafter's."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. target: of a pass over the root and so many guesses, by their number.  draft: of a pass."""

    target: tuple[float, ...]
    draft: float


def settled(config: Config, *, own_drafter: bool = False) -> Config:
    """`config` with the placement decided, where it was left to be. own_drafter: it is an object of the
    caller's. Raises as `build` does."""
    if config.groups.placement != "auto":
        return config
    placement = _given(config, own_drafter=own_drafter) or _faster(config)
    groups = replace(config.groups, placement=placement)
    return replace(config, groups=groups if placement == "disaggregated" else _in_one(groups))


def _given(config: Config, *, own_drafter: bool) -> Settled | None:
    """What follows without measuring."""
    groups, drafters = config.groups, drafters_of(config, own_drafter=own_drafter)
    placement: Settled = "serial"
    if groups.mode is not None:
        placement = "disaggregated" if MODES[groups.mode].separate else "serial"
        reason = f"the mode is {groups.mode}"
    elif own_drafter:
        reason = "the drafter is an object of this process"
    elif groups.draft_address:
        placement, reason = "disaggregated", "the drafter is on another host"
    elif any(each.kind.in_process for each in drafters):
        reason = f"{config.speculation.draft} has to run in the target's process"
    elif not any(each.kind.weights for each in drafters):
        reason = f"guesses by {config.speculation.draft} take no time"
    elif [each.kind.weights for each in drafters] != ["named"]:
        reason = "only a draft model by itself is measured"
    else:
        return None
    logger.info("placement: %s, because %s", placement, reason)
    return placement


def _in_one(groups: GroupsConfig) -> GroupsConfig:
    """Without what is said of a drafter in a process of its own."""
    return replace(groups, draft_devices="", draft_timeout=GroupsConfig().draft_timeout)


def serial_rate(costs: Costs, acceptance: float = _ACCEPTANCE) -> float:
    """Tokens per second of chains of the best length, draft and target in turn."""
    return max(
        _expected(length, acceptance) / (costs.target[length] + length * costs.draft)
        for length in range(len(costs.target))
    )


def overlapped_rate(costs: Costs, acceptance: float = _ACCEPTANCE) -> float:
    """Tokens per second at the same time: while the target is busy the tree grows by a level per draft pass,
    and no more can be verified than has grown."""
    rates = []
    for guesses, seconds in enumerate(costs.target):
        levels = min(guesses, int(seconds / costs.draft))
        rates.append(_expected(levels, acceptance) / seconds)
    return max(rates)


def _expected(length: int, acceptance: float) -> float:
    return sum(acceptance**level for level in range(length + 1))


def _faster(config: Config) -> Settled:
    device = resolve_device(config)
    apart = _apart(config, device)
    if apart is None:
        return "serial"
    if is_head(config.speculation.draft):
        logger.info("placement: serial, because a head reads what the target computes")
        return "serial"
    model, draft = load(config.model), load(config.speculation.draft)
    in_one = groups_of(replace(config, groups=_in_one(config.groups)), device, separate=False)
    in_turn = serial_rate(_measured(config, model, draft, device, in_one, together=False))
    at_once = overlapped_rate(_measured(config, model, draft, device, apart, together=True))
    placement: Settled = "disaggregated" if at_once > in_turn * _PREFER_SERIAL else "serial"
    logger.info(
        "placement: %s, expected %.1f tokens/s in turn and %.1f at the same time", placement, in_turn, at_once
    )
    return placement


def _apart(config: Config, device: str) -> Groups | None:
    """The groups of two processes; None where they would have to share."""
    try:
        target, draft = groups_of(config, device, separate=True)
    except ConfigError:
        if config.groups.draft_devices:
            raise
        return None  # the target was given every core
    shared = set(target.cores) & set(draft.cores) or set(target.places) & set(draft.places)
    return (target, draft) if target.places and draft.places and not shared else None


def _measured(
    config: Config,
    model: LoadedModel,
    draft: LoadedModel,
    device: str,
    groups: Groups,
    *,
    together: bool,
) -> Costs:
    """together: both are busy while either is measured, since they may share more than their cores, such as
    the memory bus."""
    limits = Limits(context_length=2 * _CONTEXT, num_slots=2 * _CONTEXT, max_num_seqs=1)
    dtypes = config.dtype, config.speculation.draft_dtype
    runners = []
    with ExitStack() as stack:
        for each, dtype, group in zip((model, draft), dtypes, groups, strict=True):
            setup = ModelSetup(each, resolve_precision(dtype, device), device, group, config.exact)
            runner = setup.runner(limits, limits.context_length)
            stack.callback(runner.close)
            runner.tables.write(0, 0, range(_CONTEXT))
            runner.forward([Segment(0, 0, [1] * _CONTEXT, False)])
            runners.append(runner)
        target, drafter = runners
        with _Busy(drafter, together):
            costs = tuple(_pass_s(target, guesses) for guesses in range(_GUESSES + 1))
        with _Busy(target, together):
            one = _pass_s(drafter, 0)
    return Costs(costs, one)


class _Busy:
    """Keeps a runner running passes on a thread of its own, where asked to."""

    def __init__(self, runner: ModelRunner, wanted: bool) -> None:
        self._runner = runner
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True) if wanted else None

    def __enter__(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            _one_pass(self._runner, 0)


def _pass_s(runner: ModelRunner, guesses: int) -> float:
    _one_pass(runner, guesses)
    seconds = []
    for _ in range(_PASSES):
        began = time.perf_counter()
        _one_pass(runner, guesses)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _one_pass(runner: ModelRunner, guesses: int) -> None:
    paths = [list(range(_CONTEXT, _CONTEXT + depth + 1)) for depth in range(guesses)]
    runner.forward([Segment(0, _CONTEXT - 1, [1], True, [1] * guesses, paths)])
