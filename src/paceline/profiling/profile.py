"""`paceline profile` as a function: a configuration in, a `CostModel` and what it is worth out."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import numpy as np
from msgspec.structs import replace

from paceline import __version__
from paceline.config import Config, GroupsConfig, SpeculationConfig
from paceline.core.scheduler import Limits
from paceline.drafters.registry import drafters_of
from paceline.engine.build import Built, build
from paceline.engine.machine import resolve_device, usable_cores
from paceline.errors import ConfigError
from paceline.profiling.fit import (
    DraftSample,
    FitError,
    draft_error,
    fitted_draft,
    fitted_pass,
    pass_error,
    scaled,
    split,
)
from paceline.profiling.measure import Measured, Measurement
from paceline.profiling.nnls import nonnegative
from paceline.profiling.plan import CHUNK, QUICK, PassCell, Plan
from paceline.profiling.rig import Rig
from paceline.profiling.streams import streaming_s
from paceline.profiling.text import TEXT
from paceline.sim.costs.forms import TableDraft, TablePass
from paceline.sim.costs.model import CoreCosts, CostModel

Progress = Callable[[float, str], None]
_GROUPS = GroupsConfig()


@dataclass(frozen=True, slots=True)
class Profile:
    """errors: of the target, "target", and each drafter, on what their fits have not seen."""

    costs: CostModel
    errors: dict[str, FitError]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Part:
    """On one number of cores."""

    target: TablePass
    drafts: dict[str, TableDraft]
    errors: dict[str, FitError]
    steps: tuple[float, float]
    about: dict[str, object]


def profile(config: Config, plan: Plan, cores: Sequence[int] | None, progress: Progress) -> Profile:
    """cores: numbers of them; the first is what the costs are for, the others come beside, from fewer
    measurements. None = all, and, if the plan is not the quick one, half of them.

    Raises as `engine.build.build` does.
    """
    on_cpu = resolve_device(config) == "cpu"
    cores = _cores(config, cores, on_cpu=on_cpu, also_half=plan is not QUICK)
    began = time.perf_counter()
    names = [each.name for each in drafters_of(config)]
    parts: dict[int, _Part] = {}
    for at, count in enumerate(cores or (0,)):

        def within(share: float, what: str, at: int = at, count: int = count) -> None:
            on = f" on {count} core{'s' if count != 1 else ''}" if cores else ""
            progress((at + share) / max(len(cores), 1), f"{what}{on}")

        here = replace(config, threads=count) if on_cpu else config
        parts[count] = _part(here, plan if at == 0 else QUICK, names, within)
    first, *others = parts.items()
    count, part = first
    costs = CostModel(
        target=part.target,
        drafts=part.drafts,
        step_overhead_s=part.steps[0],
        request_overhead_s=part.steps[1],
        cores=count,
        by_cores={number: CoreCosts(other.target, other.drafts) for number, other in others},
        provenance={
            "source": "paceline profile",
            "version": __version__,
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": f"{platform.machine()}, {len(usable_cores())} cores",
            "held_out": {name: asdict(error) for name, error in part.errors.items()},
            **part.about,
        },
    )
    progress(1.0, "done")
    return Profile(costs, part.errors, time.perf_counter() - began)


def _cores(config: Config, cores: Sequence[int] | None, *, on_cpu: bool, also_half: bool) -> Sequence[int]:
    groups = config.groups
    given = [name for name in groups.__struct_fields__ if getattr(groups, name) != getattr(_GROUPS, name)]
    if given:
        raise ConfigError(
            f"groups.{given[0]} is set, but passes are measured one at a time in this process: leave it out, "
            "and choose cores with --cores."
        )
    if not on_cpu:
        if cores is not None:
            raise ConfigError("--cores is given, but the passes run on a GPU: leave it out.")
        return ()
    most = len(usable_cores())
    if cores is None:
        all_of_them = config.threads or most
        return tuple(dict.fromkeys((all_of_them, max(all_of_them // 2, 1) if also_half else all_of_them)))
    for count in cores:
        if not 1 <= count <= most:
            raise ConfigError(f"--cores has {count}, and there are {most} to be used: give 1 to {most}.")
    return cores


# ---------------------------------------------------------------- one number of cores


def _part(config: Config, plan: Plan, names: Sequence[str], progress: Progress) -> _Part:
    progress(0.0, "loading")
    built, plan, tokens = _built(config, plan)
    try:
        measured = Measurement(built.engine, plan, tokens, progress).run()
    finally:
        built.engine.close()
    step, request = _steps(measured)
    streams = _streaming(config, plan, tokens, progress)
    form, error = _target(measured)
    target = scaled(form, measured.uneven["target"])
    drafts, errors = {}, {"target": error}
    for name, (own, samples) in zip(names, measured.drafts.items(), strict=True):
        draft, errors[name] = _draft(samples)
        drafts[name] = scaled(draft, measured.uneven[own])
    about: dict[str, object] = {
        "target": built.model.name,
        "dtype": built.precision,
        "device": built.device,
        "batches": list(plan.batches),
        "contexts": list(plan.contexts),
        "rounds": measured.rounds,
        "mean_over_median": measured.uneven,
        "streaming_s": list(streams),
    }
    return _Part(target, drafts, errors, (step + streams[0], request + streams[1]), about)


def _streaming(config: Config, plan: Plan, tokens: Sequence[int], progress: Progress) -> tuple[float, float]:
    """See `streams.streaming_s`: of an engine without a drafter, in which only that differs."""
    alone = replace(_roomy(config, plan), speculation=SpeculationConfig(draft="none"))
    return streaming_s(alone, tokens, plan.some_batches, plan.run_tokens, lambda: progress(0.99, "streams"))


def _built(config: Config, plan: Plan) -> tuple[Built, Plan, list[int]]:
    """An engine with room for the plan, which shrinks to what the model reads in the time."""
    built = build(_roomy(config, plan))
    try:
        tokens = built.model.tokenizer.encode(TEXT)
        rate = _reading_rate(built, tokens)
        fitting = plan.within(rate, built.model.context_length)
    except BaseException:
        built.engine.close()
        raise
    if fitting != plan:
        built.engine.close()
        built = build(_roomy(config, fitting))
    return built, fitting, tokens


def _roomy(config: Config, plan: Plan) -> Config:
    spare = plan.most_requests * max(plan.guesses + plan.sizes)
    scheduler = replace(
        config.scheduler,
        max_num_seqs=plan.most_requests,
        max_batch_tokens=CHUNK,
        kv_tokens=plan.most_requests * plan.context_length + spare,
        prefix_cache=False,
    )
    return replace(config, scheduler=scheduler)


def _reading_rate(built: Built, tokens: Sequence[int]) -> float:
    """Tokens of a prompt per second: the better of two."""
    limits: Limits = built.engine.core.config.limits
    rig = Rig(built.engine, limits.num_slots // limits.max_num_seqs)
    count = min(128, len(tokens))
    text = rig.text("rate", 0, list(tokens))
    seconds = min(rig.read([text], 0, count) for _ in range(2))
    rig.release()
    return count / seconds


# ---------------------------------------------------------------- fits


def _target(measured: Measured) -> tuple[TablePass, FitError]:
    cells, samples = list(measured.passes), list(measured.passes.values())
    sizes = sorted({sample.new_tokens for sample in samples})
    ends = {sizes[0], sizes[-1]}

    def kept(at: int) -> bool:
        cell: PassCell = cells[at]
        return cell.new_tokens in ends

    used, held = split(len(samples), kept)
    form = fitted_pass([samples[at] for at in used])
    return form, pass_error(form, [samples[at] for at in held])


def _draft(samples: Sequence[DraftSample]) -> tuple[TableDraft, FitError]:
    used, held = split(len(samples), lambda at: samples[at].levels == 0)
    form = fitted_draft([samples[at] for at in used])
    return form, draft_error(form, [samples[at] for at in held])


def _steps(measured: Measured) -> tuple[float, float]:
    """Seconds per step, and per request that takes part in it."""
    rows = np.array([[1.0, sample.requests] for sample in measured.steps])
    seen = np.array([max(sample.seconds, 1e-9) for sample in measured.steps])
    step, request = nonnegative(rows / seen[:, None], np.ones(len(seen))).tolist()
    return step, request
