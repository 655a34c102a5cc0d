"""A target that writes texts, and drafters beside it that are asked along them: composed here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import msgspec

from paceline.config import Config, SpeculationConfig
from paceline.core.params import SamplingParams
from paceline.core.scheduler import Limits
from paceline.drafters.registry import NamedDrafter, drafters_of
from paceline.engine.assembly import Draft, Parts, assembled
from paceline.engine.device_groups import DeviceGroup, groups_of
from paceline.engine.draft_messages import fingerprint
from paceline.engine.drafting import (
    ChosenDrafter,
    TargetTerms,
    all_captured,
    check_place,
    chosen_drafters,
    resolved,
)
from paceline.engine.engine import Engine
from paceline.engine.machine import Precision, resolve_device, resolve_precision
from paceline.engine.model_setup import ModelSetup, limits_of
from paceline.engine.outputs import RequestOutput
from paceline.errors import ConfigError, EngineError
from paceline.execution.model_runner import ModelRunner
from paceline.execution.target import TargetExecutor
from paceline.loading import LoadedModel
from paceline.modes import mode_of
from paceline.sim.acceptance import DrafterTrace, RequestTrace
from paceline.tracing.ask import KnownText, Recorder
from paceline.tracing.dense_chain import DenseChain
from paceline.tracing.text_view import TextView

_AT_ONCE = 64
"""Places of a text that a drafter with a model is asked for in one question."""


@dataclass(frozen=True, slots=True)
class Depth:
    """guesses: of each question.  top: candidates recorded for the first of them."""

    guesses: int = 20
    top: int = 8

    def __post_init__(self) -> None:
        if not 1 <= self.guesses <= 256:
            raise ConfigError(f"depth is {self.guesses}: give a whole number from 1 to 256.")
        if not 1 <= self.top <= 64:
            raise ConfigError(f"top is {self.top}: give a whole number from 1 to 64.")


@dataclass(frozen=True, slots=True)
class TracedDrafter:
    """name: in the traces.  named: as the configuration has it."""

    name: str
    named: NamedDrafter
    chosen: ChosenDrafter


class Tracer:
    """Either writes texts or asks along one: both use the target's slots, of which neither keeps any."""

    def __init__(self, config: Config, model: LoadedModel, depth: Depth, longest: int) -> None:
        """longest: tokens of the longest text, prompt and output.

        Raises ConfigError, ModelError, KernelError or EngineError, and leaves nothing running then.
        """
        config = traced_config(config, model, longest)
        self.precision: Precision = resolve_precision(config.dtype, device := resolve_device(config))
        self._model = model
        group, draft_group = groups_of(config, device, separate=False)
        target = ModelSetup(model, self.precision, device, group, config.exact)
        self.drafters = _drafters(config, model, device, group, draft_group)
        limits, self._at_once = _limits(config, target, self.drafters, depth, longest)
        with ExitStack() as on_failure:
            runner = _runner(target, limits, self.drafters, self._at_once * depth.guesses)
            on_failure.callback(runner.close)
            self._view = TextView(runner, limits.max_batch_tokens)
            self._recorders = _recorders(config, limits, self._view, model, self.drafters, depth)
            self._reads = any(_reads_target(each.chosen) for each in self.drafters)
            self._engine = _writer(config, limits, runner, model)
            on_failure.pop_all()

    def write(self, texts: Sequence[tuple[str, Sequence[int], SamplingParams]]) -> list[RequestOutput]:
        """What the target makes of the prompts, by ids and parameters that are checked and resolved.

        Raises EngineError where a step fails.
        """
        for request_id, ids, params in texts:
            self._engine.add(request_id, 0, ids, params)
        outputs: dict[str, RequestOutput] = {}
        while len(outputs) < len(texts):
            if self._engine.idle:
                raise EngineError("the engine stalled with requests open; this is a bug, please report it.")
            for request_id, chunk in self._engine.step():
                if chunk.output is not None:
                    outputs[request_id] = chunk.output
        for output in outputs.values():
            if output.finish_reason == "error":
                raise EngineError(f"the target failed on {output.request_id}: {output.error}")
        return [outputs[request_id] for request_id, _, _ in texts]

    def trace(self, request_id: str, text: KnownText) -> RequestTrace:
        """What each drafter is worth along the text; those that learn from outputs have learnt it then."""
        if self._reads:
            self._view.compute(text.tokens[:-1])
        found = {each.name: self._record(each, text) for each in self._recorders}
        return RequestTrace(request_id, text.prompt, text.output, found)

    def recall(self, text: KnownText) -> None:
        """Brings drafters that learn where they were after `trace` of this text."""
        for each in self._recorders:
            if not each.grows_trees:
                self._record(each, text)

    def _record(self, recorder: Recorder, text: KnownText) -> DrafterTrace:
        found = recorder.record(text, self._view, self._at_once)
        recorder.learn(text.output)
        return found

    @property
    def problems(self) -> dict[str, dict[str, int]]:
        """By drafter: why it drafted nothing, where it said so, and at how many places."""
        return {each.name: each.problems for each in self._recorders if each.problems}

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# ---------------------------------------------------------------- configuration


