"""Requests made of recorded answers: lengths as asked for, and nothing to be found that was not recorded."""

from __future__ import annotations

from itertools import islice

import pytest

from paceline.errors import ConfigError
from paceline.sim.acceptance import DrafterTrace, RequestTrace
from paceline.sim.run.requests import VOCAB_SIZE, arriving, sampled, usable, with_lengths
from paceline.workload import AtOnce, Lengths
from tests.sim.lab import record

TRACE = RequestTrace(
    "t",
    (1, 2, 3),
    (4, 5, 6, 7),
    {"head": DrafterTrace((1, 4, 1, 2), None, (((4, -0.1),), ((5, -0.1),), ((9, -0.1),), ((7, -0.1),)))},
)


def test_lengths_are_kept_and_texts_continued_in_ids_of_their_own() -> None:
    (each,) = with_lengths([Lengths(2.5, 8, 10)], [TRACE])
    assert each.arrival_s == 2.5
    assert len(each.prompt) == 8
    assert each.prompt[-3:] == (1, 2, 3), "the text itself comes last"
    assert each.output[:4] == (4, 5, 6, 7)
    assert len(set(each.output)) == 10, "no tile repeats another"
    assert max(each.output) < VOCAB_SIZE
    assert each.trace is not None
    head = each.trace.drafters["head"]
    assert head.accepted == (1, 3, 1, 1, 1, 3, 1, 1, 1, 1), "no further than the text, tile by tile"
    assert head.top is not None
    assert [row[0][0] == token for row, token in zip(head.top, each.output, strict=True)] == [
        True, True, False, True, True, True, False, True, True, True,
    ]  # fmt: skip


def test_longer_texts_are_cut() -> None:
    (each,) = with_lengths([Lengths(0.0, 2, 3)], [TRACE])
    assert each.prompt[1:] == (3,)
    assert each.output == (4, 5, 6)
    assert each.trace is not None
    assert each.trace.drafters["head"].accepted == (1, 2, 1)
    (each,) = with_lengths([Lengths(0.0, 100, 20)], [TRACE], most_context=30)
    assert (len(each.prompt), len(each.output)) == (10, 20)


def test_the_draw_follows_the_seed() -> None:
    traces = [record(number) for number in range(20)]
    rows = [Lengths(0.0, 20, 20)] * 30
    first = [each.output for each in with_lengths(rows, traces, seed=1)]
    assert first == [each.output for each in with_lengths(rows, traces, seed=1)]
    assert first != [each.output for each in with_lengths(rows, traces, seed=2)]


def test_who_comes_twice_shares_no_prefix() -> None:
    traces = sampled([record(number) for number in range(3)], 7)
    requests = list(arriving(traces, AtOnce()))
    assert len({each.request_id for each in requests}) == 7
    assert len({each.prompt[0] for each in requests[3:]}) == 4
    assert all(each.prompt[1:] == trace.prompt[1:] for each, trace in zip(requests, traces, strict=True))


def test_only_requests_with_the_drafters_record_are_used() -> None:
    short = RequestTrace("s", (1,), (2, 3), {"head": DrafterTrace((1,))})
    assert usable([short, TRACE], ["head"]) == [TRACE]
    assert usable([short, TRACE]) == [short, TRACE]
    with pytest.raises(ConfigError, match="they hold head"):
        usable([short, TRACE], ["eagle"])
    with pytest.raises(ConfigError, match="empty"):
        sampled([], 3)
    with pytest.raises(ConfigError, match="empty"):
        list(islice(with_lengths([Lengths(0.0, 1, 1)], []), 1))
