"""What the times of requests say, simulated or real: one meaning of every latency, percentile and goodput.

Conventions as in vLLM and AIPerf, with their two meanings of inter-token latency kept apart: *per chunk* is
the time between what a stream hands out, of which a step of speculation hands out several tokens at once;
*per token* divides it by their number.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from paceline.errors import ConfigError, shown

PERCENTILES = (5, 25, 50, 75, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Of one request that ended well, in seconds of any one clock.

    arrival_s: when it was due, not when it was sent.  first_token_s, end_s: of its first and last token; None
    = it had none.  tokens: of its output; None = not known.  chunk_times_s: when each chunk with tokens came,
    the first included.  chunk_tokens: tokens in each of them; empty = not known.
    """

    arrival_s: float
    first_token_s: float | None
    end_s: float
    tokens: int | None
    chunk_times_s: Sequence[float] = ()
    chunk_tokens: Sequence[int] = ()

    @property
    def ttft_s(self) -> float | None:
        return self.first_token_s - self.arrival_s if self.first_token_s is not None else None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.arrival_s

    @property
    def decode_s(self) -> float | None:
        """First token to last."""
        return self.end_s - self.first_token_s if self.first_token_s is not None else None

    @property
    def tpot_s(self) -> float | None:
        """(e2e - ttft) / (tokens - 1); None with fewer than two tokens, or where they are not known."""
        if self.decode_s is None or self.tokens is None or self.tokens < 2:
            return None
        return self.decode_s / (self.tokens - 1)

    def chunk_gaps_s(self) -> list[float]:
        """Inter-token latency per chunk: what vLLM and SGLang call itl."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times_s)]

    def token_gaps_s(self) -> list[float]:
        """Inter-token latency per token: each gap in equal parts, one for every token that ended it."""
        counts = self.chunk_tokens[1:]
        pairs = zip(self.chunk_gaps_s(), counts, strict=True) if self.chunk_tokens else ()
        return [gap / count for gap, count in pairs for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Distribution:
    """percentiles: by their number, linearly interpolated."""

    count: int
    mean: float
    least: float
    most: float
    percentiles: dict[int, float]


def distribution(values: Iterable[float]) -> Distribution | None:
    """None of no values. Raises ValueError for one that is not finite."""
    array = np.fromiter(values, np.float64)
    if array.size == 0:
        return None
    if not np.isfinite(array).all():
        raise ValueError("a time is not finite")
    levels = np.percentile(array, PERCENTILES)
    return Distribution(
        array.size,
        float(array.mean()),
        float(array.min()),
        float(array.max()),
        dict(zip(PERCENTILES, map(float, levels), strict=True)),
    )


@dataclass(frozen=True, slots=True)
class Latencies:
    """Over requests: ttft, tpot, e2e. Over what their streams handed out: itl per chunk, itl per token."""

    ttft_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    itl_per_chunk_s: Distribution | None
    itl_per_token_s: Distribution | None


def latencies(requests: Sequence[RequestTimes]) -> Latencies:
    return Latencies(
        distribution(each.ttft_s for each in requests if each.ttft_s is not None),
        distribution(each.tpot_s for each in requests if each.tpot_s is not None),
        distribution(each.e2e_s for each in requests),
        distribution(gap for each in requests for gap in each.chunk_gaps_s()),
        distribution(gap for each in requests for gap in each.token_gaps_s()),
    )


# ---------------------------------------------------------------- service levels


@dataclass(frozen=True, slots=True)
class Slo:
    """Most seconds of each; None = as long as it takes."""

    name: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def met(self, times: RequestTimes) -> bool:
        """A request of one token has no time per token to miss. Raises ValueError where it is not known."""
        if self.tpot_s is not None and times.tokens is None:
            raise ValueError("the tokens of a request are not known")
        pairs = (
            (self.ttft_s, math.inf if times.ttft_s is None else times.ttft_s),
            (self.tpot_s, times.tpot_s or 0.0),
            (self.e2e_s, times.e2e_s),
        )
        return all(most is None or value <= most for most, value in pairs)


SLOS = {
    slo.name: slo
    for slo in (
        Slo("mlperf-llama3.1-8b", 2.0, 0.1),
        Slo("mlperf-llama3.1-8b-interactive", 0.5, 0.03),
        Slo("mlperf-llama2-70b", 2.0, 0.2),
        Slo("mlperf-llama2-70b-interactive", 0.45, 0.04),
        Slo("mlperf-llama3.1-405b", 6.0, 0.175),
        Slo("mlperf-llama3.1-405b-interactive", 4.5, 0.08),
        Slo("mlperf-deepseek-r1", 2.0, 0.08),
        Slo("mlperf-deepseek-r1-interactive", 1.5, 0.015),
        Slo("mlperf-gpt-oss-120b", 3.0, 0.08),
        Slo("mlperf-gpt-oss-120b-interactive", 2.0, 0.015),
    )
}
"""Limits of MLPerf Inference's server scenarios (mlperf.conf), which hold them at the 99th percentile."""


def parse_slo(text: str) -> Slo:
    """A name of `SLOS`, or limits in seconds as `ttft=0.5,tpot=0.05,e2e=10`. Raises ConfigError."""
    if text in SLOS:
        return SLOS[text]
    if "=" not in text:
        near = difflib.get_close_matches(text, SLOS, n=1, cutoff=0.5)
        help_ = f"did you mean `{near[0]}`?" if near else f"the known ones are {', '.join(SLOS)}."
        raise ConfigError(f"there is no service level {shown(text)}: {help_}")
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in ("ttft", "tpot", "e2e") or name in limits:
            raise ConfigError(f"service level {shown(text)}: write each of ttft, tpot and e2e at most once.")
        limits[name] = _seconds(text, value)
    return Slo(text, limits.get("ttft"), limits.get("tpot"), limits.get("e2e"))


def _seconds(text: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"service level {shown(text)}: {shown(value)} is no number of seconds above 0.")
    return seconds


def goodput(requests: Sequence[RequestTimes], slo: Slo, duration_s: float) -> float | None:
    """Requests per second that met every limit of `slo`; None where tokens are limited and not known."""
    if slo.tpot_s is not None and any(each.tokens is None for each in requests):
        return None
    return sum(map(slo.met, requests)) / duration_s
