"""What a plan is asked for: options become a world, a space and candidates, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from paceline.cli._options import check_writable
from paceline.errors import ConfigError
from paceline.sim.acceptance import RequestTrace, read_traces
from paceline.sim.costs.hardware import gpu_named, shape_of
from paceline.sim.costs.model import CostModel, load_costs
from paceline.sim.costs.published import published
from paceline.sim.costs.roofline import efficiency_of
from paceline.sim.metrics import parse_slo
from paceline.sim.plan.candidates import Candidate, DrafterOption, Space, candidates
from paceline.sim.plan.machines import Gpus, Machine, Measured
from paceline.sim.plan.world import Objective, Workload, World
from paceline.sim.run.requests import usable
from paceline.workload import Lengths, faster, read_lengths

_OF_GPUS = (
    "target",
    "gpus",
    "weight_bits",
    "efficiency",
    "tensor_parallel",
    "draft_tensor_parallel",
    "pad_heads",
    "message_us",
)
_LOOKUPS = ("ngram", "suffix")
_HEADS = ("eagle", "eagle3", "mtp", "head")
_WAYS = ("serial", "overlapped", "disaggregated")


@dataclass(frozen=True, slots=True)
class Asked:
    """checkpoints: by drafter.  left_out: recorded drafters whose costs nobody knows."""

    world: World
    space: Space
    drafters: tuple[DrafterOption, ...]
    candidates: list[Candidate]
    checkpoints: dict[str, str]
    left_out: tuple[str, ...]
    seed: int


def asked(values: dict[str, Any]) -> Asked:
    """Raises ConfigError."""
    _check_numbers(values)
    if not values["traces"]:
        raise ConfigError("there is no workload: give --traces FILE, as paceline trace records them.")
    traces = [trace for path in values["traces"] for trace in read_traces(path).requests]
    shapes = dict(_pair("--draft", given) for given in values["draft"])
    known = tuple(dict.fromkeys(name for each in traces for name in each.drafters))
    costs = _costs(values)
    names, left_out = _names(shapes, known, costs)
    recorded = [name for name in names if name not in _LOOKUPS]
    kept = usable(traces, recorded)
    drafters = tuple(_option(name, shapes.get(name), kept, costs) for name in names)
    world = World(
        _workload(values, kept),
        Measured(costs) if costs is not None else _gpus(values, shapes, names),
        _objective(values),
        {each.name: each.trees for each in drafters},
    )
    checkpoints = dict(_pair("--checkpoint", given) for given in values["checkpoint"])
    _check_exports(values, drafters, checkpoints)
    space = _space(values)
    most = world.most_context
    models = any(each.drive == "model" for each in drafters)
    found = candidates(
        space,
        drafters,
        world.machine.alone(most),
        world.machine.together(most) if models else (),
    )
    return Asked(
        world,
        space,
        drafters,
        found,
        {name: model or "" for name, model in checkpoints.items()},
        left_out,
        values["seed"],
    )


def _check_numbers(values: dict[str, Any]) -> None:
    for name in ("max_output", "max_context"):
        if values[name] < 0 or values[name] == 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {values[name]}: give 0 = any, or more than 1.")
    for name in ("concurrency", "max_batch"):
        if values[name] is not None and not 1 <= values[name] <= 65536:
            raise ConfigError(f"--{name.replace('_', '-')} is {values[name]}: give a number from 1 to 65536.")
    if values["message_us"] is not None and not (
        isfinite(values["message_us"]) and values["message_us"] >= 0
    ):
        raise ConfigError(f"--message-us is {values['message_us']}: give microseconds, not below 0.")


def _pair(option: str, given: str) -> tuple[str, str | None]:
    name, equals, value = given.partition("=")
    if not name or (equals and not value):
        raise ConfigError(f"{option} is {given!r}: write NAME, or NAME=VALUE.")
    return name, value or None


# ---------------------------------------------------------------- drafters


def _names(
    shapes: dict[str, str | None], known: Sequence[str], costs: CostModel | None
) -> tuple[list[str], tuple[str, ...]]:
    """Those to be tried, and those that cannot be for want of costs."""
    if shapes:
        bare = next((name for name in (*_LOOKUPS, "none") if shapes.get(name) is not None), None)
        if bare is not None:
            raise ConfigError(
                f"--draft is {bare}={shapes[bare]}, but {bare} has no model: write {bare} alone."
            )
        names = [name for name in shapes if name != "none"]
        unknown = [name for name in names if name not in known and name not in _LOOKUPS]
        if unknown:
            raise ConfigError(
                f"the traces hold no record of a drafter {unknown[0]!r}: they have "
                f"{', '.join(known) or 'none'}; name one of these, or record it with paceline trace."
            )
    else:
        names = list(dict.fromkeys([*_LOOKUPS, *known]))
    priced = [name for name in names if _priced(name, shapes.get(name), costs)]
    missing = tuple(name for name in names if name not in priced)
    if missing and shapes:
        if costs is not None:
            costs.draft(missing[0])
        raise ConfigError(
            f"nothing says what the drafter {missing[0]} takes: write --draft {missing[0]}=SHAPE with the "
            "shape of its model, as llama-3.2-1b."
        )
    return priced, missing


def _priced(name: str, shape: str | None, costs: CostModel | None) -> bool:
    if costs is not None:
        return name in costs.drafts
    return name in _LOOKUPS or name in _HEADS or shape is not None


def _option(
    name: str, shape: str | None, traces: Sequence[RequestTrace], costs: CostModel | None
) -> DrafterOption:
    if name in _LOOKUPS:
        return DrafterOption(name, "lookup")
    trees = all(each.drafters[name].top is not None for each in traces)
    if costs is not None:
        apart = any(name in part.drafts for part in costs.by_cores.values())
        return DrafterOption(name, "model" if apart else "head", trees)
    return DrafterOption(name, "head" if shape is None else "model", trees)


def _check_exports(
    values: dict[str, Any], drafters: Sequence[DrafterOption], checkpoints: dict[str, str | None]
) -> None:
    """Before anything is simulated."""
    for name, model in checkpoints.items():
        if model is None:
            raise ConfigError(f"--checkpoint is {name!r}: write NAME=MODEL, a folder or a hub's name.")
        if name not in [each.name for each in drafters]:
            raise ConfigError(f"--checkpoint names {name!r}, which is no drafter of this plan.")
    weighty = [each.name for each in drafters if each.drive != "lookup" and each.name != "mtp"]
    if values["vllm_out"] is not None:
        bare = [name for name in weighty if name not in checkpoints]
        if bare:
            raise ConfigError(
                f"--vllm-out needs the name of each drafter's weights: add --checkpoint {bare[0]}=MODEL."
            )
    if values["sglang_out"] is not None and not any(each.drive == "head" for each in drafters):
        raise ConfigError("SGLang adapts the steps of EAGLE heads only: name one with --draft eagle3.")
    for name in ("vllm_out", "sglang_out"):
        check_writable(f"--{name.replace('_', '-')}", values[name])


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


# ---------------------------------------------------------------- workload, machine, aim


def _workload(values: dict[str, Any], traces: Sequence[RequestTrace]) -> Workload:
    for name, needed in (("speed", "lengths"), ("burstiness", "rate")):
        if values[name] is not None and values[needed] is None:
            raise ConfigError(f"--{name} is for --{needed}: give that, or leave it out.")
    rows: tuple[Lengths, ...] = ()
    if values["lengths"] is not None:
        rows = tuple(faster(read_lengths(values["lengths"]), _or(values["speed"], 1.0)))
    return Workload(
        tuple(traces),
        values["concurrency"],
        values["rate"],
        _or(values["burstiness"], 1.0),
        rows,
        values["max_output"],
        values["max_context"],
        values["seed"],
    )


def _costs(values: dict[str, Any]) -> CostModel | None:
    given = [name for name in ("costs", "published", "gpu") if values[name] is not None]
    if len(given) != 1:
        raise ConfigError(
            f"{' and '.join(f'--{name}' for name in given) + ' both say' if given else 'nothing says'} "
            "what passes take: give one of --costs FILE, --published NAME and --gpu NAME."
        )
    if given == ["gpu"]:
        return None
    for name in _OF_GPUS:
        if values[name]:
            raise ConfigError(f"--{name.replace('_', '-')} is for --gpu: leave it out.")
    return load_costs(values["costs"]) if given == ["costs"] else published(values["published"])


def _gpus(values: dict[str, Any], shapes: dict[str, str | None], names: Sequence[str]) -> Machine:
    gpu = gpu_named(values["gpu"])
    if values["target"] is None:
        raise ConfigError("--gpu needs the target's shape: give --target NAME, as llama-3.1-8b.")
    models = {name: shape_of(shape) for name, shape in shapes.items() if shape is not None and name in names}
    return Gpus(
        gpu,
        _or(values["gpus"], 1),
        shape_of(values["target"]),
        models,
        [name for name in names if name not in models and name not in _LOOKUPS],
        _or(values["weight_bits"], 16.0),
        efficiency_of(_settings(values["efficiency"])),
        _numbers("--tensor-parallel", values["tensor_parallel"]),
        _numbers("--draft-tensor-parallel", values["draft_tensor_parallel"]),
        padded=values["pad_heads"],
        message_s=_or(values["message_us"], 50.0) * 1e-6,
    )


def _settings(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for each in given:
        name, _, number = each.partition("=")
        try:
            found[name] = float(number)
        except ValueError:
            raise ConfigError(f"--efficiency is {each!r}: write NAME=X, as in bandwidth=0.7.") from None
    return found


def _objective(values: dict[str, Any]) -> Objective:
    slo = parse_slo(values["slo"]) if values["slo"] is not None else None
    goal = values["objective"]
    if goal == "auto":
        open_ = values["concurrency"] is None
        goal = "goodput" if slo is not None else "p50" if open_ else "throughput"
    if slo is not None and goal != "goodput":
        raise ConfigError(f"--slo has no meaning for --objective {goal}: leave one of them out.")
    return Objective(goal, values["latency"], slo)


def _space(values: dict[str, Any]) -> Space:
    ways = [way.strip() for way in values["placements"].split(",")]
    for way in ways:
        if way not in _WAYS:
            raise ConfigError(f"--placements has {way!r}: give some of {', '.join(_WAYS)}.")
    lengths = [each.strip() for each in values["guesses"].split(",")]
    numbers = _numbers("--guesses", ",".join(each for each in lengths if each != "auto") or None)
    if any(each > 256 for each in numbers):
        raise ConfigError(f"--guesses is {values['guesses']}: give numbers up to 256, or auto.")
    return Space(
        (*numbers, *((None,) if "auto" in lengths else ())),
        chunks=_numbers("--chunks", values["chunks"]),
        serial="serial" in ways,
        overlapped="overlapped" in ways,
        disaggregated="disaggregated" in ways,
    )


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(1 <= number <= 2**20 for number in numbers):
        raise ConfigError(f"{option} is {text!r}: give whole numbers from 1, as 1,2,4.")
    return tuple(dict.fromkeys(numbers))
