"""From a loaded model to one that runs: precision, KV cache, ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from typing import ClassVar, TypeVar

import torch

from paceline.config import Config
from paceline.core.scheduler import Limits
from paceline.drafters.materials import Materials
from paceline.engine.device_groups import DeviceGroup
from paceline.engine.machine import Precision, free_memory
from paceline.errors import ConfigError, EngineError, KernelError
from paceline.execution.graphs import GraphedDecoder
from paceline.execution.model_runner import Decoder, ModelRunner
from paceline.execution.parallel import ParallelRunner
from paceline.kernels.kv_cache import KVCache
from paceline.loading import LoadedModel
from paceline.models.native_decoder import NativeDecoder
from paceline.models.torch_decoder import TorchDecoder

logger = logging.getLogger(__name__)

Native = TypeVar("Native")

_KV_SHARE_OF_MEMORY = 0.25


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """A model and where and how it is to run. device: `cpu` or `cuda`.  capture: places in the target's
    residual stream that it reads."""

    capture: ClassVar[tuple[int, ...]] = ()

    model: LoadedModel
    precision: Precision
    device: str
    group: DeviceGroup
    exact: bool = False

    @property
    def context_length(self) -> int:
        return self.model.context_length

    @property
    def weight_bytes(self) -> int:
        return bytes_of(self.model.weights, self.precision)

    @property
    def kv_bytes_per_token(self) -> int:
        """Of a runner that captures nothing."""
        return self.slot_bytes()

    def slot_bytes(self, capture: Sequence[int] = ()) -> int:
        """Bytes one token takes in the cache of a runner with this `capture`."""
        spec = self.model.spec
        per_value = 4 if self.precision == "float32" else 2
        kept = len(capture) * spec.hidden_size
        return (2 * spec.num_layers * spec.num_kv_heads * spec.head_dim + kept) * per_value

    def affordable(self, limits: Limits) -> Limits:
        """See `fitted`."""
        return fitted(limits, self.kv_bytes_per_token, self.free_bytes, self.model.name)

    def runner(
        self, limits: Limits, context_length: int, capture: Sequence[int] = (), *, spare_slots: int = 0
    ) -> ModelRunner:
        """capture: places in the residual stream that passes write to the cache's features
        (`DecoderSpec.checked_capture`).  spare_slots: of the cache beyond `limits.num_slots`, the last ones;
        of a model on one rank.

        Raises KernelError, ConfigError or EngineError when it cannot run so.
        """
        if len(self.group.places) > 1:
            return self._parallel_runner(limits, context_length, capture)
        decoder = self._decoder(capture)
        spec = decoder.spec
        kv = KVCache(
            *(spec.num_layers, limits.num_slots + spare_slots, spec.num_kv_heads, spec.head_dim),
            *(decoder.kv_dtype, self._torch),
            num_captured=len(capture),
            hidden_size=spec.hidden_size,
        )
        return ModelRunner(decoder, kv, num_rows=limits.max_num_seqs, context_length=context_length)

    def supply(self, materials: Materials) -> Materials:
        """With what a drafter of this model needs."""
        return replace(
            materials,
            context_length=self.context_length,
            runner=lambda context_length: self.runner(materials.limits, context_length),
        )

    @property
    def free_bytes(self) -> int:
        """Of the device that has least."""
        places = self.group.places if self.device == "cuda" else ()
        return min(map(free_memory, [place.device for place in places] or [self.device]))

    @property
    def _torch(self) -> str:
        """The device in torch's words."""
        places = self.group.places
        return places[0].device if places and self.device == "cuda" else self.device

    def _parallel_runner(self, limits: Limits, context_length: int, capture: Sequence[int]) -> ModelRunner:
        return ParallelRunner.start(
            self.model,
            self.group.places,
            dtype=self.precision,
            num_slots=limits.num_slots,
            num_rows=limits.max_num_seqs,
            context_length=context_length,
            max_batch_tokens=limits.max_batch_tokens,
            native=self.device == "cpu",
            exact=self.exact,
            capture=capture,
        )

    def _decoder(self, capture: Sequence[int]) -> Decoder:
        model, group = self.model, self.group

        def native() -> NativeDecoder:
            return NativeDecoder(
                model.spec,
                model.weights,
                dtype=self.precision,
                threads=group.threads,
                cores=group.cores or None,
                capture=capture,
            )

        if self.device == "cpu" and (fast := native_or_none(native, self.precision, group, "dtype")):
            return fast
        decoder = TorchDecoder(
            model.spec,
            model.weights,
            dtype=torch_dtype(self.precision, "dtype"),
            device=self._torch,
            exact=self.exact,
            capture=capture,
        )
        # Rounding slot counts up changes shapes, and with them bits: exact passes are never recorded.
        return GraphedDecoder(decoder) if self.device == "cuda" and not self.exact else decoder


def native_or_none(
    native: Callable[[], Native], precision: Precision, group: DeviceGroup, option: str
) -> Native | None:
    """What `native` makes; None where there are no kernels here, and plain torch, set to the group's threads,
    does it slowly.

    Raises KernelError where only kernels can hold the weights, naming the option that says so.
    """
    try:
        return native()
    except KernelError as error:
        if precision == "int8":
            raise KernelError(f"{error} int8 weights need them: choose {option} = float32.") from error
        logger.warning("%s Falling back to plain torch, which is several times slower.", error)
    torch.set_num_threads(group.threads)
    return None


def torch_dtype(precision: Precision, option: str) -> torch.dtype:
    """Of weights in plain torch. Raises KernelError where it has none such, naming the option that asks."""
    if precision == "int8":
        raise KernelError(f"int8 weights need a CPU: choose {option} = bfloat16.")
    return torch.float32 if precision == "float32" else torch.bfloat16


def fitted(limits: Limits, kv_bytes_per_token: int, free_bytes: int, name: str) -> Limits:
    """No more slots than the drafter's machine, which may be another than the target's, has memory for.

    Raises EngineError where there is none for a single one.
    """
    free = free_bytes // kv_bytes_per_token
    wanted = max(int(free * _KV_SHARE_OF_MEMORY), min(limits.max_batch_tokens, free))
    if wanted == 0:
        raise EngineError(f"there is no memory left for the KV cache of {name}: free some.")
    return replace(limits, num_slots=min(limits.num_slots, wanted))


def bytes_of(weights: object, precision: Precision) -> int:
    """What the matrices among `weights`, a tensor or a list or a dataclass of such, take in `precision`; int8
    has a 16-bit scale for each group of 64."""
    if isinstance(weights, torch.Tensor):
        per_weight = {"float32": 4.0, "bfloat16": 2.0, "int8": 1 + 2 / 64}[precision]
        return int(weights.numel() * per_weight) if weights.ndim > 1 else 0
    parts = weights if isinstance(weights, list) else vars(weights).values() if is_dataclass(weights) else ()
    return sum(bytes_of(part, precision) for part in parts)


def limits_of(config: Config, model: LoadedModel, kv_bytes_per_token: int, free_bytes: int) -> Limits:
    """kv_bytes_per_token: of all models that share the memory, each with a slot per token."""
    scheduler = config.scheduler
    context = _context_length(config, model)
    affordable = int(free_bytes * _KV_SHARE_OF_MEMORY) // kv_bytes_per_token
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
