"""The composition root: from a configuration to an engine, every choice that cannot be honoured refused."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from paceline.config import Config
from paceline.core.drafting import DraftLength, FixedLength, LengthByBatchSize, LengthWithinPass
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.scheduler import Limits
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.engine.engine import About, Engine
from paceline.engine.executor import LocalExecutor
from paceline.engine.replay import EventLog
from paceline.errors import ConfigError, KernelError
from paceline.execution.graphs import GraphedDecoder
from paceline.execution.model_runner import Decoder, ModelRunner
from paceline.execution.target import TargetExecutor
from paceline.kernels.kv_cache import KVCache
from paceline.loading import LoadedModel, check_same_vocabulary, load
from paceline.models.native_decoder import NativeDecoder
from paceline.models.torch_decoder import TorchDecoder

logger = logging.getLogger(__name__)

Precision = Literal["float32", "bfloat16", "int8"]

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


def build(config: Config, *, drafter: Drafter | None = None, record: Path | None = None) -> Built:
    """Loads the models and wires everything. drafter: one of the caller's own, instead of the configured.

    Raises ConfigError, ModelError or KernelError.
    """
    started = time.perf_counter()
    model = load(config.model)
    device = _device(config)
    precision = _precision(config.dtype, device)
    context = _context_length(config, model)
    decoder = _decoder(model, precision, device, config)
    limits = Limits(
        context_length=context,
        num_slots=_num_slots(config, model, context, precision, device),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_batch_tokens=config.scheduler.max_batch_tokens,
        attention_window=_attention_window(model),
    )
    if drafter is None:
        drafter = _drafter(config, model, limits, device)
    core_config = CoreConfig(
        limits=limits,
        vocab_size=min(model.tokenizer.vocab_size, model.spec.vocab_size),
        eos_token_ids=model.eos_token_ids,
        prefix_cache=config.scheduler.prefix_cache,
        drafter=drafter.needs if drafter is not None else None,
        draft_length=_draft_length(config, device),
    )
    target = TargetExecutor(_runner(decoder, limits, context, device), model.eos_token_ids)
    log = EventLog(record, core_config) if record is not None else None
    name = drafter.needs.name if drafter is not None else "none"
    about = About(model.name, name, time.perf_counter() - started)
    engine = Engine(EngineCore(core_config), LocalExecutor(target, drafter), model.tokenizer, about, log)
    return Built(engine, model, precision, device)


def _device(config: Config) -> str:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError(
            "device is cuda but torch sees no CUDA device: choose device = cpu, or fix the driver."
        )
    device = ("cuda" if has_cuda else "cpu") if config.device == "auto" else config.device
    if device == "cuda" and "int8" in (config.dtype, config.speculation.draft_dtype):
        raise ConfigError("int8 weights run on the CPU only: choose dtype = bfloat16, or device = cpu.")
    return device


def _precision(asked: str, device: str) -> Precision:
    if asked in ("float32", "bfloat16", "int8"):
        return asked  # type: ignore[return-value]
    return "bfloat16" if device == "cuda" or _has_bf16_arithmetic() else "float32"


def _has_bf16_arithmetic() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="ignore")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


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


def _num_slots(config: Config, model: LoadedModel, context: int, precision: Precision, device: str) -> int:
    """As configured, else enough for every sequence at full length, within a quarter of the free memory."""
    if config.scheduler.kv_tokens:
        return config.scheduler.kv_tokens
    spec = model.spec
    width = 4 if precision == "float32" else 2
    per_token = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * width
    affordable = int(_free_memory(device) * _KV_SHARE_OF_MEMORY) // per_token
    return min(config.scheduler.max_num_seqs * context, max(affordable, config.scheduler.max_batch_tokens))


def _free_memory(device: str) -> int:
    """Bytes; where the system does not say, a guess that suits a small machine."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 4 << 30


def _threads(config: Config) -> int:
    has_affinity = hasattr(os, "sched_getaffinity")
    usable = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return config.threads or usable


def _decoder(model: LoadedModel, precision: Precision, device: str, config: Config) -> Decoder:
    if device == "cpu":
        try:
            return NativeDecoder(model.spec, model.weights, dtype=precision, threads=_threads(config))
        except KernelError as error:
            if precision == "int8":
                raise KernelError(f"{error} int8 weights need them: choose dtype = float32.") from error
            logger.warning("%s Falling back to plain torch, which is several times slower.", error)
        torch.set_num_threads(_threads(config))
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


def _drafter(config: Config, model: LoadedModel, limits: Limits, device: str) -> Drafter | None:
    speculation = config.speculation
    if speculation.draft == "none":
        return None
    if speculation.draft == "ngram":
        return NgramDrafter(speculation.prompt_lookup_min, speculation.prompt_lookup_max)
    draft = load(speculation.draft)
    check_same_vocabulary(model.tokenizer, draft.tokenizer)
    precision = _precision(speculation.draft_dtype, device)
    decoder = _decoder(draft, precision, device, config)
    context = min(limits.context_length, draft.context_length)
    return DraftModelDrafter(
        _runner(decoder, limits, context, device),
        target_vocab_size=model.tokenizer.vocab_size,
        eos_token_ids=model.eos_token_ids,
        num_slots=limits.num_slots,
        max_batch_tokens=limits.max_batch_tokens,
    )


def _draft_length(config: Config, device: str) -> DraftLength:
    speculation = config.speculation
    if speculation.length_by_batch_size:
        return LengthByBatchSize(speculation.length_by_batch_size)
    if speculation.num_speculative_tokens is not None:
        return FixedLength(speculation.num_speculative_tokens)
    return LengthWithinPass(_USUAL_DRAFT_LENGTH, _CHEAP_PASS_TOKENS[device])
