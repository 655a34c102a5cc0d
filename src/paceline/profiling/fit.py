"""From measured passes and questions to forms of costs (`sim/costs/forms.py`), and how well these tell what
they were not fitted to. Residuals count relative to what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import msgspec
import numpy as np

from paceline.profiling.nnls import Array, nonnegative
from paceline.sim.costs.forms import PassShape, TableDraft, TablePass

Scaled = TypeVar("Scaled", TablePass, TableDraft)

_MOST_ROWS = 16
_PASS_PARTS = ("per_kv_token_s", "per_request_s", "per_pair_s", "per_kv_again_s", "per_row_s")
_DRAFT_PARTS = ("per_request_s", "per_guess_s", "per_unread_s", "per_kv_token_s", "per_level_kv_s")
_APART = 1.02
"""Sizes that are nearer to each other than this share one knot, unless they are neighbours."""


@dataclass(frozen=True, slots=True)
class PassSample:
    """Every request has the same share of it. seconds: the median of its repetitions.  spread: half the
    distance of their quartiles, relative.  rows: whose logits are wanted; None = of every new token, up to
    `_MOST_ROWS` per request."""

    new_tokens: int
    kv_tokens: int
    requests: int
    seconds: float
    spread: float = 0.0
    rows: int | None = None

    @property
    def shape(self) -> PassShape:
        even = PassShape.even(self.new_tokens, self.kv_tokens, self.requests, _MOST_ROWS)
        return even if self.rows is None else replace(even, rows=self.rows)


@dataclass(frozen=True, slots=True)
class DraftSample:
    requests: int
    levels: float
    guesses: float
    unread: float
    kv_tokens: float
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative, of the samples that the fit has not seen: `|fitted / measured - 1|`.  points: how many.
    spread: of the measurements themselves, in the median."""

    points: int
    median: float
    p90: float
    worst: float
    spread: float


def fitted_pass(samples: Sequence[PassSample]) -> TablePass:
    """Each size that was seen is a knot. Raises ValueError without samples."""
    sizes = sorted({sample.new_tokens for sample in samples})
    knots = [size for at, size in enumerate(sizes) if at == 0 or _apart(sizes[at - 1], size)]
    columns = [[*_increments(sample.new_tokens, knots), *_pass_columns(sample)] for sample in samples]
    found = _relative_fit(columns, [sample.seconds for sample in samples])
    times = np.cumsum(found[: len(knots)]).tolist()
    slope = (times[-1] - times[0]) / (knots[-1] - knots[0]) if len(knots) > 1 else 0.0
    parts = dict(zip(_PASS_PARTS, found[len(knots) :].tolist(), strict=True))
    return TablePass(
        new_tokens=tuple(knots), seconds_at=tuple(times), per_token_s=slope, most_rows=_MOST_ROWS, **parts
    )


def _pass_columns(sample: PassSample) -> tuple[float, ...]:
    """What each of `_PASS_PARTS` is multiplied by."""
    shape = sample.shape
    return shape.kv_tokens, shape.requests - 1, shape.pairs, shape.kv_again, shape.rows


def _apart(below: int, size: int) -> bool:
    return size - below == 1 or size > _APART * below


def _increments(size: float, knots: Sequence[int]) -> list[float]:
    """How much of each knot's rise over the one before a pass of this size has."""
    rises = [min(max((size - below) / (above - below), 0.0), 1.0) for below, above in pairwise(knots)]
    return [1.0, *rises]


def fitted_draft(samples: Sequence[DraftSample]) -> TableDraft:
    """Raises ValueError without samples."""
    knots = sorted({round(sample.levels) for sample in samples})
    columns = [[*_increments(sample.levels, knots), *_draft_columns(sample)] for sample in samples]
    found = _relative_fit(columns, [sample.seconds for sample in samples])
    times = np.cumsum(found[: len(knots)]).tolist()
    slope = (times[-1] - times[0]) / (knots[-1] - knots[0]) if len(knots) > 1 else 0.0
    parts = dict(zip(_DRAFT_PARTS, found[len(knots) :].tolist(), strict=True))
    return TableDraft(levels=tuple(knots), seconds_at=tuple(times), per_level_s=slope, **parts)


def _draft_columns(sample: DraftSample) -> tuple[float, ...]:
    """What each of `_DRAFT_PARTS` is multiplied by."""
    kv = sample.kv_tokens
    return (sample.requests, sample.guesses, sample.unread, kv, sample.levels * kv)


def scaled(form: Scaled, factor: float) -> Scaled:
    """All of its times so many times as long."""
    times = {name: getattr(form, name) for name in form.__struct_fields__ if name.endswith(("_s", "_at"))}
    changed = {
        name: tuple(factor * each for each in time) if isinstance(time, tuple) else factor * time
        for name, time in times.items()
    }
    return msgspec.structs.replace(form, **changed)


def _relative_fit(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> Array:
    if not seconds:
        raise ValueError("nothing was measured")
    seen = np.asarray(seconds, dtype=np.float64)
    return nonnegative(np.asarray(columns, dtype=np.float64) / seen[:, None], np.ones(len(seen)))


def split(count: int, kept: Callable[[int], bool]) -> tuple[list[int], list[int]]:
    """Indices for the fit, and every fourth of the others for judging it. kept: always for the fit."""
    free = [at for at in range(count) if not kept(at)]
    held = set(free[1::3])
    return [at for at in range(count) if at not in held], sorted(held)


def pass_error(form: TablePass, samples: Sequence[PassSample]) -> FitError:
    told = [form.seconds_of(each.shape) for each in samples]
    return _error(told, [each.seconds for each in samples], [each.spread for each in samples])


def draft_error(form: TableDraft, samples: Sequence[DraftSample]) -> FitError:
    told = [_told(form, each) for each in samples]
    return _error(told, [each.seconds for each in samples], [each.spread for each in samples])


def _told(form: TableDraft, sample: DraftSample) -> float:
    """As `form.seconds`, of what is no whole number, since it is the mean of several questions."""
    parts = [getattr(form, name) for name in _DRAFT_PARTS]
    table = np.interp(sample.levels, form.levels, form.seconds_at)
    return float(table + np.dot(parts, _draft_columns(sample)))


def _error(told: Sequence[float], seen: Sequence[float], spreads: Sequence[float]) -> FitError:
    if not told:
        return FitError(0, 0.0, 0.0, 0.0, 0.0)
    off = np.abs(np.asarray(told) / np.asarray(seen) - 1.0)
    return FitError(
        len(told),
        float(np.median(off)),
        float(np.quantile(off, 0.9)),
        float(off.max()),
        float(np.median(spreads)),
    )
