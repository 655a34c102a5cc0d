"""The composition root: from a configuration to an engine, every choice that cannot be honoured refused."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from paceline.config import Config, GroupsConfig, SpeculationConfig
from paceline.core.drafting import DrafterNeeds
from paceline.core.scheduler import Limits
from paceline.drafters.base import Drafter
from paceline.drafters.features import ReceivedFeatures
from paceline.drafters.registry import drafters_of
from paceline.engine.assembly import Draft, Parts, assembled, runs_apart
from paceline.engine.attachment import Patience
from paceline.engine.auto_placement import settled
from paceline.engine.device_groups import DeviceGroup, drafter_group, groups_of
from paceline.engine.draft_group import DraftGroup
from paceline.engine.draft_host import DraftHost, LocalHost, RemoteHost
from paceline.engine.draft_messages import DraftGroupSpec, fingerprint
from paceline.engine.drafting import TargetTerms, all_captured, check_place, chosen_drafters, resolved
from paceline.engine.engine import Engine
from paceline.engine.feature_feed import FeatureFeed
from paceline.engine.machine import Precision, resolve_device, resolve_precision
from paceline.engine.model_setup import ModelSetup, limits_of
from paceline.engine.outputs import ModelMemory
from paceline.engine.replay import EventLog
from paceline.errors import ConfigError, shown
from paceline.execution.target import TargetExecutor
from paceline.execution.target_view import TargetView
from paceline.loading import LoadedModel, load
from paceline.modes import Mode, ahead_passes, mode_of


@dataclass(frozen=True, slots=True)
class Built:
    engine: Engine
    model: LoadedModel
    precision: Precision
    device: str


def build(config: Config, *, drafter: Drafter | None = None, record: Path | None = None) -> Built:
    """Loads the models and wires everything. drafter: one of the caller's own, instead of the configured.
    Raises ConfigError, ModelError, KernelError or EngineError, and leaves nothing running then."""
    started = time.perf_counter()
    config = settled(config, own_drafter=drafter is not None)
    mode = mode_of(config, own_drafter=drafter is not None)
    separate = runs_apart(config, mode)
    _check_draft(config, mode, drafter, separate=separate)
    names = drafters_of(config, own_drafter=drafter is not None) if mode.name != "autoregressive" else ()
    check_place(names, separate=separate)
    device = resolve_device(config)
    precision = resolve_precision(config.dtype, device)
    with ExitStack() as on_failure:
        log = EventLog(record) if record is not None else None
        if log is not None:
            on_failure.callback(log.close)
        names = resolved(config, names)
        model = load(config.model)
        target_group, draft_group = groups_of(config, device, separate=separate)
        target = ModelSetup(model, precision, device, target_group, config.exact)
        check_place(names, separate=separate, ranks=len(target_group.places))
        chosen = chosen_drafters(config, names, device, draft_group, model)
        capture = all_captured(chosen)
        per_token = target.slot_bytes(capture) + sum(each.kv_bytes_per_token for each in chosen)
        limits = limits_of(config, model, per_token, target.free_bytes)
        memory = tuple(each.memory(target) for each in chosen)
        spare = sum(each.target_slots(limits) for each in chosen)
        runner = target.runner(limits, limits.context_length, capture, spare_slots=spare)
        on_failure.callback(runner.close)
        executor = TargetExecutor(runner, model.eos_token_ids)
        events: SimpleQueue[Any] = SimpleQueue()
        draft = Draft()
        if names and separate:
            group = _draft_group(config, mode, model, limits, draft_group, events)
            on_failure.callback(group.close)
            feed = FeatureFeed(executor.view) if capture else None
            draft = Draft(group=group, group_needs=group.start(), feed=feed, memory=memory)
        elif names:
            terms = _terms(model, executor.view)
            made = [drafter] if drafter else [each.make(config, mode, limits, terms) for each in chosen]
            draft = Draft(tuple(made), memory=memory)
        parts = Parts(
            config=config,
            mode=mode,
            separate=separate,
            limits=limits,
            vocab_size=model.vocab_size,
            eos_token_ids=tuple(model.eos_token_ids),
            target=executor,
            draft=draft,
            events=events,
            tokenizer=model.tokenizer,
            model_name=model.name,
            started=started,
            log=log,
            target_memory=ModelMemory(target.weight_bytes, target.kv_bytes_per_token),
        )
        built = Built(assembled(parts), model, precision, device)
        on_failure.pop_all()
    return built


def _terms(model: LoadedModel, view: TargetView) -> TargetTerms:
    tokenizer = model.tokenizer
    return TargetTerms(
        model.vocab_size,
        tuple(model.eos_token_ids),
        view,
        vocabulary=lambda: fingerprint(tokenizer.vocabulary()),
    )


def build_drafter(spec: DraftGroupSpec) -> Drafter:
    """The drafter of a draft group, in the group's own process. Raises as `build` does."""
    config = spec.config
    device = resolve_device(config)
    group = drafter_group(config, device, spec.cores)
    names = resolved(config, drafters_of(config))
    check_place(names, separate=True)
    (chosen,) = chosen_drafters(config, names, device, group)
    received = ReceivedFeatures() if chosen.capture else None
    terms = TargetTerms(spec.target_vocab_size, spec.eos_token_ids, received=received)
    return chosen.make(config, mode_of(config), chosen.affordable(spec.limits), terms)


