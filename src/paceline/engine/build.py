"""The composition root: from a configuration to an engine, every choice that cannot be honoured refused."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.config import Config
from paceline.core.drafting import DrafterNeeds, DraftLength, FixedLength, LengthByBatchSize, LengthWithinPass
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.scheduler import Limits
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.engine.engine import About, Engine
from paceline.engine.executor import LocalExecutor
from paceline.engine.machine import Precision, free_memory, num_threads, resolve_device, resolve_precision
from paceline.engine.replay import EventLog
from paceline.errors import ConfigError, KernelError, shown
from paceline.execution.graphs import GraphedDecoder
from paceline.execution.model_runner import Decoder, ModelRunner
from paceline.execution.target import TargetExecutor
from paceline.kernels.kv_cache import KVCache
from paceline.loading import LoadedModel, check_same_vocabulary, load
from paceline.models.native_decoder import NativeDecoder
from paceline.models.torch_decoder import TorchDecoder

logger = logging.getLogger(__name__)

_KV_SHARE_OF_MEMORY = 0.25
_USUAL_DRAFT_LENGTH = 5
_CHEAP_PASS_TOKENS = {"cpu": 8, "cuda": 128}
"""Where a pass stops being bound by reading the weights. CPU: measured, see docs/benchmarks.md. CUDA: from
the ratio of arithmetic to bandwidth of current devices, not measured."""


@dataclass(frozen=True, slots=True)
class Built:
    engine: Engine
    model: LoadedModel
    precision: Precision
    device: str


@dataclass(frozen=True, slots=True)
class _Packed:
    """A model ready to run, but for its KV cache."""

    model: LoadedModel
    decoder: Decoder

    @property
    def kv_bytes_per_token(self) -> int:
        spec = self.model.spec
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * self.decoder.kv_dtype.itemsize


def build(config: Config, *, drafter: Drafter | None = None, record: Path | None = None) -> Built:
    """Loads the models and wires everything. drafter: one of the caller's own, instead of the configured.

    Raises ConfigError, ModelError or KernelError.
    """
    started = time.perf_counter()
    if drafter is not None:
        _check_own_drafter(drafter)
    device = resolve_device(config)
    precision = resolve_precision(config.dtype, device)
    model = load(config.model)
    target = _Packed(model, _decoder(model, precision, device, config))
    draft = _draft_model(config, model, device) if drafter is None else None
    limits = _limits(config, [target, draft] if draft else [target], device)
    if drafter is None:
        drafter = _drafter(config, model, draft, limits, device)
    core_config = CoreConfig(
        limits=limits,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        prefix_cache=config.scheduler.prefix_cache,
        drafter=drafter.needs if drafter is not None else None,
        draft_length=_draft_length(config, device),
    )
    runner = _runner(target.decoder, limits, limits.context_length, device)
    executor = LocalExecutor(TargetExecutor(runner, model.eos_token_ids), drafter)
    log = EventLog(record, core_config) if record is not None else None
    name = drafter.needs.name if drafter is not None else "none"
    about = About(model.name, name, time.perf_counter() - started)
    return Built(
        Engine(EngineCore(core_config), executor, model.tokenizer, about, log), model, precision, device
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


def _limits(config: Config, packed: list[_Packed], device: str) -> Limits:
    """packed: the target, and the draft model if there is one; each gets a slot per token of KV."""
    model = packed[0].model
    scheduler = config.scheduler
    context = _context_length(config, model)
    per_token = sum(each.kv_bytes_per_token for each in packed)
    affordable = int(free_memory(device) * _KV_SHARE_OF_MEMORY) // per_token
    wanted = min(scheduler.max_num_seqs * context, max(affordable, scheduler.max_batch_tokens))
    return Limits(
        context_length=context,
        num_slots=scheduler.kv_tokens or wanted,
        max_num_seqs=scheduler.max_num_seqs,
        max_batch_tokens=scheduler.max_batch_tokens,
        attention_window=_attention_window(model),
    )


def _context_length(config: Config, model: LoadedModel) -> int:
    asked = config.scheduler.context_length
    if asked > model.context_length:
        raise ConfigError(
            f"scheduler.context_length is {asked} but {model.name} was made for {model.context_length} "
            "tokens: lower it."
        )
    return asked or model.context_length


def _attention_window(model: LoadedModel) -> int:
    """The widest window of any layer, 0 when some layer sees everything."""
    windows = [layer.window for layer in model.spec.layers]
    return max(windows) if all(windows) else 0


def _decoder(model: LoadedModel, precision: Precision, device: str, config: Config) -> Decoder:
    if device == "cpu":
        try:
            return NativeDecoder(
                model.spec, model.weights, dtype=precision, threads=num_threads(config.threads)
            )
        except KernelError as error:
            if precision == "int8":
                raise KernelError(f"{error} int8 weights need them: choose dtype = float32.") from error
            logger.warning("%s Falling back to plain torch, which is several times slower.", error)
        torch.set_num_threads(num_threads(config.threads))
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]
    decoder = TorchDecoder(model.spec, model.weights, dtype=dtype, device=device, exact=config.exact)
    # Rounding slot counts up changes shapes, and with them bits: exact passes are never recorded.
    return GraphedDecoder(decoder) if device == "cuda" and not config.exact else decoder


def _runner(decoder: Decoder, limits: Limits, context: int, device: str) -> ModelRunner:
    spec = decoder.spec
    kv = KVCache(
        spec.num_layers, limits.num_slots, spec.num_kv_heads, spec.head_dim, decoder.kv_dtype, device
    )
    return ModelRunner(decoder, kv, num_rows=limits.max_num_seqs, context_length=context)


def _draft_model(config: Config, target: LoadedModel, device: str) -> _Packed | None:
    """The configured draft model, if the drafter is one."""
    if config.speculation.draft in ("none", "ngram"):
        return None
    draft = load(config.speculation.draft)
    check_same_vocabulary(target.tokenizer, draft.tokenizer)
    precision = resolve_precision(config.speculation.draft_dtype, device)
    return _Packed(draft, _decoder(draft, precision, device, config))


def _drafter(
    config: Config, model: LoadedModel, draft: _Packed | None, limits: Limits, device: str
) -> Drafter | None:
    if draft is not None:
        context = min(limits.context_length, draft.model.context_length)
        return DraftModelDrafter(
            _runner(draft.decoder, limits, context, device),
            target_vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            num_slots=limits.num_slots,
            max_batch_tokens=limits.max_batch_tokens,
        )
    if config.speculation.draft == "ngram":
        return NgramDrafter(config.speculation.prompt_lookup_min, config.speculation.prompt_lookup_max)
    return None


def _draft_length(config: Config, device: str) -> DraftLength:
    speculation = config.speculation
    if speculation.length_by_batch_size:
        return LengthByBatchSize(speculation.length_by_batch_size)
    if speculation.num_speculative_tokens is not None:
        return FixedLength(speculation.num_speculative_tokens)
    return LengthWithinPass(_USUAL_DRAFT_LENGTH, _CHEAP_PASS_TOKENS[device])
