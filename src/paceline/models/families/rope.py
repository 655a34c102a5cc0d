"""Rotary frequencies from a checkpoint's rope parameters.

The arithmetic follows `transformers.modeling_rope_utils` operation by operation in float32, so that the
frequencies are equal to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.models.spec import RopeSpec

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope parameters of one config as one flat dict with `rope_theta` and `rope_type`.

    Accepts both spellings: `rope_theta` + `rope_scaling` (with `type` or `rope_type`), and the newer
    `rope_parameters`.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return flatten(scaling, config.get("rope_theta"), config)


def flatten(scaling: Mapping[str, Any], theta: float | None, config: Mapping[str, Any]) -> dict[str, Any]:
    """Complete one layer type's parameters with the defaults that live elsewhere in the config."""
    flat = dict(scaling)
    flat["rope_type"] = flat.get("rope_type") or flat.pop("type", None) or "default"
    if flat.get("rope_theta") is None:
        flat["rope_theta"] = theta or 10_000.0
    if flat.get("partial_rotary_factor") is None:
        flat["partial_rotary_factor"] = config.get("partial_rotary_factor") or 1.0
    return flat


def rope_spec(
    parameters: Mapping[str, Any], head_dim: int, max_positions: int, where: str = "config.json"
) -> RopeSpec:
    """Build the frequencies of one rope.

    parameters: as returned by `rope_parameters`. head_dim: width of a head, all of it rotated.
    max_positions: the model's context length, the default of `original_max_position_embeddings`.
    Raises ModelError for a type this engine does not have, a missing number, or a partly rotated head.
    """
    kind = parameters["rope_type"]
    if kind not in ROPE_TYPES:
        raise ModelError(
            f"{where} asks for rope type {kind!r}, which is not supported. "
            f"Supported: {', '.join(ROPE_TYPES)}. Use a checkpoint with one of those."
        )
    if parameters["partial_rotary_factor"] != 1.0:
        raise ModelError(
            f"{where} rotates only part of each head "
            f"(partial_rotary_factor={parameters['partial_rotary_factor']}), which is not supported: "
            "use a model with full rotary heads."
        )
    if head_dim % 2:
        raise ModelError(f"{where} has head_dim={head_dim}; rotary embeddings need an even head_dim.")
    numbers = _Numbers(parameters, where)
    base = numbers.need("rope_theta")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (base**exponents)
    scale = 1.0
    if kind == "linear":
        inv_freq = inv_freq / numbers.need("factor")
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, numbers, max_positions)
    elif kind == "yarn":
        inv_freq, scale = _yarn(base**exponents, head_dim, base, numbers, max_positions)
    return RopeSpec(tuple(inv_freq.tolist()), scale)


def divide(rope: RopeSpec, factors: Tensor, where: str) -> RopeSpec:
    """Apply a checkpoint's own per-frequency divisors (`[head_dim / 2]`, llama.cpp's `rope_freqs`)."""
    if factors.shape != (len(rope.inv_freq),):
        raise ModelError(
            f"{where} has shape {list(factors.shape)} where [{len(rope.inv_freq)}] is expected: "
            "convert the file again."
        )
    divided = torch.tensor(rope.inv_freq, dtype=torch.float32) / factors.float()
    return RopeSpec(tuple(divided.tolist()), rope.scale)


class _Numbers:
    """Checked access to the numbers of one rope dict."""

    def __init__(self, parameters: Mapping[str, Any], where: str) -> None:
        self._parameters = parameters
        self._where = where

    def get(self, key: str) -> float | None:
        value = self._parameters.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(
                f"{self._where}: rope parameter {key} is {value!r}, not a number. Correct the file."
            )
        return float(value)

    def need(self, key: str) -> float:
        value = self.get(key)
        if value is None or value <= 0:
            raise ModelError(
                f"{self._where}: rope type {self._parameters['rope_type']!r} needs a positive {key}, "
                f"found {value}. Correct the file or download it again."
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._parameters.get(key)
        return default if value is None else bool(value)


def _llama3(inv_freq: Tensor, numbers: _Numbers, max_positions: int) -> Tensor:
    factor = numbers.need("factor")
    low, high = numbers.need("low_freq_factor"), numbers.need("high_freq_factor")
    original = numbers.get("original_max_position_embeddings") or float(max_positions)
    wavelength = 2 * math.pi / inv_freq
    slowed = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * slowed / factor + smooth * slowed
    medium = ~(wavelength < original / high) & ~(wavelength > original / low)
    return torch.where(medium, blended, slowed)


def _yarn(
    periods: Tensor, head_dim: int, base: float, numbers: _Numbers, max_positions: int
) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): slow frequencies interpolated, fast ones kept, a ramp in between."""
    original = numbers.get("original_max_position_embeddings") or float(max_positions)
    factor = numbers.get("factor") or max_positions / original
    low = _correction_dim(numbers.get("beta_fast") or 32, head_dim, base, original)
    high = _correction_dim(numbers.get("beta_slow") or 1, head_dim, base, original)
    if numbers.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    kept = 1 - ramp
    inv_freq = 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept
    return inv_freq, _yarn_scale(factor, numbers)


def _correction_dim(rotations: float, head_dim: int, base: float, original: float) -> float:
    return (head_dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(base))


def _yarn_scale(factor: float, numbers: _Numbers) -> float:
    given = numbers.get("attention_factor")
    if given is not None:
        return given

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    mine, all_dims = numbers.get("mscale"), numbers.get("mscale_all_dim")
    if mine and all_dims:
        return mscale(mine) / mscale(all_dims)
    return mscale(1.0)
