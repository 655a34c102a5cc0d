"""An engine over paced groups, composed as the real one is."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from paceline.config import Config
from paceline.core.drafting import DrafterNeeds
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.placement import OverlappedPlacement, SerialPlacement
from paceline.core.scheduler import Limits
from paceline.drafters.base import Drafter
from paceline.drafters.tree_drafter import TreeDrafter
from paceline.engine.disaggregated import DisaggregatedExecutor
from paceline.engine.draft_group import DraftGroup
from paceline.engine.draft_host import DraftHost, LocalHost
from paceline.engine.draft_messages import DraftGroupSpec
from paceline.engine.engine import About, Engine
from paceline.engine.executor import Executor, LocalExecutor
from paceline.engine.modes import draft_policy, growth_rule, mode_of, most_guesses
from paceline.errors import ConfigError
from paceline.loading.tokenizer import Tokenizer
from paceline.paced.groups import PacedCandidates, PacedTarget, PassTimes, TraceCandidates, TraceTarget
from paceline.paced.world import World, read_recordings

FACTORY = "paceline.paced.build:build_paced_drafter"


class PacedPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two groups. target_s, draft_s: (tokens in a pass, seconds).  trace: file of `Recording`s."""

    target_s: tuple[tuple[int, float], ...]
    draft_s: tuple[tuple[int, float], ...]
    trace: str
    vocab_size: int = 151936
    context_length: int = 4096


def read_pair(path: Path) -> PacedPair:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=PacedPair)
    except OSError as error:
        raise ConfigError(f"cannot read the paced pair {path}: {error.strerror}.") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is not a paced pair: {error}.") from None


def build_paced(path: Path, config: Config, tokenizer: Tokenizer, *, host: DraftHost | None = None) -> Engine:
    """config: mode, tree and speculation settings count; its models do not.  host: where the drafter's
    process is, by default a child of this one.

    Raises ConfigError or EngineError.
    """
    pair, mode = read_pair(path), mode_of(config)
    world = World(read_recordings(Path(pair.trace)), pair.vocab_size)
    target = PacedTarget(TraceTarget(world), PassTimes(pair.target_s))
    limits = Limits(context_length=pair.context_length, num_slots=64 * pair.context_length)
    events: SimpleQueue[Any] = SimpleQueue()
    needs: DrafterNeeds | None = None
    executor: Executor
    spec = DraftGroupSpec(
        config=msgspec.structs.replace(
            config, speculation=msgspec.structs.replace(config.speculation, draft=str(path))
        ),
        limits=limits,
        target_vocab_size=pair.vocab_size,
        ahead=mode.ahead,
        ahead_passes=config.tree.tree_passes,
    )
    if mode.separate:
        group = DraftGroup(spec, host or LocalHost(FACTORY), events)
        needs = group.start()
        executor = DisaggregatedExecutor(target, group, events)
    else:
        drafter = build_paced_drafter(spec) if mode.name != "autoregressive" else None
        needs = drafter.needs if drafter is not None else None
        executor = LocalExecutor(target, drafter)
    core_config = CoreConfig(
        limits=limits,
        vocab_size=pair.vocab_size,
        drafting=draft_policy(config, mode, needs),
        placement=OverlappedPlacement() if mode.overlapped else SerialPlacement(),
    )
    return Engine(EngineCore(core_config), executor, tokenizer, About(path.stem, mode.name, 0.0))


def build_paced_drafter(spec: DraftGroupSpec) -> Drafter:
    """The drafter that `spec.config.speculation.draft`, the file of a pair, describes."""
    pair, mode = read_pair(Path(spec.config.speculation.draft)), mode_of(spec.config)
    world = World(read_recordings(Path(pair.trace)), pair.vocab_size)
    model = PacedCandidates(TraceCandidates(world, pair.context_length), PassTimes(pair.draft_s))
    rule = growth_rule(mode, spec.config.tree, most_guesses(spec.config, mode))
    return TreeDrafter(model, rule, keep_tree=mode.keep_tree, top_up=mode.top_up, thrifty=mode.overlapped)
