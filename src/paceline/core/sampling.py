"""The one rule: the token at position t is argmax(processed_logits_t / temperature + Gumbel(seed, t)).

Processed logits depend on the request's own prefix alone, so a draft and its target, or a pass over one
token and a pass over a tree, choose alike (drafter-invariant coupling, arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.core.noise import gumbel_noise
from paceline.core.params import SamplingParams
from paceline.core.work import TokenLogprobs

Logits = NDArray[np.float32]


class Unsampleable(ValueError):
    """No token can be chosen: the logits are not finite, or everything is masked."""


def choose(
    logits: Logits,
    params: SamplingParams,
    tokens: Sequence[int],
    num_prompt: int,
    eos_token_ids: Sequence[int],
) -> int:
    """The token after `tokens` (prompt and output so far), from its raw logits `[vocab]`. Ties: lowest id.

    Raises Unsampleable.
    """
    check_finite(logits)
    if params.plain and params.greedy:
        return int(np.argmax(logits))
    scores = processed(logits, params, tokens, num_prompt, eos_token_ids)
    if not params.greedy:
        scores += gumbel_noise(params.seed or 0, len(tokens), len(scores))
    token = int(np.argmax(scores))
    if scores[token] == -np.inf:
        raise Unsampleable("every token is masked: relax logit_bias, bad_words or min_tokens")
    return token


def candidates(
    logits: Logits,
    params: SamplingParams,
    tokens: Sequence[int],
    num_prompt: int,
    eos_token_ids: Sequence[int],
    count: int,
) -> tuple[list[int], list[float]]:
    """The `count` tokens that `choose` would prefer after `tokens`, best first, with a log-probability each:
    the exact one of a greedy request, else among those returned, given the noise. Fewer where masks leave
    fewer.

    Raises Unsampleable when the logits are not finite.
    """
    check_finite(logits)
    scores = processed(logits, params, tokens, num_prompt, eos_token_ids)
    if not params.greedy:
        scores += gumbel_noise(params.seed or 0, len(tokens), len(scores))
    count = min(count, len(scores))
    best = np.argpartition(-scores, count - 1)[:count]
    best = best[np.lexsort((best, -scores[best]))]
    best = best[scores[best] > -np.inf]
    if not len(best):
        return [], []
    among = (scores if params.greedy else scores[best]).astype(np.float64)
    total = float(np.log(np.exp(among - scores[best[0]]).sum()))
    return best.tolist(), [min(0.0, float(scores[token] - scores[best[0]]) - total) for token in best]


def check_finite(logits: Logits) -> None:
    """-inf is a mask and allowed; NaN and +inf are a broken model. Raises Unsampleable."""
    top = logits.max()
    if not np.isfinite(top):
        raise Unsampleable("the target's logits are not finite: the model or its weights are broken")


def processed(
    logits: Logits,
    params: SamplingParams,
    tokens: Sequence[int],
    num_prompt: int,
    eos_token_ids: Sequence[int],
) -> Logits:
    """Logits after bias, masks, penalties, temperature and filters, as a new array `[vocab]`.

    For a greedy request temperature and filters are left out: they do not move the argmax.
    """
    scores = logits.astype(np.float32, copy=True)
    _apply_bias_and_masks(scores, params, tokens, num_prompt, eos_token_ids)
    _apply_penalties(scores, params, tokens, num_prompt)
    if params.greedy:
        return scores
    scores /= np.float32(params.temperature)
    if params.top_k and params.top_k < len(scores):
        _apply_top_k(scores, params.top_k)
    if params.top_p is not None and params.top_p < 1.0:
        _apply_top_p(scores, params.top_p)
    if params.min_p:
        scores[scores < scores.max() + np.float32(np.log(params.min_p))] = -np.inf
    return scores


def _apply_bias_and_masks(
    scores: Logits, params: SamplingParams, tokens: Sequence[int], num_prompt: int, eos: Sequence[int]
) -> None:
    # A draft model may know fewer ids than its target: what it cannot propose needs no bias or mask.
    for token, bias in (params.logit_bias or {}).items():
        if token < len(scores):
            scores[token] += bias
    for word in params.bad_words:
        if isinstance(word, str):
            raise TypeError(f"bad word {word!r} must be token ids by now")
        *head, last = word
        if (
            last < len(scores)
            and len(head) <= len(tokens)
            and list(tokens[len(tokens) - len(head) :]) == head
        ):
            scores[last] = -np.inf
    if len(tokens) - num_prompt < params.min_tokens:
        ending = [*([] if params.ignore_eos else eos), *params.stop_token_ids]
        scores[[token for token in ending if 0 <= token < len(scores)]] = -np.inf


def _apply_penalties(scores: Logits, params: SamplingParams, tokens: Sequence[int], num_prompt: int) -> None:
    """Repetition counts prompt and output (CTRL, arXiv 1909.05858); presence and frequency the output."""
    penalty = np.float32(params.repetition_penalty or 1.0)
    if penalty != 1.0:
        seen = np.unique(np.asarray(tokens, dtype=np.int64))
        values = scores[seen]
        scores[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty or params.frequency_penalty:
        output = np.asarray(tokens[num_prompt:], dtype=np.int64)
        ids, counts = np.unique(output, return_counts=True)
        scores[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        scores[ids] -= np.float32(params.presence_penalty)


def _apply_top_k(scores: Logits, k: int) -> None:
    """Keeps the k best and whatever ties with the last of them."""
    kth = np.partition(scores, len(scores) - k)[len(scores) - k]
    scores[scores < kth] = -np.inf


def _apply_top_p(scores: Logits, top_p: float) -> None:
    """Keeps the smallest set of best tokens whose probability reaches top_p (arXiv 1904.09751)."""
    weights = np.exp((scores - scores.max()).astype(np.float64))
    enough = top_p * weights.sum()
    # Sorting a whole vocabulary costs milliseconds; the answer nearly always lies among the best few.
    for size in (_FEW, len(scores)):
        rank = max(len(scores) - size, 0)
        candidates = np.flatnonzero(scores >= np.partition(scores, rank)[rank])
        order = candidates[np.argsort(-scores[candidates], kind="stable")]
        reached = np.cumsum(weights[order])
        if reached[-1] >= enough or len(order) == len(scores):
            break
    kept = order[reached - weights[order] < enough]
    values = scores[kept].copy()
    scores.fill(-np.inf)
    scores[kept] = values


_FEW = 512


def logprobs_of(logits: Logits, token: int, num_top: int) -> TokenLogprobs:
    """Log-probability of `token` and of the `num_top` best under the raw distribution. Rank starts at 1."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    rank = int((logits > logits[token]).sum()) + 1
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        count = min(num_top, len(wide))
        best = np.argpartition(-wide, count - 1)[:count]
        best = best[np.lexsort((best, -wide[best]))]
        top = tuple((int(index), float(wide[index])) for index in best)
    return TokenLogprobs(float(wide[token]), rank, top)
