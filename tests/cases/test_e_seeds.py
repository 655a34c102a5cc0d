"""E. Seeds: what a sampled output may depend on, and what it may not."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline import LLM, SamplingParams
from tests.cases.drafters import half_right, mistaken
from tests.cases.lab import Lab, assert_same, random_prompt, stream_all
from tests.tiny import ENGINE, successor_logits, write_markov

HOT = SamplingParams(max_tokens=10, temperature=2.0, seed=42)


def test_a_seed_repeats_its_output(lab: Lab) -> None:
    """E01 One seed gives one output, streamed or not, with speculation or without; another seed another."""
    prompt = random_prompt(1, 6)
    first = lab.check(prompt, HOT, 4)
    assert_same(lab.check(prompt, HOT, 4, mistaken(lab.script, lab.vocab)), first)
    assert_same(stream_all(lab.fast, prompt, HOT)[1], first)
    assert lab.check(prompt, replace(HOT, seed=43), 4).token_ids != first.token_ids
    assert first.seed == 42


@pytest.mark.parametrize("same", [True, False])
def test_seeds_of_parallel_requests_do_not_mix(models: Path, same: bool) -> None:
    """E02 Among sixteen parallel requests each gives what it gives alone with its seed."""
    logits = successor_logits(20, {i: (i + 7) % 20 for i in range(20)}, 0, margin=3.0)
    lab = Lab(write_markov(models / f"copy-{same}", logits))
    params = [
        SamplingParams(max_tokens=25, temperature=0.6, seed=7 if same else seed, top_p=0.95)
        for seed in range(16)
    ]
    outputs = lab.speculate_all([[2]] * 16, params, 4, half_right(lab.script, lab.vocab))
    for wanted, output in zip(params, outputs, strict=True):
        assert_same(output, lab.baseline([2], wanted))
    distinct = len({tuple(output.token_ids) for output in outputs})
    assert distinct == 1 if same else distinct > 10


def test_unseeded_requests_differ(models: Path) -> None:
    """E03 Serial requests without a seed are independent draws, and report the seed that repeats them."""
    llm = LLM(write_markov(models / "flat", np.zeros((12, 12))), draft="ngram", **ENGINE)
    params = SamplingParams(max_tokens=20, temperature=1.0)
    outputs = [llm.generate([[3]], params)[0] for _ in range(20)]
    assert len({tuple(output.token_ids) for output in outputs}) == 20
    counts = Counter(token for output in outputs for token in output.token_ids)
    assert len(counts) == 12
    assert max(counts.values()) < 3 * 400 / 12
    again = llm.generate([[3]], replace(params, seed=outputs[0].seed))[0]
    assert again.token_ids == outputs[0].token_ids


def test_a_seeded_output_forgets_the_past(lab: Lab) -> None:
    """E04 A seeded output is the same on a fresh engine, after many other requests, and amid others."""
    prompt = random_prompt(2, 9)
    llm = LLM(lab.model, draft="ngram", num_speculative_tokens=3, **ENGINE)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5)
    first = llm.generate([prompt], params)[0]
    others = [random_prompt(100 + seed, 2 + seed % 9) for seed in range(50)]
    llm.generate(others, SamplingParams(max_tokens=5, temperature=1.0))
    assert_same(llm.generate([prompt], params)[0], first)
    assert_same(llm.generate([*others[:2], prompt, others[2]], params)[2], first)
    assert_same(first, lab.baseline(prompt, params))


def test_a_replayed_conversation_is_the_same(lab: Lab) -> None:
    """E05 A greedy conversation of two turns does not change by being held again on a warm engine."""
    llm = LLM(lab.model, draft="ngram", num_speculative_tokens=5, **ENGINE)
    params = SamplingParams(max_tokens=40)
    talks = []
    for _ in range(3):
        prompt = random_prompt(3, 11) * 2
        first = llm.generate([prompt], params)[0].token_ids
        second = llm.generate([[*prompt, *first, 9, 8]], params)[0].token_ids
        talks.append((first, second))
    prompt = random_prompt(3, 11) * 2
    cold = lab.baseline(prompt, params).token_ids
    expected = (cold, lab.baseline([*prompt, *cold, 9, 8], params).token_ids)
    assert talks == [expected] * 3


@pytest.mark.parametrize("k", [0, 1, 4, 7])
def test_discarded_tokens_consume_no_randomness(lab: Lab, k: int) -> None:
    """E06 What follows a stop in the middle of a round continues as if nothing had been discarded."""
    prompt = random_prompt(4, 8)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=11)
    free = lab.baseline(prompt, params).token_ids
    stopped = lab.check(prompt, replace(params, stop_token_ids=[free[5]]), k)
    cut = free.index(free[5]) + 1
    assert stopped.token_ids == free[:cut]
    resumed = lab.check([*prompt, *stopped.token_ids], replace(params, max_tokens=30 - cut), k)
    assert resumed.token_ids == free[cut:]


@pytest.mark.parametrize("seed", [None, 9])
def test_several_completions_of_one_prompt(lab: Lab, seed: int | None) -> None:
    """E07 n completions carry the indexes 0 to n - 1, differ, and each is repeatable by its own seed."""
    prompt = random_prompt(5, 7)
    params = SamplingParams(max_tokens=15, temperature=1.0, n=3, seed=seed, num_speculative_tokens=3)
    outputs = lab.fast.generate([prompt, prompt], params)
    assert [output.index for output in outputs] == [0, 1, 2, 0, 1, 2]
    assert len({tuple(output.token_ids) for output in outputs[:3]}) == 3
    assert (outputs[0].token_ids == outputs[3].token_ids) == (seed is not None)
    for output in outputs:
        assert output.usage.completion_tokens == len(output.token_ids) == 15
        assert output.usage.prompt_tokens == 7
        assert_same(output, lab.baseline(prompt, replace(params, n=1, seed=output.seed)))
