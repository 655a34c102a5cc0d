"""From a drafter's own confidence to the probability that the target accepts, learnt while decoding."""

from __future__ import annotations

from math import exp, expm1, log, log1p

_RANKS = 4
_DEPTHS = 8
_CONFIDENT = 12.0
"""Log-odds beyond which a confidence says no more."""


class AcceptanceModel:
    """Online logistic regression: log-odds of acceptance from the drafter's log-probability, with an
    intercept per rank among its siblings and per depth. It starts at "as the drafter says" and takes one
    step of AdaGrad (Duchi et al., 2011) per outcome.

    Only uncensored outcomes teach it: those of nodes whose parent was accepted. More confidence never means
    less probability, whatever was seen.
    """

    def __init__(self, rate: float = 0.1) -> None:
        self._rate = rate
        self._slope = 1.0
        self._rank = [0.0] * _RANKS
        self._depth = [0.0] * _DEPTHS
        self._seen_slope = 1.0
        self._seen_rank = [1.0] * _RANKS
        self._seen_depth = [1.0] * _DEPTHS

    def log_probability(self, confidence: float, rank: int, depth: int) -> float:
        """Of acceptance given that the parent is accepted; at most 0. confidence: a log-probability.
        rank: 0 = the drafter's best. depth: 1 = below the root."""
        return -log1p(exp(-self._odds(confidence, rank, depth)))

    def learn(self, confidence: float, rank: int, depth: int, *, accepted: bool) -> None:
        odds = self._odds(confidence, rank, depth)
        error = float(accepted) - 1.0 / (1.0 + exp(-odds))
        rank, depth, signal = min(rank, _RANKS - 1), min(depth, _DEPTHS) - 1, _log_odds(confidence)
        self._seen_slope += (error * signal) ** 2
        step = self._rate * error * signal / self._seen_slope**0.5
        self._slope = max(0.0, self._slope + step)
        self._seen_rank[rank] += error * error
        self._rank[rank] += self._rate * error / self._seen_rank[rank] ** 0.5
        self._seen_depth[depth] += error * error
        self._depth[depth] += self._rate * error / self._seen_depth[depth] ** 0.5

    def _odds(self, confidence: float, rank: int, depth: int) -> float:
        odds = self._slope * _log_odds(confidence)
        odds += self._rank[min(rank, _RANKS - 1)] + self._depth[min(depth, _DEPTHS) - 1]
        return max(-_CONFIDENT, min(_CONFIDENT, odds))


def _log_odds(confidence: float) -> float:
    if confidence > -1e-5:
        return _CONFIDENT
    return max(-_CONFIDENT, confidence - log(-expm1(confidence)))
