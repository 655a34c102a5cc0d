"""Fits of times that are known: monotone whatever was measured, exact where nothing disturbs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from paceline.profiling.fit import (
    DraftSample,
    PassSample,
    draft_error,
    fitted_draft,
    fitted_pass,
    pass_error,
    scaled,
    split,
)
from paceline.profiling.nnls import nonnegative
from paceline.sim.costs.forms import LinearDraft, TablePass

TRUTH = TablePass(
    new_tokens=(1, 4, 12, 13, 64, 512),
    seconds_at=(5e-3, 5.2e-3, 9e-3, 14e-3, 40e-3, 300e-3),
    per_kv_token_s=8e-7,
    per_request_s=6e-5,
    per_pair_s=3e-8,
    per_kv_again_s=2e-7,
    per_row_s=1e-4,
)
SIZES = (1, 4, 12, 13, 64, 512)


def samples(form: TablePass, noise: float = 0.0) -> list[PassSample]:
    random = np.random.default_rng(3)
    found = []
    for each in SIZES:
        for requests in (1, 2, 8) if each < 64 else (1,):
            for context in (0, 100, 700):
                seconds = form.seconds(each * requests, context * requests, requests)
                seconds *= float(np.exp(noise * random.standard_normal()))
                found.append(PassSample(each * requests, context * requests, requests, seconds, noise))
    return found


def test_a_table_is_found_again() -> None:
    form = fitted_pass(samples(TRUTH))
    assert pass_error(form, samples(TRUTH)).worst < 1e-6
    # A size between two knots, and a number of requests that was never seen.
    assert form.seconds(8, 2000, 4) == pytest.approx(TRUTH.seconds(8, 2000, 4), rel=0.02)
    assert form.seconds(13, 0, 1) > 1.3 * form.seconds(12, 0, 1)


def test_noise_is_averaged_out() -> None:
    form = fitted_pass(samples(TRUTH, noise=0.03))
    assert pass_error(form, samples(TRUTH)).median < 0.02
    held = pass_error(form, samples(TRUTH))
    assert held.median <= held.p90 <= held.worst
    assert held.points == len(samples(TRUTH))


@given(
    st.lists(
        st.tuples(st.integers(1, 512), st.integers(0, 10**4), st.integers(1, 16), st.floats(1e-5, 1.0)),
        min_size=1,
        max_size=30,
    )
)
def test_whatever_was_measured_no_larger_pass_is_quicker(
    rows: list[tuple[int, int, int, float]],
) -> None:
    form = fitted_pass([PassSample(new, kv, requests, seconds) for new, kv, requests, seconds in rows])
    for requests in (1, 8):
        for kv in (0, 3000):
            times = [form.seconds(new, kv, requests) for new in range(1, 600, 7)]
            assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times))
    assert form.seconds(8, 4000, 2) >= form.seconds(8, 100, 2)


def test_a_scaled_form_is_longer_everywhere() -> None:
    slower = scaled(TRUTH, 1.25)
    for new, kv, requests in ((1, 0, 1), (30, 4000, 8), (700, 90, 1)):
        assert slower.seconds(new, kv, requests) == pytest.approx(1.25 * TRUTH.seconds(new, kv, requests))
    assert (slower.new_tokens, slower.most_rows) == (TRUTH.new_tokens, TRUTH.most_rows)


def test_a_drafters_parts_are_found_again() -> None:
    truth = LinearDraft(
        fixed_s=1e-4,
        per_level_s=5e-4,
        per_request_s=2e-5,
        per_guess_s=1e-4,
        per_unread_s=3e-5,
        per_level_kv_s=1e-8,
    )
    found = [
        DraftSample(
            requests,
            levels,
            requests * levels,
            requests * unread,
            requests * kv,
            truth.seconds(requests, levels, requests * levels, requests * unread, requests * kv),
        )
        for requests in (1, 4, 16)
        for levels in (0, 1, 3, 8)
        for unread in (1, 3, 200)
        for kv in (300, 1000)
    ]
    form = fitted_draft(found)
    assert draft_error(form, found).worst < 1e-6
    assert form.per_level_s == pytest.approx(truth.per_level_s, rel=1e-3)
    assert form.per_unread_s == pytest.approx(truth.per_unread_s, rel=1e-3)
    assert form.per_kv_token_s == pytest.approx(0.0, abs=1e-12)


def test_nothing_measured_is_no_fit() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        fitted_pass([])
    with pytest.raises(ValueError, match="nothing was measured"):
        fitted_draft([])


def test_held_out_points_are_none_of_the_kept() -> None:
    used, held = split(20, lambda at: at % 5 == 0)
    assert sorted(used + held) == list(range(20))
    assert held
    assert not any(at % 5 == 0 for at in held)


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 8))
def test_least_squares_without_negative_coefficients(seed: int, count: int, parts: int) -> None:
    random = np.random.default_rng(seed)
    rows, seen = random.standard_normal((count, parts)), random.standard_normal(count)
    ours, theirs = nonnegative(rows, seen), nnls(rows, seen)[0]
    assert (ours >= 0.0).all()
    assert np.linalg.norm(rows @ ours - seen) <= np.linalg.norm(rows @ theirs - seen) + 1e-7


def test_columns_of_nothing_get_nothing() -> None:
    assert nonnegative(np.array([[0.0, 2.0], [0.0, 4.0]]), np.array([1.0, 2.0])).tolist() == [0.0, 0.5]
