"""SwiftSpec by simulation: rates within a tenth of the published ones, from its times and acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.sim.acceptance import RequestTrace
from paceline.sim.papers.swiftspec import ACCEPTED, PAIRS, Followed, decode_rate, records, run, texts


@pytest.fixture(scope="module")
def along() -> Sequence[RequestTrace]:
    return list(records(texts(10, 200), 0))


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair.published], ids=lambda pair: pair.name)
def test_published_rates_are_met(pair: object, along: Sequence[RequestTrace]) -> None:
    assert pair in PAIRS
    result = run(pair, along)
    assert pair.published is not None
    assert decode_rate(result) == pytest.approx(pair.published, rel=0.1)
    rounds = result.rounds
    assert rounds.gap == pytest.approx(rounds.behind + rounds.drafting, abs=1e-9), "nothing else takes time"
    if pair.mode == "serial-tree":
        accepted = result.speculation.num_accepted_tokens / result.speculation.num_steps
        assert accepted == pytest.approx(ACCEPTED, rel=0.03)
        assert rounds.behind == 0


def test_ours_has_no_gap_and_finds_what_the_text_repeats() -> None:
    ours = next(pair for pair in PAIRS if pair.mode == "overlapped")
    repeated = (1, 2, 3, 4), tuple(range(16, 56)) * 5
    plain, again = list(records(texts(1, 200), 3)), list(records([repeated], 3))
    first, second = run(ours, plain), run(ours, again)
    assert first.rounds.gap == pytest.approx(0.0, abs=1e-9)
    assert decode_rate(second) > 1.2 * decode_rate(first)


def test_a_record_is_calibrated() -> None:
    (trace,) = records(texts(1, 20000), 5, Followed(ease=0.4, spread=1.5))
    tops = trace.drafters["draft"].top
    assert tops is not None
    for rank in range(3):
        said = sum(2.718281828 ** row[rank][1] for row in tops) / len(tops)
        right = sum(row[rank][0] == token for row, token in zip(tops, trace.output, strict=True)) / len(tops)
        assert right == pytest.approx(said, abs=0.012)
