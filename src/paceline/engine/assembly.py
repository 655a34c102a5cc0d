"""From parts to an engine: the last step of composing one, whatever target and drafter are."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from paceline.config import Config
from paceline.core.drafting import DrafterNeeds
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.placement import OverlappedPlacement, SerialPlacement
from paceline.core.scheduler import Limits
from paceline.drafters.base import Drafter
from paceline.engine.disaggregated import DisaggregatedExecutor
from paceline.engine.draft_group import DraftGroup
from paceline.engine.engine import About, Engine
from paceline.engine.executor import Executor, LocalExecutor, Target
from paceline.engine.feature_feed import FeatureFeed
from paceline.engine.outputs import ModelMemory
from paceline.engine.replay import EventLog
from paceline.loading.tokenizer import Tokenizer
from paceline.modes import Mode, draft_policy


@dataclass(frozen=True, slots=True)
class Draft:
    """The drafters, here, or one in a process of its own; neither = there is none. group_needs: of that.
    feed: the hidden states that it reads.  memory: of each drafter, where it is known."""

    drafters: tuple[Drafter, ...] = ()
    group: DraftGroup | None = None
    group_needs: DrafterNeeds | None = None
    feed: FeatureFeed | None = None
    memory: tuple[ModelMemory, ...] = ()

    @property
    def needs(self) -> tuple[DrafterNeeds, ...]:
        apart = (self.group_needs,) if self.group_needs is not None else ()
        return (*(drafter.needs for drafter in self.drafters), *apart)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """events: that the draft group was started with.  separate: target and drafter have a lane each.
    started: when loading began, by `time.perf_counter`."""

    config: Config
    mode: Mode
    separate: bool
    limits: Limits
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    target: Target
    draft: Draft
    events: SimpleQueue[Any]
    tokenizer: Tokenizer
    model_name: str
    started: float
    log: EventLog | None = None
    target_memory: ModelMemory = field(default_factory=ModelMemory)


def runs_apart(config: Config, mode: Mode) -> bool:
    return mode.separate or config.groups.placement == "disaggregated"


def assembled(parts: Parts) -> Engine:
    """Raises EngineError when what is composed cannot be recorded and is to be."""
    mode, draft = parts.mode, parts.draft
    core_config = CoreConfig(
        limits=parts.limits,
        vocab_size=parts.vocab_size,
        eos_token_ids=parts.eos_token_ids,
        prefix_cache=parts.config.scheduler.prefix_cache,
        drafting=draft_policy(parts.config, mode, draft.needs),
        placement=OverlappedPlacement() if mode.overlapped else SerialPlacement(),
    )
    core = EngineCore(core_config)
    if parts.log is not None:
        parts.log.begin(core_config)
    about = About(
        parts.model_name,
        "+".join(needs.name for needs in draft.needs) or "none",
        time.perf_counter() - parts.started,
        mode.name,
        "disaggregated" if parts.separate else "serial",
        draft.memory,
        parts.target_memory,
    )
    executor: Executor
    if parts.separate:
        executor = DisaggregatedExecutor(parts.target, draft.group, parts.events, draft.feed)
    else:
        executor = LocalExecutor(parts.target, draft.drafters)
    stats = draft.group.stats if draft.group is not None else None
    return Engine(core, executor, parts.tokenizer, about, parts.log, stats)
