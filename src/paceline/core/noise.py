"""The Gumbel noise of the sampling rule: a pure function of (seed, position, token id).

Made of integer operations and of float32 additions and multiplications in a fixed order, so that every
implementation (this one, `kernels/reference/sampling.py`, `kernels/cpu/noise.h`) yields the same bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_F = np.float32

# Cephes logf; relative error below 3e-7 on the range used here.
LOG_COEFFICIENTS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
LOG2_HIGH = 0.693359375
LOG2_LOW = -2.12194440e-4
SQRT_HALF_BITS = 0x3F3504F3
# Multipliers of a 32-bit finaliser found by search (Wellons, "hash-prospector").
MULTIPLIERS = (0x21F0AAAD, 0xD35A2D97)


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    """Two 32-bit keys of a position of a request. seed: taken modulo 2^64; position: tokens before it."""
    mixed = _mix64((_mix64(seed & _MASK64) + position) & _MASK64)
    return mixed & _MASK32, mixed >> 32


def gumbel_noise(seed: int, position: int, token_ids: int | NDArray[np.int64]) -> NDArray[np.float32]:
    """Standard Gumbel noise of token ids below 2^32; an int n stands for the ids 0 .. n - 1.

    The uniform under it has 31 bits, and full float32 precision where the noise is large.
    """
    ids = np.arange(token_ids, dtype=np.uint32) if isinstance(token_ids, int) else token_ids.astype(np.uint32)
    first, second = noise_keys(seed, position)
    bits = _mix32(_mix32(ids + np.uint32(first)) ^ np.uint32(second))
    v = ((bits >> np.uint32(1)).astype(_F) + _F(0.5)) * _F(2.0**-31)
    v = np.minimum(v, _F(1 - 2.0**-24))
    x = _F(1) - v
    # (1 - x) - v is what rounding took from 1 - v, so the sum is log(1 - v) to full relative precision.
    exponential = -(_log(x) + ((_F(1) - x) - v))
    return -_log(exponential)


def _mix64(z: int) -> int:
    """splitmix64."""
    z = (z + 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _mix32(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(MULTIPLIERS[0])
    x = (x ^ (x >> np.uint32(15))) * np.uint32(MULTIPLIERS[1])
    return x ^ (x >> np.uint32(15))


def _log(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Natural logarithm of positive normal float32 numbers."""
    shifted = x.view(np.int32) - np.int32(SQRT_HALF_BITS)
    exponent = (shifted >> np.int32(23)).astype(_F)
    mantissa = (shifted & np.int32(0x7FFFFF)) + np.int32(SQRT_HALF_BITS)
    f = mantissa.view(_F) - _F(1)
    z = f * f
    y = np.full_like(f, _F(LOG_COEFFICIENTS[0]))
    for coefficient in LOG_COEFFICIENTS[1:]:
        y = y * f + _F(coefficient)
    y = (y * f) * z
    y = y + exponent * _F(LOG2_LOW)
    y = y + z * _F(-0.5)
    result: NDArray[np.float32] = (f + y) + exponent * _F(LOG2_HIGH)
    return result
