"""The composition root: from a configuration to an engine, every choice that cannot be honoured refused."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from paceline.config import Config
from paceline.core.drafting import DrafterNeeds
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.placement import OverlappedPlacement, SerialPlacement
from paceline.core.scheduler import Limits
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.tree_drafter import TreeDrafter
from paceline.engine.auto_placement import settled
from paceline.engine.device_groups import DeviceGroup, drafter_group, groups_of
from paceline.engine.disaggregated import DisaggregatedExecutor
from paceline.engine.draft_group import DraftGroup, Patience
from paceline.engine.draft_host import DraftHost, LocalHost, RemoteHost
from paceline.engine.draft_messages import DraftGroupSpec, fingerprint
from paceline.engine.engine import About, Engine
from paceline.engine.executor import Executor, LocalExecutor
from paceline.engine.machine import Precision, resolve_device, resolve_precision
from paceline.engine.model_setup import ModelSetup, limits_of
from paceline.engine.modes import Mode, draft_policy, growth_rule, mode_of, most_guesses
from paceline.engine.replay import EventLog
from paceline.errors import ConfigError, shown
from paceline.execution.target import TargetExecutor
from paceline.loading import LoadedModel, check_same_vocabulary, load

_PASS_LEAVES = 64


@dataclass(frozen=True, slots=True)
class Built:
    engine: Engine
    model: LoadedModel
    precision: Precision
    device: str


@dataclass(frozen=True, slots=True)
class _Draft:
    """The drafter, here or in a process of its own; neither = there is none."""

    needs: DrafterNeeds | None = None
    drafter: Drafter | None = None
    group: DraftGroup | None = None


def build(config: Config, *, drafter: Drafter | None = None, record: Path | None = None) -> Built:
    """Loads the models and wires everything. drafter: one of the caller's own, instead of the configured.

    Raises ConfigError, ModelError, KernelError or EngineError.
    """
    started = time.perf_counter()
    config = settled(config)
    mode = mode_of(config)
    separate = mode.separate or config.groups.placement == "disaggregated"
    _check_draft(config, drafter, separate=separate)
    device = resolve_device(config)
    precision = resolve_precision(config.dtype, device)
    model = load(config.model)
    target_group, draft_group = groups_of(config, device, separate=separate)
    target = ModelSetup(model, precision, device, target_group, config.exact)
    drafts = mode.name != "autoregressive" and (drafter is not None or config.speculation.draft != "none")
    draft_model = None
    if drafts and drafter is None and not config.groups.draft_address:
        draft_model = _draft_setup(config, model, device, draft_group)
    per_token = target.kv_bytes_per_token + (draft_model.kv_bytes_per_token if draft_model else 0)
    limits = limits_of(config, model, per_token, device)
    runner = target.runner(limits, limits.context_length)
    events: SimpleQueue[Any] = SimpleQueue()
    draft = _Draft()
    if drafts and separate:
        draft = _separate_draft(config, mode, model, limits, draft_group, events)
    elif drafts:
        own = drafter or _drafter(config, mode, draft_model, limits, model.vocab_size, model.eos_token_ids)
        draft = _Draft(own.needs, own)
    core_config = CoreConfig(
        limits=limits,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        prefix_cache=config.scheduler.prefix_cache,
        drafting=draft_policy(config, mode, draft.needs),
        placement=OverlappedPlacement() if mode.overlapped else SerialPlacement(),
    )
    target_executor = TargetExecutor(runner, model.eos_token_ids)
    executor: Executor
    if separate:
        executor = DisaggregatedExecutor(target_executor, draft.group, events)
    else:
        executor = LocalExecutor(target_executor, draft.drafter)
    log = EventLog(record, core_config) if record is not None else None
    about = About(
        model.name,
        draft.needs.name if draft.needs is not None else "none",
        time.perf_counter() - started,
        mode.name,
        "disaggregated" if separate else "serial",
    )
    group = draft.group.stats if draft.group is not None else None
    engine = Engine(EngineCore(core_config), executor, model.tokenizer, about, log, group)
    return Built(engine, model, precision, device)


def build_drafter(spec: DraftGroupSpec) -> Drafter:
    """The drafter of a draft group, in the group's own process. Raises as `build` does."""
    config = spec.config
    device = resolve_device(config)
    draft = None
    if config.speculation.draft not in ("ngram", "none"):
        precision = resolve_precision(config.speculation.draft_dtype, device)
        group = drafter_group(config, device, spec.cores)
        draft = ModelSetup(load(config.speculation.draft), precision, device, group, config.exact)
    limits = draft.affordable(spec.limits) if draft is not None else spec.limits
    return _drafter(config, mode_of(config), draft, limits, spec.target_vocab_size, spec.eos_token_ids)


