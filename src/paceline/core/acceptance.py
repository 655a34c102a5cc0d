"""From a drafter's own confidence to the probability that the target accepts, learnt while decoding."""

from __future__ import annotations

from math import exp, expm1, log, log1p, sqrt

_RANKS = 4
_DEPTHS = 8
_CONFIDENT = 12.0
"""Log-odds beyond which a confidence says no more."""
_MOST_ODDS = 30.0


class Logistic:
    """Online logistic regression: log-odds of acceptance from a signal, itself in log-odds, with an intercept
    per rank among its siblings and per depth. It starts at "as the signal says" and takes one step of AdaGrad
    (Duchi et al., 2011) per outcome.

    More signal never means less probability, whatever was seen.
    """

    __slots__ = ("_depth", "_rank", "_rate", "_seen_depth", "_seen_rank", "_seen_slope", "_slope")

    def __init__(self, rate: float = 0.1) -> None:
        self._rate = rate
        self._slope = 1.0
        self._rank = [0.0] * _RANKS
        self._depth = [0.0] * (_DEPTHS + 1)
        self._seen_slope = 1.0
        self._seen_rank = [1.0] * _RANKS
        self._seen_depth = [1.0] * (_DEPTHS + 1)

    def odds(self, signal: float, rank: int, depth: int, more: float = 0.0) -> float:
        """rank: 0 = the drafter's best.  depth: 1 = below the root.  more: log-odds of what else is known."""
        odds = self._slope * signal + more
        odds += self._rank[rank if rank < _RANKS else -1] + self._depth[depth if depth < _DEPTHS else -1]
        return -_CONFIDENT if odds < -_CONFIDENT else min(odds, _CONFIDENT)

    def line(self) -> tuple[float, float, list[float]]:
        """For first choices: slope, intercept, and one more by depth, the last for all that are deeper; 0 has
        none."""
        return self._slope, self._rank[0], self._depth

    def update(self, signal: float, rank: int, depth: int, error: float) -> None:
        """error: the outcome (1 = accepted) less the probability that was given to it."""
        rank, depth = rank if rank < _RANKS else -1, depth if depth < _DEPTHS else -1
        square, step = error * error, self._rate * error
        if signal:
            self._seen_slope = seen = self._seen_slope + square * signal * signal
            self._slope = max(0.0, self._slope + step * signal / sqrt(seen))
        self._seen_rank[rank] = seen = self._seen_rank[rank] + square
        self._rank[rank] += step / sqrt(seen)
        self._seen_depth[depth] = seen = self._seen_depth[depth] + square
        self._depth[depth] += step / sqrt(seen)


class AcceptanceModel:
    """Of one drafter. Only uncensored outcomes teach it: those of nodes whose parent was accepted."""

    def __init__(self, rate: float = 0.1) -> None:
        self._model = Logistic(rate)

    def log_probability(self, confidence: float, rank: int, depth: int) -> float:
        """Of acceptance given that the parent is accepted; at most 0. confidence: a log-probability."""
        return log_sigmoid(self._model.odds(log_odds(confidence), rank, depth))

    def learn(self, confidence: float, rank: int, depth: int, *, accepted: bool) -> None:
        signal = log_odds(confidence)
        error = float(accepted) - sigmoid(self._model.odds(signal, rank, depth))
        self._model.update(signal, rank, depth, error)


def log_odds(confidence: float) -> float:
    """Of a log-probability, bounded."""
    if confidence > -1e-5:
        return _CONFIDENT
    if confidence < -_CONFIDENT:
        return -_CONFIDENT
    return confidence - log(-expm1(confidence))


def sigmoid(odds: float) -> float:
    return 1.0 / (1.0 + exp(-odds if odds > -_MOST_ODDS else _MOST_ODDS))


def log_sigmoid(odds: float) -> float:
    """Of any number; one that is out of the question counts as hardly likely."""
    return -log1p(exp(-odds if odds > -_MOST_ODDS else _MOST_ODDS))


class Reliability:
    """Said and seen: how often what was given a probability within each tenth came true."""

    BINS = 10

    def __init__(self) -> None:
        self.counts = [0] * self.BINS
        self.hits = [0] * self.BINS
        self.said = [0.0] * self.BINS

    def count(self, probability: float, *, accepted: bool) -> None:
        place = min(int(probability * self.BINS), self.BINS - 1)
        self.counts[place] += 1
        self.hits[place] += accepted
        self.said[place] += probability

    @property
    def tenths(self) -> tuple[tuple[int, float, float], ...]:
        """Of each that is not empty: how many, the mean of what was said, the share that came true."""
        rows = zip(self.counts, self.said, self.hits, strict=True)
        return tuple((count, said / count, hits / count) for count, said, hits in rows if count)

    @property
    def error(self) -> float | None:
        """Expected calibration error: the mean distance of said and seen; None = nothing was said."""
        total = sum(self.counts)
        apart = sum(abs(said - hits) for said, hits in zip(self.said, self.hits, strict=True))
        return apart / total if total else None