# ---------------------------------------------------------------- checks


def _check_draft(config: Config, mode: Mode, drafter: object | None, *, separate: bool) -> None:
    groups = config.groups
    if drafter is not None:
        _check_own_drafter(drafter)
        if separate:
            raise ConfigError(
                "draft is an object of this process, and groups.placement wants the drafter in another: give "
                "a name, or choose placement = serial."
            )
    if groups.draft_timeout != GroupsConfig().draft_timeout and not separate:
        raise ConfigError(
            f"groups.draft_timeout is {groups.draft_timeout:g} but the drafter runs in the target's process, "
            "where nobody waits for it in vain: choose placement = disaggregated, or leave it out."
        )
    if groups.draft_address:
        _check_address(config, mode, separate=separate)
    if bool(groups.draft_address) != bool(groups.draft_key_file):
        raise ConfigError(
            "groups.draft_address and groups.draft_key_file belong together: give both, or neither."
        )


def _check_address(config: Config, mode: Mode, *, separate: bool) -> None:
    """What would be ignored is refused: another host's drafter is that host's to choose."""
    speculation, default = config.speculation, SpeculationConfig()
    nothing = not drafters_of(config)
    if mode.name == "autoregressive" or nothing:
        cause = "speculation.draft is none" if nothing else f"groups.mode is {mode.name}"
        raise ConfigError(f"groups.draft_address is set but {cause}: leave out one of them.")
    if not separate:
        raise ConfigError(
            "groups.draft_address is set but the drafter runs in the target's process: choose placement = "
            "disaggregated, or leave it out."
        )
    for name in ("draft", "draft_dtype"):
        value = getattr(speculation, name)
        if value != getattr(default, name):
            raise ConfigError(
                f"speculation.{name} is {value} but groups.draft_address is set, where `paceline draft` has "
                "its own: leave it out, or give it there."
            )
    if config.groups.draft_devices:
        raise ConfigError(
            "groups.draft_devices is set but groups.draft_address too: give the cores to `paceline draft` "
            "there, with --cores, and leave it out here."
        )


def _check_own_drafter(drafter: object) -> None:
    needs = getattr(drafter, "needs", None)
    length = getattr(needs, "context_length", None)
    if isinstance(drafter, type) or not isinstance(drafter, Drafter) or not isinstance(needs, DrafterNeeds):
        raise ConfigError(
            f"draft is {shown(drafter)}: give a name, or an object with needs (DrafterNeeds), grow, advance "
            "and release."
        )
    if length is not None and type(length) is not int:
        raise ConfigError(
            f"the drafter's needs.context_length is {shown(length)}: give a whole number or None."
        )


# ---------------------------------------------------------------- a drafter elsewhere


def _draft_group(
    config: Config,
    mode: Mode,
    model: LoadedModel,
    limits: Limits,
    group: DeviceGroup,
    events: SimpleQueue[Any],
) -> DraftGroup:
    """Not started yet."""
    settings = config.groups
    spec = DraftGroupSpec(
        config=config,
        limits=limits,
        target_vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
        vocabulary=fingerprint(model.tokenizer.vocabulary()) if settings.draft_address else "",
        ahead=mode.ahead,
        ahead_passes=ahead_passes(config),
        cores=group.cores,
        threads=group.threads,
    )
    host: DraftHost
    if settings.draft_address:
        host = RemoteHost(settings.draft_address, Path(settings.draft_key_file))
    else:
        host = LocalHost("paceline.engine.build:build_drafter", group.cores)
    return DraftGroup(spec, host, events, Patience(silence_s=settings.draft_timeout))
