"""J. Prefix sharing under speculation: what is cached is what was committed, and hits change no output."""

from __future__ import annotations

import pytest

from paceline import LLM, SamplingParams
from tests.cases.drafters import Rule, half_right, mistaken, oracle
from tests.cases.lab import Lab, assert_no_slot_lost, assert_same, random_prompt
from tests.tiny import ENGINE

TWENTY = SamplingParams(max_tokens=20)


@pytest.fixture
def fresh(lab: Lab) -> Lab:
    """The lab with an empty prefix cache."""
    lab.fast.engine.core.ledger.cache.clear()
    return lab


def rule_of(lab: Lab, kind: str) -> Rule:
    rules = {"wrong": mistaken(lab.script, lab.vocab), "half": half_right(lab.script, lab.vocab)}
    return rules.get(kind, oracle(lab.script))


@pytest.mark.parametrize("place", [2, 5, 6])
def test_an_answer_that_stopped_in_a_round_is_reused(fresh: Lab, place: int) -> None:
    """J01 The next turn finds the whole returned answer in the cache, and nothing behind its stop."""
    prompt = random_prompt(1, 12)
    free = fresh.baseline(prompt, TWENTY).token_ids
    first = fresh.check(prompt, SamplingParams(max_tokens=20, stop_token_ids=[free[place]]), 8)
    turn = [*prompt, *first.token_ids]
    second = fresh.check([*turn, 7, 8, 9], TWENTY, 8)
    assert len(turn) - 1 <= second.usage.cached_tokens <= len(turn)
    behind = fresh.check([*turn, *free[len(first.token_ids) :], 5], TWENTY, 8)
    assert len(turn) - 1 <= behind.usage.cached_tokens <= len(turn)


@pytest.mark.parametrize("kind", ["wrong", "half", "right"])
@pytest.mark.parametrize("k", [1, 4])
def test_refused_guesses_are_never_cached(fresh: Lab, kind: str, k: int) -> None:
    """J02 With guesses refused or taken, a following turn hits exactly the committed tokens."""
    prompt = random_prompt(2, 10)
    first = fresh.check(prompt, TWENTY, k, rule_of(fresh, kind))
    second = fresh.check([*prompt, *first.token_ids, 4, 4], TWENTY, k, rule_of(fresh, kind))
    assert second.usage.cached_tokens == 10 + 20 - 1
    assert_no_slot_lost(fresh.fast)


def test_scattered_slots(lab: Lab) -> None:
    """J04 Shared prefixes in a fragmented cache give the same outputs as memory that lies in a row."""
    tight = Lab(lab.model, kv_tokens=220, max_num_seqs=5, max_batch_tokens=48)
    stem = random_prompt(3, 20)
    for turn in range(4):
        prompts = [
            [*stem[: 20 - 3 * turn], *random_prompt(10 * turn + seed, 1 + 7 * (seed % 3))]
            for seed in range(8)
        ]
        params = [SamplingParams(max_tokens=4 + 5 * (seed % 4)) for seed in range(8)]
        rule = half_right(tight.script, tight.vocab, seed=turn)
        outputs = tight.speculate_all(prompts, params, [1, 2, 3, 4, 5, 6, 7, 8], rule)
        for prompt, wanted, output in zip(prompts, params, outputs, strict=True):
            assert_same(output, tight.baseline(prompt, wanted))
    assert_no_slot_lost(tight.fast)


def test_lookup_memory_ends_with_its_request(lab: Lab) -> None:
    """J05 The acceptance of a repetitive request does not depend on what used its place before."""
    options = {**ENGINE, "draft": "ngram", "num_speculative_tokens": 4, "max_num_seqs": 1}
    options["prompt_lookup_min"] = 1
    repetitive = [9, 8, 7] * 5
    used, fresh = LLM(lab.model, **options), LLM(lab.model, **options)
    used.generate([random_prompt(4, 90) + repetitive * 2], SamplingParams(max_tokens=60))
    after, alone = (llm.generate([repetitive], SamplingParams(max_tokens=40))[0] for llm in (used, fresh))
    assert_same(after, alone)
    assert after.speculation == alone.speculation
    assert alone.speculation.num_draft_tokens > 0


def test_speculation_keeps_prefix_hits(lab: Lab) -> None:
    """J06 A repeated prompt hits equally many cached tokens with speculation and without."""
    prompt = random_prompt(5, 33)
    hits = []
    for draft in ("none", "ngram", lab.model):
        llm = LLM(lab.model, draft=draft, **ENGINE)
        outputs = [llm.generate([prompt], TWENTY)[0] for _ in range(2)]
        assert_same(outputs[1], outputs[0])
        hits.append([output.usage.cached_tokens for output in outputs])
    assert hits == [[0, 32]] * 3
    off = LLM(lab.model, draft="ngram", prefix_cache=False, **ENGINE)
    assert [off.generate([prompt], TWENTY)[0].usage.cached_tokens for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("shared", [1, 4, 15, 24, 34, 35])
@pytest.mark.parametrize("kind", ["half", "right"])
def test_partial_reuse(fresh: Lab, shared: int, kind: str) -> None:
    """J07 A turn that shares any part of an earlier speculative one gives what it gives when cold."""
    prompt = random_prompt(6, 16)
    first = fresh.check(prompt, TWENTY, 4, rule_of(fresh, kind))
    text = [*prompt, *first.token_ids]
    other = [*text[:shared], 3, 5]
    output = fresh.check(other, TWENTY, 4, rule_of(fresh, kind))
    assert output.usage.cached_tokens >= shared
    again = fresh.check(prompt, TWENTY, 3, rule_of(fresh, kind))
    assert again.usage.cached_tokens == 15
