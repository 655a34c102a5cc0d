"""Candidates that a script knows beforehand, instead of a draft model's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from math import exp, log

VOCAB = 50


def scripted(text: Sequence[int]) -> list[tuple[int, float]]:
    """Ten candidates after `text`, likeliest first, as (token, log-probability); some texts are easy."""
    return _scripted(tuple(text))


@cache
def _scripted(text: tuple[int, ...]) -> list[tuple[int, float]]:
    rng = random.Random(repr(text))
    sharpness = rng.choice([0.3, 1.0, 3.0])
    weights = sorted((exp(sharpness * rng.gauss(0, 1)) for _ in range(10)), reverse=True)
    tokens = rng.sample(range(VOCAB), 10)
    return [(token, log(weight / sum(weights))) for token, weight in zip(tokens, weights, strict=True)]


def best_tokens(known: Sequence[int], count: int) -> list[int]:
    """The likeliest token, the likeliest after it, and so on."""
    text = list(known)
    for _ in range(count):
        text.append(scripted(text)[0][0])
    return text[len(known) :]
