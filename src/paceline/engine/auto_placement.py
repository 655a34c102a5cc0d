"""`placement = auto`: which placement is faster here, from passes measured at start-up."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from paceline.config import Config, GroupsConfig
from paceline.core.scheduler import Limits
from paceline.engine.device_groups import DeviceGroup, groups_of
from paceline.engine.machine import resolve_device, resolve_precision
from paceline.engine.model_setup import ModelSetup
from paceline.execution.forward_batch import Segment
from paceline.execution.model_runner import ModelRunner
from paceline.loading import LoadedModel, load

logger = logging.getLogger(__name__)

_CONTEXT = 128
_GUESSES = 7
_ACCEPTANCE = 0.8
"""Of one more guess in a row, before any was made: what draft models of a target's own family reach on mixed
text (docs/benchmarks.md). Both placements are judged by it, so that it decides only close cases."""
_PREFER_SERIAL = 1.03
_PASSES = 5


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. target: of a pass over the root and so many guesses, by their number.  draft: of a pass."""

    target: tuple[float, ...]
    draft: float


def settled(config: Config) -> Config:
    """`config` with the placement decided, where it was left to be. Raises as `build` does."""
    if config.groups.placement != "auto":
        return config
    placement: Literal["serial", "disaggregated"] = "serial"
    if config.speculation.draft in ("ngram", "none"):
        logger.info("placement: serial, since guesses by %s take no time", config.speculation.draft)
    else:
        placement = _faster(config)
    groups = replace(config.groups, placement=placement)
    return replace(config, groups=groups if placement == "disaggregated" else _in_one(groups))


def _in_one(groups: GroupsConfig) -> GroupsConfig:
    """Without the cores that the drafter would have had in a process of its own."""
    return replace(groups, draft_devices="")


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


def _faster(config: Config) -> Literal["serial", "disaggregated"]:
    device = resolve_device(config)
    model, draft = load(config.model), load(config.speculation.draft)
    target_group, draft_group = groups_of(config, device, separate=True)
    if not target_group.places or set(target_group.places) & set(draft_group.places):
        return "serial"
    in_one = groups_of(replace(config, groups=_in_one(config.groups)), device, separate=False)
    together = serial_rate(_measured(config, model, draft, device, *in_one))
    apart = overlapped_rate(_measured(config, model, draft, device, target_group, draft_group))
    placement: Literal["serial", "disaggregated"] = (
        "disaggregated" if apart > together * _PREFER_SERIAL else "serial"
    )
    logger.info(
        "placement: %s, expected %.1f tokens/s in turn and %.1f at the same time", placement, together, apart
    )
    return placement


def _measured(
    config: Config,
    model: LoadedModel,
    draft: LoadedModel,
    device: str,
    target_group: DeviceGroup,
    draft_group: DeviceGroup,
) -> Costs:
    """Where the groups differ both are busy while either is measured: they may share more than their cores,
    such as the memory bus."""
    limits = Limits(context_length=2 * _CONTEXT, num_slots=2 * _CONTEXT, max_num_seqs=1)
    runners = [
        ModelSetup(each, resolve_precision(dtype, device), device, group, config.exact).runner(
            limits, limits.context_length
        )
        for each, dtype, group in (
            (model, config.dtype, target_group),
            (draft, config.speculation.draft_dtype, draft_group),
        )
    ]
    for runner in runners:
        runner.tables.write(0, 0, range(_CONTEXT))
        runner.forward([Segment(0, 0, [1] * _CONTEXT, False)])
    target, drafter = runners
    apart = target_group != draft_group
    with _Busy(drafter, apart):
        costs = tuple(_pass_s(target, guesses) for guesses in range(_GUESSES + 1))
    with _Busy(target, apart):
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
