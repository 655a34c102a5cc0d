"""The sampling rule on raw logits, and its noise (the same bits as `paceline.core.noise`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.noise import (
    LOG2_HIGH,
    LOG2_LOW,
    LOG_COEFFICIENTS,
    MULTIPLIERS,
    SQRT_HALF_BITS,
    noise_keys,
)

_MASK32 = 0xFFFFFFFF


def coupled_argmax(
    logits: Tensor, temperatures: Sequence[float], seeds: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """For each row of logits `[rows, vocab]` float32: `argmax(logits / temperature + noise(seed, position))`,
    the lowest id on ties; at temperature 0 the plain argmax.

    Returns tokens, int64 `[rows]`, and finite, bool `[rows]`: whether the row's largest logit is a finite
    number (-inf is a mask). The token of a row that is not finite means nothing.
    """
    scores = _values(logits, temperatures, seeds, positions)
    best = scores.amax(-1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    tokens = torch.where(scores == best, ids, logits.shape[1]).amin(-1)
    return tokens.clamp(max=logits.shape[1] - 1), logits.amax(-1).isfinite()


def top_candidates(
    logits: Tensor,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
    count: int,
    token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """For each row of logits `[rows, vocab]` float32 the `count` best tokens under the values that
    `coupled_argmax` maximises, best first, the lower id on ties: the first is the one it chooses.

    Returns tokens, int32 `[rows, count]`, and scores, float32 `[rows, count]`. At temperature 0 a score is
    the token's log-probability. Otherwise it is the value less the logsumexp of the row's `count` values:
    under noise that draft and target share, an estimate of how likely the target is to prefer that one,
    comparable between rows of equal `count` only.

    A place for which there is no token (`count` above vocab, a value of -inf, a row whose largest logit is
    not finite) holds token -1 and score -inf; such places are the last of their row.

    token_ids: int64 `[vocab]`, where a row is over another vocabulary than the noise and the result: the id
    of each of its places. Ties then go to the earlier place.
    """
    values = _values(logits, temperatures, seeds, positions, token_ids)
    width = min(count, logits.shape[1])
    ranked, order = values.sort(dim=-1, descending=True, stable=True)
    ranked, order = ranked[:, :width], order[:, :width]
    # Equal infinities, which a tiny temperature makes, are no distance apart.
    below = torch.where(ranked == ranked[:, :1], 0.0, ranked - ranked[:, :1])
    sampled = torch.tensor([bool(t) for t in temperatures], dtype=torch.bool, device=logits.device)
    whole = (logits.float() - logits.float().amax(-1, keepdim=True)).logsumexp(-1)
    scores = below - torch.where(sampled, below.logsumexp(-1), whole)[:, None]
    real = logits.amax(-1).isfinite()[:, None] & (ranked > float("-inf"))
    tokens = torch.full((len(logits), count), -1, dtype=torch.int32, device=logits.device)
    ids = order if token_ids is None else token_ids[order]
    tokens[:, :width] = torch.where(real, ids.int(), -1)
    padded = torch.full(tokens.shape, float("-inf"), device=logits.device)
    padded[:, :width] = torch.where(real, scores, float("-inf"))
    return tokens, padded


def _values(
    logits: Tensor,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
    token_ids: Tensor | None = None,
) -> Tensor:
    """Noise included where the temperature is not 0, float32 `[rows, vocab]`."""
    scores = logits.float()
    if any(temperatures):
        scale = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float32, device=logits.device)
        keys = [noise_keys(seed, position) for seed, position in zip(seeds, positions, strict=True)]
        ids = torch.arange(logits.shape[1], device=logits.device) if token_ids is None else token_ids
        noise = gumbel_noise(torch.tensor(keys, device=logits.device), ids)
        sampled = torch.tensor([bool(t) for t in temperatures], dtype=torch.bool, device=logits.device)
        scores = torch.where(sampled[:, None], scores / scale[:, None] + noise, scores)
    return scores


def gumbel_noise(keys: Tensor, ids: Tensor) -> Tensor:
    """Noise `[rows, n]` of token ids `[n]` under int64 keys `[rows, 2]`; see `paceline.core.noise`."""
    bits = _mix32(_mix32((ids + keys[:, :1]) & _MASK32) ^ keys[:, 1:])
    v = ((bits >> 1).float() + 0.5) * 2.0**-31
    v = v.clamp(max=1 - 2.0**-24)
    x = 1 - v
    return -_log(-(_log(x) + ((1 - x) - v)))


def _mix32(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * MULTIPLIERS[0]) & _MASK32
    x = ((x ^ (x >> 15)) * MULTIPLIERS[1]) & _MASK32
    return x ^ (x >> 15)


def _log(x: Tensor) -> Tensor:
    shifted = x.view(torch.int32) - SQRT_HALF_BITS
    exponent = (shifted >> 23).float()
    f = ((shifted & 0x7FFFFF) + SQRT_HALF_BITS).view(torch.float32) - 1
    z = f * f
    y = torch.full_like(f, LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        y = y * f + coefficient
    y = (y * f) * z
    y = y + exponent * LOG2_LOW
    y = y + z * -0.5
    return (f + y) + exponent * LOG2_HIGH
