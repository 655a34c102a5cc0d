"""Whether a free target waits for the drafter."""

from __future__ import annotations

import pytest

from paceline.core.hand_over import HandOver
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.core.token_tree import TokenTree


def request(name: str = "a", guesses: int = 0) -> Request:
    made = Request(name, [1, 2, 3], 2, SamplingParams(), 0.0)
    made.proposal = TokenTree.chain(list(range(guesses)))
    return made


def hand_over(reply_s: float, tokens_per_s: float) -> HandOver:
    """One whose drafter answers after `reply_s` and whose target writes `tokens_per_s`; a commit at 10.0."""
    made, now = HandOver(), 0.0
    for _ in range(50):
        made.on_follow("a", now)
        made.on_nodes("a", now + reply_s, caught_up=True)
        now += 1.0 / tokens_per_s
        made.on_commit(1, now)
    made.on_follow("a", 10.0)
    return made


def test_it_waits_for_a_fast_drafter_and_not_for_a_slow_one() -> None:
    assert hand_over(0.01, 10.0).at([request()], 10.0) == pytest.approx(10.015)
    assert hand_over(0.2, 10.0).at([request()], 10.0) == 10.0


def test_it_never_waits_with_something_to_verify() -> None:
    assert hand_over(0.01, 10.0).at([request(guesses=1)], 10.0) == 10.0


def test_an_answer_that_is_late_is_not_waited_for_any_longer() -> None:
    made = hand_over(0.01, 10.0)
    assert made.at([request()], 10.016) == 10.016


def test_an_answer_that_came_is_not_waited_for() -> None:
    made = hand_over(0.01, 10.0)
    made.on_nodes("a", 10.005, caught_up=True)
    assert made.at([request()], 10.006) == 10.006


def test_nodes_on_an_older_root_are_no_answer() -> None:
    made = hand_over(0.01, 10.0)
    made.on_nodes("a", 10.005, caught_up=False)
    assert made.at([request()], 10.006) > 10.006


def test_one_request_does_not_make_a_batch_wait() -> None:
    """The whole batch's tokens are weighed against what one request's guesses bring."""
    made = hand_over(0.01, 200.0)
    assert made.at([request(), *(request(f"b{i}", 2) for i in range(15))], 10.0) == 10.0


def test_nothing_is_known_of_requests_that_ended_or_at_the_start() -> None:
    assert HandOver().at([request()], 1.0) == 1.0
    made = hand_over(0.01, 10.0)
    made.forget("a")
    assert made.at([request()], 10.0) == 10.0
