"""Latencies, percentiles and goodput against records worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from paceline.errors import ConfigError
from paceline.sim.metrics import SLOS, RequestTimes, Slo, distribution, goodput, latencies, parse_slo

# Due at 10; a token at 12, three at 15, two at 16.
TIMES = RequestTimes(10.0, 12.0, 16.0, 6, (12.0, 15.0, 16.0), (1, 3, 2))


def test_a_request_by_hand() -> None:
    assert (TIMES.ttft_s, TIMES.e2e_s, TIMES.decode_s) == (2.0, 6.0, 4.0)
    assert TIMES.tpot_s == 4.0 / 5
    assert TIMES.chunk_gaps_s() == [3.0, 1.0]
    assert TIMES.token_gaps_s() == [1.0, 1.0, 1.0, 0.5, 0.5]


def test_per_token_sums_to_the_decoding_time_and_per_chunk_is_tpot_times_the_length() -> None:
    assert sum(TIMES.token_gaps_s()) == sum(TIMES.chunk_gaps_s()) == TIMES.decode_s
    length = sum(TIMES.chunk_tokens[1:]) / len(TIMES.chunk_gaps_s())
    assert sum(TIMES.chunk_gaps_s()) / 2 / length == TIMES.tpot_s


def test_what_is_not_known_is_not_guessed() -> None:
    unknown = replace(TIMES, tokens=None, chunk_tokens=())
    assert unknown.tpot_s is None
    assert unknown.token_gaps_s() == []
    assert unknown.chunk_gaps_s() == [3.0, 1.0]
    assert RequestTimes(0.0, 1.0, 1.0, 1, (1.0,), (1,)).tpot_s is None
    assert RequestTimes(0.0, None, 1.0, 0).ttft_s is None


def test_percentiles_are_interpolated() -> None:
    found = distribution([4.0, 1.0, 2.0, 3.0])
    assert found is not None
    assert (found.count, found.mean, found.least, found.most) == (4, 2.5, 1.0, 4.0)
    assert found.percentiles[50] == 2.5
    assert found.percentiles[95] == pytest.approx(3.85)
    assert distribution([]) is None
    with pytest.raises(ValueError, match="not finite"):
        distribution([1.0, math.nan])


def test_latencies_of_several_requests() -> None:
    other = RequestTimes(0.0, 1.0, 2.0, 2, (1.0, 2.0), (1, 1))
    found = latencies([TIMES, other])
    assert found.ttft_s is not None
    assert found.ttft_s.mean == 1.5
    assert found.itl_per_chunk_s is not None
    assert found.itl_per_token_s is not None
    assert (found.itl_per_chunk_s.count, found.itl_per_token_s.count) == (3, 6)


def test_goodput_counts_requests_that_meet_every_limit() -> None:
    late = replace(TIMES, arrival_s=8.0)
    slo = Slo("mine", ttft_s=2.0, tpot_s=0.8)
    assert goodput([TIMES, late], slo, 4.0) == 0.25
    assert goodput([TIMES, replace(TIMES, tokens=None)], slo, 4.0) is None
    assert goodput([replace(TIMES, tokens=None)], Slo("first", ttft_s=2.0), 4.0) == 0.25
    one = RequestTimes(0.0, 1.0, 1.0, 1, (1.0,), (1,))
    assert goodput([one], slo, 1.0) == 1.0  # no time per token to miss
    assert goodput([RequestTimes(0.0, None, 1.0, 0)], slo, 1.0) == 0.0


def test_service_levels_by_name_and_by_hand() -> None:
    assert parse_slo("mlperf-llama3.1-8b") is SLOS["mlperf-llama3.1-8b"]
    assert parse_slo("ttft=0.5, tpot=0.05") == Slo("ttft=0.5, tpot=0.05", 0.5, 0.05)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mlperf-llama3-8b", "did you mean `mlperf-llama3.1-8b`"),
        ("fast", "the known ones are mlperf"),
        ("ttft=nan", "'nan' is no number of seconds above 0"),
        ("ttft=0", "no number of seconds above 0"),
        ("itl=1", "write each of ttft, tpot and e2e"),
        ("ttft=1,ttft=2", "at most once"),
    ],
)
def test_service_levels_that_are_none(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_slo(text)
