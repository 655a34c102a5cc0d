"""Least squares without negative coefficients: what makes a fit of times monotone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_MOST_TURNS = 10
_TOLERANCE = 1e-10


def nonnegative(rows: Array, seen: Array) -> Array:
    """x >= 0 that makes `|rows x - seen|` least: the active set method of Lawson and Hanson, "Solving Least
    Squares Problems", chapter 23. Columns are scaled first."""
    scale = np.linalg.norm(rows, axis=0)
    used = np.flatnonzero(scale > 0.0)
    scaled = rows[:, used] / scale[used]
    found = np.zeros(rows.shape[1])
    found[used] = _active_set(scaled, seen) / scale[used]
    return found


def _active_set(rows: Array, seen: Array) -> Array:
    count = rows.shape[1]
    values, free = np.zeros(count), np.zeros(count, dtype=bool)
    least = _TOLERANCE * max(float(np.linalg.norm(seen)), 1e-300)
    for _ in range(_MOST_TURNS * count):
        pull = rows.T @ (seen - rows @ values)
        pull[free] = -np.inf
        if free.all() or pull.max() <= least:
            break
        free[int(pull.argmax())] = True
        values = _inner(rows, seen, values, free)
    return values


def _inner(rows: Array, seen: Array, values: Array, free: NDArray[np.bool_]) -> Array:
    """Least squares over the free coefficients; those that would fall below 0 are held at it."""
    while True:
        wanted = np.zeros_like(values)
        wanted[free] = np.linalg.lstsq(rows[:, free], seen, rcond=None)[0]
        below = free & (wanted <= 0.0)
        if not below.any():
            return wanted
        steps = values[below] / np.maximum(values[below] - wanted[below], 1e-300)
        values = values + float(steps.min()) * (wanted - values)
        free &= values > 1e-14
        values[~free] = 0.0
