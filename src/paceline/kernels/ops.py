"""The public tensor functions. Each dispatches on the device of its tensors: an implementation registered for
that device if there is one (for CUDA the Triton kernels, where Triton is installed), else the plain-torch
specification."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from paceline.errors import KernelError
from paceline.kernels import reference
from paceline.kernels.cpu import bindings
from paceline.kernels.cpu.build import load_library
from paceline.kernels.reference import SlotPlan, TreePlan

if TYPE_CHECKING:
    from paceline.kernels.batch import TokenBatch

__all__ = [
    "SlotPlan",
    "TreePlan",
    "add_rms_norm",
    "attention",
    "coupled_argmax",
    "gated_linear",
    "linear",
    "plan_attention",
    "register",
    "rms_norm",
    "rope_store",
    "top_candidates",
]

_IMPLEMENTATIONS: dict[str, Any] = {}
_MODULES = {"cuda": ("triton", "paceline.kernels.triton")}
"""By device type: what must be installed, and the module that then implements it, imported when first met."""


def register(device_type: str, implementation: Any) -> None:
    """Uses `implementation`'s functions of the names below for tensors of that device type; what it lacks
    stays with the specification. None takes a registration back."""
    _IMPLEMENTATIONS[device_type] = implementation


def implementation(device_type: str) -> Any:
    """What serves tensors of that device type before the specification does, or None."""
    if device_type not in _IMPLEMENTATIONS:
        needs, module = _MODULES.get(device_type, ("", ""))
        found = importlib.import_module(module) if needs and importlib.util.find_spec(needs) else None
        _IMPLEMENTATIONS[device_type] = found
    return _IMPLEMENTATIONS[device_type]


def _find(name: str, tensor: Tensor) -> Any:
    special = implementation(tensor.device.type)
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
    logits: Tensor,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
    count: int,
    token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.sampling.top_candidates`. On the CPU the native kernel, if it can be built.

    Raises ValueError when count is below 1, the rows do not have one temperature, seed and position each, or
    token_ids is not as long as a row.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, not {count}")
    if token_ids is not None and token_ids.shape != logits.shape[1:]:
        raise ValueError(f"{tuple(token_ids.shape)} token ids for rows of {logits.shape[1]} logits")
    if logits.device.type == "cpu" and _native_available():
        return bindings.top_candidates(logits, temperatures, seeds, positions, count, token_ids)
    result: tuple[Tensor, Tensor] = _find("top_candidates", logits)(
        logits, temperatures, seeds, positions, count, token_ids
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


def add_rms_norm(x: Tensor, branch: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `reference.dense.add_rms_norm`."""
    result: tuple[Tensor, Tensor] = _find("add_rms_norm", x)(x, branch, weight, eps)
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.dense.linear`."""
    result: Tensor = _find("linear", x)(x, weight, bias)
    return result


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """See `reference.dense.rope_store`."""
    result: Tensor = _find("rope_store", q)(q, k, v, cos, sin, keys, values, slots)
    return result


def gated_linear(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: Literal["silu", "gelu_tanh"],
) -> Tensor:
    """See `reference.dense.gated_linear`."""
    result: Tensor = _find("gated_linear", x)(x, gate, up, gate_bias, up_bias, activation)
    return result


def plan_attention(
    batch: TokenBatch,
    windows: Sequence[int],
    device: torch.device,
    *,
    separate: bool,
    pad_slots_to: int = 1,
) -> SlotPlan | TreePlan:
    """What `attention` needs to know of a pass; made once per pass, on the host.

    A `TreePlan` where the device has a `tree_attention` of its own that takes the batch, else a `SlotPlan`.
    separate: a token is computed by itself, shaped by its position alone, which only a `SlotPlan` promises.
    pad_slots_to: see `reference.attention.plan_slots` and `reference.tree.plan_tree`.
    """
    takes_tree = getattr(implementation(device.type), "takes_tree", None)
    if takes_tree and not separate and takes_tree(batch):
        return reference.plan_tree(batch, device, pad_slots_to=pad_slots_to)
    return reference.plan_slots(batch, windows, device, separate=separate, pad_slots_to=pad_slots_to)


def attention(
    q: Tensor, keys: Tensor, values: Tensor, plan: SlotPlan | TreePlan, scale: float, window: int
) -> Tensor:
    """See `reference.tree.tree_attention`; by a `SlotPlan` the same comes from copies of the slots, see
    `reference.attention.slot_attention`. What reads keys and values where they lie is the Triton kernel on
    CUDA, and on a CPU the native decoder (`kernels/cpu/attention.h`)."""
    name = "tree_attention" if isinstance(plan, TreePlan) else "slot_attention"
    result: Tensor = _find(name, q)(q, keys, values, plan, scale, window)
    return result
