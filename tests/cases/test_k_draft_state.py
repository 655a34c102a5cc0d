"""K. The draft model's state keeps in step: with the target's own weights every guess is right, always."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.core.stats import SpeculationStats
from tests.cases.drafters import mistaken
from tests.cases.lab import Lab, assert_no_slot_lost, assert_same, random_prompt
from tests.tiny import DRAFTED, ENGINE, write_random

LONG = SamplingParams(max_tokens=200)


def twin(model: Path, **options: Any) -> LLM:
    """An engine whose draft model is its target."""
    return LLM(model, draft=model, **{**DRAFTED, **options})


def assert_perfect(stats: SpeculationStats) -> None:
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert stats.num_failed_drafts == 0


def test_acceptance_does_not_decay(lab: Lab) -> None:
    """K01 With a mistake at every fifth place, the last hundred tokens cost as many rounds as the first."""
    prompt = random_prompt(1, 5)
    wrong = mistaken(lab.script, lab.vocab, lambda position: position % 5 == 0)
    rounds = {}
    for count in (101, 201):
        output = lab.check(prompt, SamplingParams(max_tokens=count), 4, wrong)
        rounds[count] = output.speculation.num_steps
    assert rounds[201] - rounds[101] == rounds[101] == 20


def test_draft_cache_survives_refusals(models: Path, lab: Lab) -> None:
    """K01 A draft model's acceptance late in a text is that of a draft model which starts there afresh."""
    # A head of its own makes the draft wrong at some places; its cache must not make it wrong at more.
    draft = write_random(models / "near", head_noise=0.2)
    llm = LLM(lab.model, draft=draft, num_speculative_tokens=4, **DRAFTED)
    prompt = random_prompt(2, 5)
    whole = llm.generate([prompt], LONG)[0]
    text = [*prompt, *whole.token_ids]
    assert 0.2 < (whole.speculation.acceptance_rate or 0) < 0.9
    late = SpeculationStats()
    for start in (100, 130, 160):
        cold = LLM(lab.model, draft=draft, num_speculative_tokens=4, **DRAFTED)
        warm = llm.generate([text[:start]], SamplingParams(max_tokens=40))[0]
        fresh = cold.generate([text[:start]], SamplingParams(max_tokens=40))[0]
        assert warm.speculation == fresh.speculation
        late.add(fresh.speculation)
    assert abs((late.acceptance_rate or 0) - (whole.speculation.acceptance_rate or 0)) < 0.2


@pytest.mark.parametrize("k", [1, 2, 3, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_full_acceptance_leaves_no_hole(lab: Lab, k: int, temperature: float) -> None:
    """K02 The last guess of a fully accepted round enters the draft cache too: acceptance stays at 1."""
    params = SamplingParams(max_tokens=200, temperature=temperature, seed=1)
    (output,) = twin(lab.model, num_speculative_tokens=k).generate([random_prompt(3, 9)], params)
    assert_same(output, lab.baseline(random_prompt(3, 9), params))
    assert_perfect(output.speculation)


def test_the_bonus_token_counts(lab: Lab) -> None:
    """K03 A fully accepted round of k guesses yields k + 1 tokens."""
    params = SamplingParams(max_tokens=41)
    (output,) = twin(lab.model, num_speculative_tokens=3).generate([random_prompt(4, 9)], params)
    assert output.speculation.num_steps == 10
    assert output.speculation.mean_acceptance_length == 4.0
    assert output.speculation.tokens_per_step == 4.0


def test_drafting_resumes_in_step(lab: Lab) -> None:
    """K04 After rounds without drafting, while a second request ran, every guess is right again."""
    llm = twin(lab.model, length_by_batch_size=[(1, 3), (2, 0)])
    stream = llm.stream(random_prompt(5, 9), LONG)
    for _ in range(5):
        next(stream)
    llm.generate([random_prompt(6, 9)], SamplingParams(max_tokens=20))
    *_, last = stream
    assert last.output is not None
    stats = last.output.speculation
    assert_same(last.output, lab.baseline(random_prompt(5, 9), LONG))
    assert_perfect(stats)
    assert stats.num_steps > stats.num_drafts > 40


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_tokens": 8, "max_num_seqs": 4},
        {"max_batch_tokens": 16, "max_num_seqs": 2, "prefix_cache": False},
        {"kv_tokens": 300, "max_num_seqs": 4, "max_batch_tokens": 32},
        {"max_num_seqs": 1},
    ],
)
def test_in_step_through_chunks_hits_and_preemption(lab: Lab, options: dict[str, Any]) -> None:
    """K04 Chunked prompts, prefix hits and preemption leave the draft model in step with the target."""
    llm = twin(lab.model, num_speculative_tokens=3, **options)
    stem = random_prompt(7, 30)
    rng = random.Random(1)
    for turn in range(3):
        prompts = [
            [*stem[: rng.randrange(31)], *random_prompt(turn * 9 + seed, rng.randrange(1, 40))]
            for seed in range(6)
        ]
        params = SamplingParams(max_tokens=60)
        outputs = llm.generate(prompts, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert_same(output, lab.baseline(prompt, params))
    stats = llm.engine.core.speculation
    assert stats.acceptance_rate == 1.0
    # Where KV is short the draft model, which shares prefixes later than the target, may have to pass.
    assert stats.num_failed_drafts <= (stats.num_drafts // 20 if "kv_tokens" in options else 0)
    assert_no_slot_lost(llm)


def test_running_requests_share_a_prompt_in_the_draft_cache(lab: Lab) -> None:
    """K04 Where shared prompts fit the target's cache only because they are shared, they fit the draft's."""
    stem = random_prompt(8, 60)
    llm = twin(lab.model, num_speculative_tokens=3, kv_tokens=60 + 8 * 24, max_num_seqs=8)
    # Warms the target's cache alone.
    llm.generate([stem], SamplingParams(max_tokens=1, num_speculative_tokens=0))
    prompts = [[*stem, seed + 3] for seed in range(8)]
    params = SamplingParams(max_tokens=18)
    outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same(output, lab.baseline(prompt, params))
        assert output.usage.cached_tokens == 60
    assert_perfect(llm.engine.core.speculation)


@pytest.mark.parametrize(("kind", "drafted", "accepted"), [("model", 663, 297), ("ngram", 415, 14)])
def test_golden_acceptance(models: Path, lab: Lab, kind: str, drafted: int, accepted: int) -> None:
    """K06 A fixed pair of models accepts, on fixed prompts, as many guesses as it always did."""
    draft = write_random(models / "golden", head_noise=0.2) if kind == "model" else kind
    options = {"ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3}, "model": {"draft_dtype": "float32"}}
    llm = LLM(lab.model, draft=draft, num_speculative_tokens=4, **ENGINE, **options[kind])
    llm.generate([random_prompt(seed, 10) for seed in range(8)], SamplingParams(max_tokens=60))
    stats = llm.engine.core.speculation
    # Sums in another order, on another processor, may flip a near tie and the rest of one text.
    assert stats.num_draft_tokens == pytest.approx(drafted, rel=0.1)
    assert stats.num_accepted_tokens == pytest.approx(accepted, rel=0.1)
