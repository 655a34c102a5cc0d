"""F. Log-probabilities belong to their tokens."""

from __future__ import annotations

import math

import pytest

from paceline import SamplingParams
from tests.cases.drafters import Rule, bushy, half_right, oracle
from tests.cases.lab import Lab, assert_same, random_prompt, stream_all


def test_logprobs_of_accepted_guesses(lab: Lab) -> None:
    """F01 Accepted guesses report the target's own log-probabilities, among them the chosen token's."""
    prompt = random_prompt(1, 9)
    params = SamplingParams(max_tokens=20, logprobs=3)
    output = lab.check(prompt, params, 4)
    assert output.speculation.acceptance_rate == 1.0
    assert output.logprobs is not None
    for token, entry in zip(output.token_ids, output.logprobs, strict=True):
        assert entry.logprob < 0
        assert entry.rank == 1
        assert entry.top[0] == (token, entry.logprob)
        assert [value for _, value in entry.top] == sorted((v for _, v in entry.top), reverse=True)
        assert math.fsum(math.exp(value) for _, value in entry.top) <= 1 + 1e-9


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("kind", ["half", "tree", "right"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_keep_their_places(lab: Lab, k: int, kind: str, temperature: float) -> None:
    """F02 Refused guesses shift no log-probability: one per token, in place, equal bit for bit."""
    rules: dict[str, Rule] = {
        "half": half_right(lab.script, lab.vocab, seed=k),
        "tree": bushy(lab.script, lab.vocab, 3, 2),
        "right": oracle(lab.script),
    }
    prompt = random_prompt(2, 10)
    params = SamplingParams(max_tokens=30, logprobs=1, temperature=temperature, seed=4)
    output = lab.check(prompt, params, k, rules[kind])
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) == 30
    assert_same(stream_all(lab.fast, prompt, params)[1], output)
