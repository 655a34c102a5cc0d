"""Every check passes on honest cells and fails on the lie that it is there for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.bench.checks import checks_of
from paceline.bench.records import Cell, TimeShares
from paceline.core.stats import SpeculationStats

from .cells import cell, plain_request, request

HONEST = [cell("none", [plain_request()]), cell("ngram")]


def failed(cells: list[Cell]) -> list[str]:
    return [check.name for check in checks_of(cells) if check.passed is False]


def test_honest_cells_pass() -> None:
    checks = checks_of(HONEST)
    assert [check.passed for check in checks] == [True] * 8
    assert all(check.checked for check in checks)


def told(**changes: Any) -> SpeculationStats:
    honest = request().speculation
    assert honest is not None
    return replace(honest, **changes)


@pytest.mark.parametrize(
    ("lie", "name"),
    [
        (cell(requests=[request(error="HTTP 500")]), "every request ended well"),
        (cell(max_guesses=1), "acceptance length <= guesses"),
        (cell(requests=[request(speculation=told(num_draft_tokens=2))]), "accepted <= drafted"),
        (cell(requests=[request(speculation=told(accepted_by_depth=[1, 2]))]), "accepted <= drafted"),
        (cell(requests=[request(chunk_tokens=[1, 3, 3])]), "tokens of all chunks"),
        (cell(requests=[request(chunk_times_s=[0.5, 0.7])]), "itl per chunk"),
        (cell(stood_still_s=2.5), "the process ran all the time"),
        (cell(shares=TimeShares(verify_s=1.9, sample_s=0.2)), "draft + verify"),
        (cell(requests=[request(token_ids=[0, 1, 2, 9, 4, 5])]), "outputs equal those without"),
        (cell(requests=[request(token_ids=None, text="texts")]), "outputs equal those without"),
    ],
)
def test_lies_fail(lie: Cell, name: str) -> None:
    assert any(found.startswith(name) for found in failed([HONEST[0], lie]))


def test_where_outputs_part_is_told() -> None:
    wrong = cell("ngram", [request(token_ids=[0, 1, 2, 9, 4, 5])], repeat=2)
    line = checks_of([HONEST[0], wrong])[-1].line()
    assert line.startswith("FAILED: outputs equal those without speculation, 1 of 1 failed")
    assert "ngram, chat, batch 1, repeat 2: p/0: another token 3" in line


def test_an_output_cut_by_the_end_of_text_does_not_break_the_latency_identity() -> None:
    """Two steps, of which the last kept an accepted guess and no bonus token: length 2.5, but 2 per step."""
    stats = told(num_emitted_tokens=4)
    cut = request(
        chunks=(1, 3, 1), speculation=replace(stats, num_accepted_tokens=3), token_ids=[0, 1, 2, 3, 4]
    )
    assert not any(name.startswith("itl") for name in failed([cell(requests=[cut])]))


def test_nothing_to_check_is_not_passed() -> None:
    silent = request(speculation=None, chunk_tokens=[], tokens=None)
    checks = checks_of([cell(requests=[silent], shares=None, max_guesses=None, stood_still_s=None)])
    assert [check.passed for check in checks] == [True, *[None] * 7]
    assert checks[-1].line() == "nothing to check: outputs equal each other"
