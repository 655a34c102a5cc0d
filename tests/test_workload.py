"""Arrivals have the rate and the burstiness that was asked for; traces of lengths are read or refused."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path
from statistics import mean, stdev

import pytest

from paceline.errors import ConfigError
from paceline.workload import AtOnce, Bursts, Lengths, Steady, faster, read_lengths, thinned


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_that_was_asked_for(burstiness: float) -> None:
    moments = list(islice(Bursts(5.0, burstiness, seed=1).times(), 20000))
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert stdev(gaps) / mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)
    assert moments == list(islice(Bursts(5.0, burstiness, seed=1).times(), 20000))
    assert moments != list(islice(Bursts(5.0, burstiness, seed=2).times(), 20000))


def test_plain_arrivals() -> None:
    assert list(islice(AtOnce().times(), 3)) == [0.0] * 3
    assert list(islice(Steady(4.0).times(), 3)) == [0.0, 0.25, 0.5]


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_that_are_none_are_refused(rate: float) -> None:
    for arrivals in (Steady, Bursts):
        with pytest.raises(ConfigError, match="rate"):
            arrivals(rate)
    with pytest.raises(ConfigError, match="burstiness"):
        Bursts(1.0, rate)


def test_both_forms_of_the_azure_traces_are_read(tmp_path: Path) -> None:
    azure, vidur = tmp_path / "a.csv", tmp_path / "v.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:04.0319600,3180,8\r\n"
        "2023-11-16 18:17:03.9799600,4808,10\r\n"
    )
    vidur.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n7.0,4808,10\n7.052,3180,8\n")
    for path in (azure, vidur):
        first, second = read_lengths(path)
        assert first == Lengths(0.0, 4808, 10)
        assert (second.prompt, second.output) == (3180, 8)
        assert second.at_s == pytest.approx(0.052, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: the columns"),
        ("a,b,c\n1,2,3\n", "line 1: the columns"),
        ("HEADER", "holds no request"),
        ("HEADER1,2\n", "line 2 has 2 columns"),
        ("HEADER1.0,2,3\nnan,2,3\n", "line 3: 'nan' is no time"),
        ("HEADERyesterday,2,3\n", "line 2: 'yesterday' is no time"),
        ("HEADER1.0,2,0\n", "line 2: '0' is no number of tokens"),
        ("HEADER1.0,two,3\n", "line 2: 'two' is no number of tokens"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text.replace("HEADER", "TIMESTAMP,ContextTokens,GeneratedTokens\n"))
    with pytest.raises(ConfigError, match=said):
        read_lengths(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_lengths(tmp_path / "none.csv")


def test_fewer_rows_last_as_long_and_come_in_order() -> None:
    rows = [Lengths(float(number), number + 1, 1) for number in range(1000)]
    kept = thinned(rows, 100, seed=3)
    assert len(kept) == 100
    assert kept == sorted(kept, key=lambda row: row.at_s)
    assert kept[0].at_s < 60
    assert kept[-1].at_s > 940
    assert thinned(rows, 5000) == rows
    assert faster(rows, 4.0)[-1] == Lengths(999 / 4, 1000, 1)
    with pytest.raises(ConfigError, match="at least 1"):
        thinned(rows, 0)
    with pytest.raises(ConfigError, match="speed"):
        faster(rows, 0.0)
