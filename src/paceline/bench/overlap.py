"""How much of an output stands in its prompt: BLEU-4 (Papineni et al., 2002) without the brevity penalty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from math import exp, log

_LONGEST = 4


def overlap(prompt: Sequence[Hashable], output: Sequence[Hashable]) -> float | None:
    """The geometric mean, over n = 1 to 4, of the share of the output's n-grams that the prompt has too, each
    as often as it has it; in [0, 1]. An output is short or long for reasons of its own, so that its length is
    not held against it. None for fewer than four tokens."""
    if len(output) < _LONGEST:
        return None
    shares = []
    for size in range(1, _LONGEST + 1):
        said, known = _grams(output, size), _grams(prompt, size)
        shares.append(sum((said & known).values()) / said.total())
    return exp(sum(map(log, shares)) / _LONGEST) if all(shares) else 0.0


def _grams(tokens: Sequence[Hashable], size: int) -> Counter[tuple[Hashable, ...]]:
    return Counter(tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1))