# ---------------------------------------------------------------- checks


def _check_draft(config: Config, drafter: object | None, *, separate: bool) -> None:
    if drafter is not None:
        _check_own_drafter(drafter)
        if separate:
            raise ConfigError(
                "draft is an object of this process, and groups.placement wants the drafter in another: give "
                "a name, or choose placement = serial."
            )
    if config.groups.draft_address and not separate:
        raise ConfigError(
            "groups.draft_address is set but the drafter runs in the target's process: choose placement = "
            "disaggregated, or leave it out."
        )
    if bool(config.groups.draft_address) != bool(config.groups.draft_key_file):
        raise ConfigError(
            "groups.draft_address and groups.draft_key_file belong together: give both, or neither."
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


# ---------------------------------------------------------------- drafters


def _draft_setup(config: Config, target: LoadedModel, device: str, group: DeviceGroup) -> ModelSetup | None:
    """The configured draft model, if the drafter is one."""
    if config.speculation.draft in ("none", "ngram"):
        return None
    draft = load(config.speculation.draft)
    check_same_vocabulary(target.tokenizer, draft.tokenizer)
    precision = resolve_precision(config.speculation.draft_dtype, device)
    return ModelSetup(draft, precision, device, group, config.exact)


def _drafter(
    config: Config,
    mode: Mode,
    draft: ModelSetup | None,
    limits: Limits,
    target_vocab_size: int,
    eos_token_ids: Sequence[int],
) -> Drafter:
    if draft is None:
        return NgramDrafter(config.speculation.prompt_lookup_min, config.speculation.prompt_lookup_max)
    context = min(limits.context_length, draft.model.context_length)
    candidates = DraftModel(
        draft.runner(limits, context),
        target_vocab_size=target_vocab_size,
        eos_token_ids=eos_token_ids,
        num_slots=limits.num_slots,
        chunk_tokens=limits.max_batch_tokens,
    )
    rule = growth_rule(mode, config.tree, most_guesses(config, mode))
    return TreeDrafter(
        candidates,
        rule,
        keep_tree=mode.keep_tree,
        top_up=mode.top_up,
        pass_leaves=min(_PASS_LEAVES, limits.max_batch_tokens),
        thrifty=mode.overlapped,
    )


def _separate_draft(
    config: Config,
    mode: Mode,
    model: LoadedModel,
    limits: Limits,
    group: DeviceGroup,
    events: SimpleQueue[Any],
) -> _Draft:
    settings = config.groups
    spec = DraftGroupSpec(
        config=config,
        limits=limits,
        target_vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
        vocabulary=fingerprint(model.tokenizer.vocabulary()) if settings.draft_address else "",
        ahead=mode.ahead,
        ahead_passes=config.tree.tree_passes or 4,
        cores=group.cores,
        threads=group.threads,
    )
    host: DraftHost
    if settings.draft_address:
        host = RemoteHost(settings.draft_address, Path(settings.draft_key_file))
    else:
        host = LocalHost("paceline.engine.build:build_drafter", group.cores)
    draft_group = DraftGroup(spec, host, events, Patience(silence_s=settings.draft_timeout))
    return _Draft(draft_group.start(), group=draft_group)
