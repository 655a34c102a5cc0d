"""The public tensor functions. Each dispatches on the device of its tensors: an implementation registered for
that device if there is one, else the plain-torch specification."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from paceline.errors import KernelError
from paceline.kernels import reference
from paceline.kernels.cpu import bindings
from paceline.kernels.cpu.build import load_library
from paceline.kernels.reference import SlotPlan

if TYPE_CHECKING:
    from paceline.kernels.batch import TokenBatch

__all__ = [
    "SlotPlan",
    "apply_rope",
    "coupled_argmax",
    "gated_activation",
    "linear",
    "plan_slots",
    "register",
    "rms_norm",
    "slot_attention",
    "store_kv",
    "top_candidates",
]

_IMPLEMENTATIONS: dict[str, Any] = {}


def register(device_type: str, implementation: Any) -> None:
    """Uses `implementation`'s functions of the names below for tensors of that device type; what it lacks
    stays with the specification."""
    _IMPLEMENTATIONS[device_type] = implementation


def _find(name: str, tensor: Tensor) -> Any:
    special = _IMPLEMENTATIONS.get(tensor.device.type)
    return getattr(special, name, None) or getattr(reference, name)


def coupled_argmax(
    logits: Tensor, temperatures: Sequence[float], seeds: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """See `reference.sampling.coupled_argmax`. On the CPU the native kernel, if it can be built."""
    if logits.device.type == "cpu" and _native_available():
        return bindings.coupled_argmax(logits, temperatures, seeds, positions)
    result: tuple[Tensor, Tensor] = _find("coupled_argmax", logits)(logits, temperatures, seeds, positions)
    return result


def top_candidates(
    logits: Tensor, temperatures: Sequence[float], seeds: Sequence[int], positions: Sequence[int], count: int
) -> tuple[Tensor, Tensor]:
    """See `reference.sampling.top_candidates`. On the CPU the native kernel, if it can be built.

    Raises ValueError when count is below 1 or the rows do not have one temperature, seed and position each.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    if logits.device.type == "cpu" and _native_available():
        return bindings.top_candidates(logits, temperatures, seeds, positions, count)
    result: tuple[Tensor, Tensor] = _find("top_candidates", logits)(
        logits, temperatures, seeds, positions, count
    )
    return result


@functools.cache
def _native_available() -> bool:
    try:
        load_library()
    except KernelError:
        return False
    return True


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `reference.dense.rms_norm`."""
    result: Tensor = _find("rms_norm", x)(x, weight, eps)
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.dense.linear`."""
    result: Tensor = _find("linear", x)(x, weight, bias)
    return result


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `reference.dense.apply_rope`."""
    result: Tensor = _find("apply_rope", x)(x, cos, sin)
    return result


def store_kv(keys: Tensor, values: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """See `reference.dense.store_kv`."""
    _find("store_kv", keys)(keys, values, slots, k, v)


def gated_activation(gate: Tensor, up: Tensor, activation: Literal["silu", "gelu_tanh"]) -> Tensor:
    """See `reference.dense.gated_activation`."""
    result: Tensor = _find("gated_activation", gate)(gate, up, activation)
    return result


def plan_slots(
    batch: TokenBatch,
    windows: Sequence[int],
    device: torch.device,
    *,
    separate: bool,
    pad_slots_to: int = 1,
) -> SlotPlan:
    """See `reference.attention.plan_slots`; made once per pass, on the host."""
    return reference.plan_slots(batch, windows, device, separate=separate, pad_slots_to=pad_slots_to)


def slot_attention(
    q: Tensor, keys: Tensor, values: Tensor, plan: SlotPlan, scale: float, window: int
) -> Tensor:
    """See `reference.attention.slot_attention`."""
    result: Tensor = _find("slot_attention", q)(q, keys, values, plan, scale, window)
    return result
