"""L. Preemption, a full cache, requests that end at different times: no output notices."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from paceline import LLM, RequestOutput, SamplingParams
from tests.cases.drafters import Rule, bushy, half_right, mistaken, oracle
from tests.cases.lab import Lab, assert_no_slot_lost, assert_same, random_prompt, stream_all
from tests.tiny import ENGINE


@pytest.fixture(scope="module")
def tight(lab: Lab) -> Lab:
    """A KV pool for about two of four requests."""
    return Lab(lab.model, kv_tokens=100, max_num_seqs=4, max_batch_tokens=32)


def rules(lab: Lab) -> dict[str, Rule]:
    return {
        "right": oracle(lab.script),
        "half": half_right(lab.script, lab.vocab),
        "wrong": mistaken(lab.script, lab.vocab),
        "tree": bushy(lab.script, lab.vocab, 3, 3),
    }


def preemptions(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> int:
    """Runs the requests step by step; how often one was preempted."""
    core = llm.engine.core
    resolved = [llm.intake.params(each) for each in params]
    for index, (prompt, each) in enumerate(zip(prompts, resolved, strict=True)):
        llm.engine.add(f"counted{index}", 0, prompt, each)
    seen: dict[str, int] = {}
    while not llm.engine.idle:
        llm.engine.step()
        seen |= {name: request.num_preemptions for name, request in core.requests.items()}
    return sum(seen.values())


@pytest.mark.parametrize("k", [0, 1, 3, 5])
@pytest.mark.parametrize("kind", ["right", "half", "wrong", "tree"])
def test_preempted_requests_are_exact(tight: Lab, k: int, kind: str) -> None:
    """L01 A request that is thrown out and recomputed says what it would have said undisturbed."""
    prompts = [random_prompt(seed, 5 + 4 * seed) for seed in range(4)]
    params = [SamplingParams(max_tokens=40, temperature=seed % 2, seed=seed) for seed in range(4)]
    outputs = tight.speculate_all(prompts, params, k, rules(tight)[kind])
    for prompt, wanted, output in zip(prompts, params, outputs, strict=True):
        assert_same(output, tight.baseline(prompt, wanted))
    assert_no_slot_lost(tight.fast)
    if kind == "half":
        assert preemptions(tight.fast, prompts, params) > 0
        assert_no_slot_lost(tight.fast)


def test_a_draft_is_cut_to_the_free_cache(lab: Lab) -> None:
    """L03 A lone request that nearly fills the cache drafts less, and finishes."""
    small = Lab(lab.model, kv_tokens=40, max_num_seqs=2, max_batch_tokens=32)
    for count in (28, 29, 30, 31):
        output = small.check(random_prompt(1, 10), SamplingParams(max_tokens=count), 16)
        assert output.finish_reason == "length"
        assert_no_slot_lost(small.fast)


def test_two_requests_that_fill_the_cache(lab: Lab) -> None:
    """L03 Two requests that each need nearly the whole cache both finish, one after the other."""
    small = Lab(lab.model, kv_tokens=40, max_num_seqs=2, max_batch_tokens=32)
    prompts = [random_prompt(seed, 10) for seed in range(2)]
    params = [SamplingParams(max_tokens=28)] * 2
    outputs = small.speculate_all(prompts, params, 16)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same(output, small.baseline(prompt, params[0]))


def test_a_request_larger_than_the_cache_ends_alone(lab: Lab) -> None:
    """L03 A request that can never fit, by prompt or by output, ends with an error that says why."""
    small = Lab(lab.model, kv_tokens=40, max_num_seqs=2, max_batch_tokens=32)
    brief, endless = SamplingParams(max_tokens=8), SamplingParams(max_tokens=90)
    prompts = [random_prompt(1, 10), random_prompt(2, 6), random_prompt(3, 60)]
    outputs = small.speculate_all(prompts, [endless, brief, brief], 8)
    assert outputs[0].finish_reason == outputs[2].finish_reason == "error"
    assert all("cache" in (outputs[place].error or "") for place in (0, 2))
    known = small.baseline(prompts[0], endless).token_ids
    assert outputs[0].token_ids == known[: len(outputs[0].token_ids)]
    assert len(outputs[0].token_ids) >= 30
    assert outputs[2].usage.total_tokens == 60
    assert_same(outputs[1], small.baseline(prompts[1], brief))
    assert_same(small.check(prompts[1], brief, 4), outputs[1])


def test_requests_that_end_in_different_rounds(lab: Lab) -> None:
    """L04 As requests end and others take their rows, tokens never reach the wrong one."""
    crowded = Lab(lab.model, max_num_seqs=3)
    rng = random.Random(4)
    prompts = [random_prompt(seed, rng.randrange(1, 20)) for seed in range(40)]
    params = [
        SamplingParams(max_tokens=1 + seed % 12, temperature=(seed % 3) / 2, seed=seed) for seed in range(40)
    ]
    lengths = [rng.randrange(6) for _ in prompts]
    outputs = crowded.speculate_all(prompts, params, lengths, half_right(crowded.script, crowded.vocab))
    for prompt, wanted, output in zip(prompts, params, outputs, strict=True):
        assert_same(output, crowded.baseline(prompt, wanted))


@pytest.mark.parametrize("kind", ["wrong", "half"])
def test_no_streamed_token_is_taken_back(lab: Lab, kind: str) -> None:
    """L05 What a sampled stream has shown stands: pieces and tokens add up to the final output."""
    for seed in range(50):
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=seed, num_speculative_tokens=4)
        prompt = random_prompt(seed, 3)
        lab.teach(prompt, params)
        lab.drafter.rule = rules(lab)[kind]
        _, output = stream_all(lab.fast, prompt, params)
        assert_same(output, lab.baseline(prompt, params))


@pytest.mark.parametrize("seed", range(12))
def test_random_interleavings(lab: Lab, seed: int) -> None:
    """L01 L04 Random arrivals, leavings, lengths and drafters on a random small engine: all exact."""
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "kv_tokens": rng.randrange(90, 200),
        "max_num_seqs": rng.randrange(1, 5),
        "max_batch_tokens": rng.randrange(8, 64),
        "prefix_cache": rng.random() < 0.7,
    }
    draft = rng.choice(["ngram", lab.model])
    llm = LLM(lab.model, draft=draft, **(dict(ENGINE) | options))
    stem = random_prompt(seed, 20, vocab=8)
    finished: list[tuple[list[int], SamplingParams, RequestOutput]] = []
    open_streams: list[Any] = []
    for index in range(14):
        prompt = [*stem[: rng.randrange(21)], *random_prompt(index, rng.randrange(1, 20), vocab=8)]
        params = SamplingParams(max_tokens=rng.randrange(1, 40), temperature=rng.choice([0, 0.8]), seed=index)
        if rng.random() < 0.3:
            stream = llm.stream(prompt, params)
            next(stream)
            open_streams.append(stream)
        else:
            count = rng.randrange(1, 4)
            outputs = llm.generate([prompt] * count, params)
            finished.extend((prompt, params, output) for output in outputs)
        if open_streams and rng.random() < 0.5:
            open_streams.pop(rng.randrange(len(open_streams))).close()
    for stream in open_streams:
        stream.close()
    while not llm.engine.idle:
        llm.engine.step()
    for prompt, params, output in finished:
        assert_same(output, lab.baseline(prompt, params))
    assert_no_slot_lost(llm)
