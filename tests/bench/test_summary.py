"""Figures of the report against cells worked out by hand."""

from __future__ import annotations

import pytest

from paceline.bench.summary import by_overlap, by_tenth, gains_by_overlap, rows_of
from paceline.core.stats import SpeculationStats
from paceline.sim.metrics import RequestTimes, Slo

from .cells import cell, plain_request, request


def test_speedups_are_medians_of_ratios_within_a_repeat() -> None:
    """The machine halves its speed from repeat to repeat; ratios do not."""
    cells = []
    for repeat, duration in enumerate((1.0, 2.0, 4.0)):
        cells.append(cell("none", [plain_request()], repeat=repeat, duration_s=2 * duration))
    for repeat, duration in enumerate((1.0, 2.0, 5.0)):
        cells.append(cell("ngram", repeat=repeat, duration_s=duration))
    plain, ngram = rows_of(cells, [])
    assert (plain.speedup, ngram.speedup) == (1.0, 2.0)
    assert plain.output_tokens_per_s == 6 / 4
    assert ngram.output_tokens_per_s == 3.0
    assert (ngram.repeats, ngram.requests, ngram.failed) == (3, 3, 0)


def test_latencies_and_goodput() -> None:
    (row,) = rows_of([cell(requests=[request(), request("p/1", step_s=0.3)])], [Slo("fast", tpot_s=0.05)])
    assert row.latencies["ttft_s"]["p50"] == 0.5
    assert row.latencies["tpot_s"]["mean"] == pytest.approx((0.2 / 5 + 0.6 / 5) / 2)
    assert row.latencies["itl_per_chunk_s"]["count"] == 4
    assert row.latencies["itl_per_token_s"]["count"] == 10
    assert row.goodput == {"fast": 0.5}  # one of two requests, in two seconds


def test_acceptance() -> None:
    """Two steps with three guesses each: two and one of them accepted."""
    (row,) = rows_of([cell()], [])
    told = row.acceptance
    assert told is not None
    assert told.length == 1 + 3 / 2
    assert told.tokens_per_step == 5 / 2
    assert told.rate == 3 / 6
    assert told.joint == [1.0, 0.5]
    assert told.conditional == [1.0, 0.5]


def test_shares_sum_to_one() -> None:
    (row,) = rows_of([cell(), cell(repeat=1)], [])
    assert row.shares is not None
    beside = row.shares.pop("draft_beside")
    assert beside == 0.0
    assert sum(row.shares.values()) == pytest.approx(1.0)
    assert row.shares["overhead"] == pytest.approx(0.25)
    assert (row.rss_before, row.rss_peak) == (100, 300)


def test_requests_are_compared_with_their_own_selves() -> None:
    plain = cell("none", [plain_request(step_s=0.1), plain_request("p/1", step_s=0.2)])
    found = rows_of([plain, cell("ngram", [request(step_s=0.1), request("p/1", step_s=0.1)])], [])[1]
    assert [each.tpot_speedup for each in found.per_request] == pytest.approx([2.5, 5.0])
    assert [each.overlap for each in found.per_request] == [0.3, 0.3]
    assert [each.acceptance_length for each in found.per_request] == [2.5, 2.5]


def test_gains_by_overlap() -> None:
    plain = cell("none", [plain_request(), plain_request("p/1")])
    rows = rows_of([plain, cell("ngram", [request(overlap=1.0), request("p/1", overlap=0.79)])], [])
    pairs = gains_by_overlap(rows, "ngram", "batch 1")
    assert pairs == [(1.0, pytest.approx(2.5)), (0.79, pytest.approx(2.5))]
    assert by_overlap([(0.0, 1.0), (0.19, 2.0), (0.6, 4.0), (1.0, 5.0)]) == [
        (0.0, 2, 1.5),
        (0.6, 1, 4.0),
        (0.8, 1, 5.0),
    ]


def test_along_the_output() -> None:
    """Steps that begin after 1, 4 and 6 of 10 tokens."""
    times = RequestTimes(0.0, 0.0, 3.0, 10, (0.0, 1.0, 2.0, 3.0), (1, 3, 2, 4))
    assert by_tenth([times]) == [None, 3.0, None, None, 2.0, None, 4.0, None, None, None]


def test_what_is_not_known_stays_unknown() -> None:
    unknown = request(tokens=None, chunk_tokens=[], speculation=None, token_ids=None, overlap=None)
    failed = request("p/1", error="HTTP 500")
    (row,) = rows_of([cell(requests=[unknown, failed], shares=None, memory=[])], [Slo("s", tpot_s=1.0)])
    assert (row.output_tokens_per_s, row.speedup, row.acceptance, row.shares) == (None, None, None, None)
    assert (row.requests, row.failed) == (2, 1)
    assert row.goodput == {"s": None}
    assert row.latencies["tpot_s"] == {}
    assert row.latencies["itl_per_chunk_s"]["count"] == 2


def test_acceptance_of_a_whole_cell_where_requests_tell_none() -> None:
    total = SpeculationStats(
        num_drafts=4, num_draft_tokens=12, num_accepted_tokens=6, accepted_by_depth=[4, 2]
    )
    (row,) = rows_of([cell(requests=[request(speculation=None)], speculation=total)], [])
    assert row.acceptance is not None
    assert (row.acceptance.length, row.acceptance.joint) == (2.5, [1.0, 0.5])
    assert row.acceptance.tokens_per_step is None