def traced_config(config: Config, model: LoadedModel, longest: int) -> Config:
    """What the tracer runs: drafters of chains, in turn with the target, within `longest` tokens.

    Raises ConfigError for what a trace of chains does not depend on, or cannot hold.
    """
    _check(config)
    speculation = config.speculation
    if any(each.kind.looks_back for each in drafters_of(config)):
        speculation = msgspec.structs.replace(speculation, suffix_tree=False)
    scheduler = msgspec.structs.replace(
        config.scheduler, prefix_cache=False, context_length=min(longest, model.context_length)
    )
    return msgspec.structs.replace(config, speculation=speculation, scheduler=scheduler)


def _check(config: Config) -> None:
    speculation, default = config.speculation, SpeculationConfig()
    if config.groups.mode not in (None, "serial-chain") or config.groups.placement not in (None, "serial"):
        raise ConfigError(
            "traces are of chains, drafted in turn with the target: leave groups.mode and groups.placement "
            "out."
        )
    if config.tree.growth not in ("auto", "chain"):
        raise ConfigError(f"tree.growth is {config.tree.growth} but traces are of chains: leave it out.")
    for name in ("num_speculative_tokens", "length_by_batch_size", "selector"):
        if getattr(speculation, name) != getattr(default, name):
            raise ConfigError(
                f"speculation.{name} is set but every drafter is asked at every place, for as many guesses "
                "as --depth says: leave it out."
            )
    if speculation.prompt_lookup_branches != 1:
        raise ConfigError(
            f"speculation.prompt_lookup_branches is {speculation.prompt_lookup_branches} but traces are of "
            "chains: leave it out."
        )
    if not drafters_of(config):
        raise ConfigError("speculation.draft is none: name the drafters to be traced, joined by +.")
    mode_of(config)


def _drafters(
    config: Config, model: LoadedModel, device: str, group: DeviceGroup, draft_group: DeviceGroup
) -> tuple[TracedDrafter, ...]:
    named = resolved(config, drafters_of(config))
    check_place(named, separate=False, ranks=len(group.places))
    chosen = chosen_drafters(config, named, device, draft_group, model)
    names = [each.name.rstrip("/").rpartition("/")[2] for each in named]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two drafters would be called {twice} in the traces: trace them one by one.")
    return tuple(
        TracedDrafter(name, each, made) for name, each, made in zip(names, named, chosen, strict=True)
    )


def _limits(
    config: Config, target: ModelSetup, drafters: Sequence[TracedDrafter], depth: Depth, longest: int
) -> tuple[Limits, int]:
    """And how many places can be asked for at once: each needs slots for its guesses beside the text."""
    per_token = target.slot_bytes(all_captured([each.chosen for each in drafters]))
    per_token += sum(each.chosen.kv_bytes_per_token for each in drafters)
    limits = limits_of(config, target.model, per_token, target.free_bytes)
    per_place, wanted = depth.guesses + 2, longest + _AT_ONCE * (depth.guesses + 2)
    if not config.scheduler.kv_tokens:
        limits = replace(limits, num_slots=max(limits.num_slots, wanted))
    at_once = min(_AT_ONCE, (limits.num_slots - longest) // per_place)
    if at_once < 1:
        raise ConfigError(
            f"scheduler.kv_tokens is {config.scheduler.kv_tokens} but a text of {longest} tokens and "
            f"{depth.guesses} guesses need {longest + per_place}: raise it."
        )
    return limits, at_once


# ---------------------------------------------------------------- parts


def _reads_target(chosen: ChosenDrafter) -> bool:
    return bool(chosen.kind.features or chosen.kind.target_slots)


def _runner(
    target: ModelSetup, limits: Limits, drafters: Sequence[TracedDrafter], spare_slots: int
) -> ModelRunner:
    """spare_slots: for a drafter that computes in the target's cache."""
    chosen = [each.chosen for each in drafters]
    spare = spare_slots if any(each.kind.target_slots for each in chosen) else 0
    return target.runner(limits, limits.context_length, all_captured(chosen), spare_slots=spare)


def _recorders(
    config: Config,
    limits: Limits,
    view: TextView,
    model: LoadedModel,
    drafters: Sequence[TracedDrafter],
    depth: Depth,
) -> list[Recorder]:
    """A drafter's context ends where the model's does, not where the texts do: no draft is cut short."""
    room = replace(
        limits,
        max_num_seqs=_AT_ONCE,
        context_length=min(limits.context_length + depth.guesses, model.context_length),
    )
    vocabulary = model.tokenizer.vocabulary()
    terms = TargetTerms(
        model.vocab_size, tuple(model.eos_token_ids), view, vocabulary=lambda: fingerprint(vocabulary)
    )
    rule, mode = DenseChain(depth.top), mode_of(config)
    return [
        Recorder(
            each.name,
            each.chosen.make(config, mode, room, terms, rule=rule),
            each.chosen.kind.grows_trees,
            depth.guesses,
            depth.top,
        )
        for each in drafters
    ]


def _writer(config: Config, limits: Limits, runner: ModelRunner, model: LoadedModel) -> Engine:
    """Plain decoding."""
    alone = msgspec.structs.replace(config, speculation=SpeculationConfig(draft="none"))
    parts = Parts(
        config=alone,
        mode=mode_of(alone),
        separate=False,
        limits=limits,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
        target=TargetExecutor(runner, model.eos_token_ids),
        draft=Draft(),
        events=SimpleQueue(),
        tokenizer=model.tokenizer,
        model_name=model.name,
        started=time.perf_counter(),
    )
    return assembled(parts)
