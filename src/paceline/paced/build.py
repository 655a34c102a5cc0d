"""An engine over paced groups, composed as the real one is."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from paceline.config import Config
from paceline.core.scheduler import Limits
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.tree_drafter import CandidateModel, TreeDrafter
from paceline.engine.assembly import Draft, Parts, assembled, runs_apart
from paceline.engine.device_groups import DeviceGroup
from paceline.engine.draft_group import DraftGroup
from paceline.engine.draft_host import DraftHost, LocalHost
from paceline.engine.draft_messages import DraftGroupSpec
from paceline.engine.engine import Engine
from paceline.engine.executor import Target
from paceline.engine.model_setup import ModelSetup
from paceline.errors import ConfigError
from paceline.execution.model_runner import ModelRunner
from paceline.execution.target import TargetExecutor
from paceline.loading import LoadedModel, load
from paceline.loading.tokenizer import Tokenizer
from paceline.modes import ahead_passes, growth_rule, mode_of, most_guesses
from paceline.paced.groups import PacedCandidates, PacedTarget, PassTimes, TraceCandidates, TraceTarget
from paceline.paced.world import World, read_recordings

FACTORY = "paceline.paced.build:build_paced_drafter"


class PacedPair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two groups. target_s, draft_s: (tokens in a pass, seconds).  trace: file of `Recording`s, by which both
    answer; or target_model, draft_model: small real models (as `Config.model`) that do, of `vocab_size`."""

    target_s: tuple[tuple[int, float], ...]
    draft_s: tuple[tuple[int, float], ...]
    trace: str = ""
    vocab_size: int = 151936
    context_length: int = 4096
    target_model: str = ""
    draft_model: str = ""


def read_pair(path: Path) -> PacedPair:
    """Raises ConfigError."""
    try:
        pair = msgspec.json.decode(path.read_bytes(), type=PacedPair)
    except OSError as error:
        raise ConfigError(f"cannot read the paced pair {path}: {error.strerror}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a paced pair: {error}.") from None
    if [bool(pair.target_model), bool(pair.draft_model)] != [not pair.trace] * 2:
        raise ConfigError(f"{path}: a paced pair has either a trace, or a target_model and a draft_model.")
    return pair


def build_paced(path: Path, config: Config, tokenizer: Tokenizer, *, host: DraftHost | None = None) -> Engine:
    """config: mode, tree and speculation settings count; its models do not.  host: where the drafter's
    process is, by default a child of this one.

    Raises ConfigError, ModelError, KernelError or EngineError, and leaves nothing running then.
    """
    started = time.perf_counter()
    speculation = msgspec.structs.replace(config.speculation, draft=str(path))
    config = msgspec.structs.replace(config, speculation=speculation)
    pair, mode = read_pair(path), mode_of(config)
    separate = runs_apart(config, mode)
    # Slots of a trace hold nothing; those of a model are memory.
    num_slots = (8 if pair.target_model else 64) * pair.context_length
    limits = Limits(context_length=pair.context_length, num_slots=num_slots)
    events: SimpleQueue[Any] = SimpleQueue()
    spec = DraftGroupSpec(
        config=config,
        limits=limits,
        target_vocab_size=pair.vocab_size,
        ahead=mode.ahead,
        ahead_passes=ahead_passes(config),
    )
    with ExitStack() as on_failure:
        inner, eos_token_ids = _target(pair, limits)
        target = PacedTarget(inner, PassTimes(pair.target_s))
        on_failure.callback(target.close)
        draft = Draft()
        if separate and mode.name != "autoregressive":
            group = DraftGroup(spec, host or LocalHost(FACTORY), events)
            on_failure.callback(group.close)
            draft = Draft(group=group, group_needs=group.start())
        elif mode.name != "autoregressive":
            drafter = build_paced_drafter(spec)
            draft = Draft((drafter,))
        parts = Parts(
            config=config,
            mode=mode,
            separate=separate,
            limits=limits,
            vocab_size=pair.vocab_size,
            eos_token_ids=eos_token_ids,
            target=target,
            draft=draft,
            events=events,
            tokenizer=tokenizer,
            model_name=path.stem,
            started=started,
        )
        engine = assembled(parts)
        on_failure.pop_all()
    return engine


def build_paced_drafter(spec: DraftGroupSpec) -> Drafter:
    """The drafter that `spec.config.speculation.draft`, the file of a pair, describes."""
    pair, mode = read_pair(Path(spec.config.speculation.draft)), mode_of(spec.config)
    model = PacedCandidates(_candidates(pair, spec.limits), PassTimes(pair.draft_s))
    rule = growth_rule(mode, spec.config.tree, most_guesses(spec.config, mode))
    return TreeDrafter(model, rule, keep_tree=mode.keep_tree, top_up=mode.top_up, thrifty=mode.overlapped)


def _world(pair: PacedPair) -> World:
    return World(read_recordings(Path(pair.trace)), pair.vocab_size)


def _target(pair: PacedPair, limits: Limits) -> tuple[Target, tuple[int, ...]]:
    """And the tokens that end a generation."""
    if not pair.target_model:
        return TraceTarget(_world(pair)), ()
    runner, model = _runner(pair.target_model, limits)
    if runner.vocab_size != pair.vocab_size:
        raise ConfigError(
            f"the pair's vocab_size is {pair.vocab_size} but {model.name} has {runner.vocab_size} tokens: "
            "correct it."
        )
    return TargetExecutor(runner, model.eos_token_ids), model.eos_token_ids


def _candidates(pair: PacedPair, limits: Limits) -> CandidateModel:
    if not pair.draft_model:
        return TraceCandidates(_world(pair), pair.context_length)
    runner, model = _runner(pair.draft_model, limits)
    return DraftModel(
        runner,
        target_vocab_size=pair.vocab_size,
        eos_token_ids=model.eos_token_ids,
        num_slots=limits.num_slots,
        chunk_tokens=limits.max_batch_tokens,
    )


def _runner(name: str, limits: Limits) -> tuple[ModelRunner, LoadedModel]:
    """On one core: it shares the machine with the other group, and has to be done within the pass's time."""
    model = load(name)
    context = min(limits.context_length, model.context_length)
    group = DeviceGroup((), threads=1)
    return ModelSetup(model, "float32", "cpu", group).runner(limits, context), model
