"""N. Counters that mean one thing: accepted over drafted, within [0, 1], summed before divided."""

from __future__ import annotations

import pytest

from paceline import LLM, SamplingParams
from paceline.core.token_tree import TokenTree
from tests.cases.drafters import RuleDrafter, Script, constant, mistaken, oracle
from tests.cases.lab import Lab, random_prompt
from tests.tiny import ENGINE


def test_rates_at_both_ends_and_between(lab: Lab) -> None:
    """N02 The acceptance rate is 0 for a drafter that errs, 1 for one that knows, exact in between."""
    prompt, params = random_prompt(1, 4), SamplingParams(max_tokens=41)
    right = lab.check(prompt, params, 4).speculation
    assert (right.acceptance_rate, right.mean_acceptance_length, right.tokens_per_step) == (1.0, 5.0, 5.0)
    wrong = lab.check(prompt, params, 4, mistaken(lab.script, lab.vocab)).speculation
    assert (wrong.acceptance_rate, wrong.mean_acceptance_length, wrong.tokens_per_step) == (0.0, 1.0, 1.0)
    assert wrong.accepted_by_depth == []
    # Of every three places the third is wrong: each round takes what comes before it.
    third = mistaken(lab.script, lab.vocab, lambda place: place % 3 == 2)
    mixed = lab.check(prompt, params, 4, third).speculation
    assert mixed.num_steps == mixed.num_drafts
    assert mixed.num_accepted_tokens == 40 - mixed.num_steps
    assert mixed.acceptance_rate == mixed.num_accepted_tokens / mixed.num_draft_tokens
    assert mixed.mean_acceptance_length == 40 / mixed.num_drafts
    assert sum(mixed.accepted_by_depth) == mixed.num_accepted_tokens


def test_a_tree_is_counted_by_its_nodes(lab: Lab) -> None:
    """N02 In a tree every verified node counts as drafted, so that siblings cannot push the rate above 1."""
    prompt, params = random_prompt(2, 4), SamplingParams(max_tokens=21)

    def pairs(known: list[int], _: int, __: int) -> TokenTree:
        (token,) = lab.script.continuation(known)[:1]
        return TokenTree.build([token, (token + 1) % lab.vocab], [-1, -1])

    stats = lab.check(prompt, params, 2, pairs).speculation
    assert stats.num_accepted_tokens == 10
    assert stats.num_draft_tokens == 19  # the last round had room for one


def test_aggregates_sum_before_they_divide(lab: Lab) -> None:
    """N03 Over many requests the rate is all accepted over all drafted; those without drafts add none."""
    script = Script()
    drafter = RuleDrafter(oracle(script))
    llm = LLM(lab.model, draft=drafter, num_speculative_tokens=3, **ENGINE)
    long = random_prompt(3, 5)
    script.learn([*long, *lab.baseline(long, SamplingParams(max_tokens=200)).token_ids])
    fallback = constant(1)
    drafter.rule = lambda known, n, d: (
        oracle(script)(known, n, d) if known[:5] == long else fallback(known, n, d)
    )
    prompts = [long, *(random_prompt(10 + seed, 5) for seed in range(12))]
    params = [
        SamplingParams(max_tokens=200),
        *[SamplingParams(max_tokens=3)] * 10,
        *[SamplingParams(max_tokens=5, num_speculative_tokens=0)] * 2,
    ]
    outputs = [output.speculation for output in llm.generate(prompts, params)]
    total = llm.engine.core.speculation
    assert [stats.acceptance_rate for stats in outputs[-2:]] == [None, None]
    assert all(stats.acceptance_rate == 0 for stats in outputs[1:-2])
    for name in ("num_steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_emitted_tokens"):
        assert getattr(total, name) == sum(getattr(stats, name) for stats in outputs)
    assert total.acceptance_rate == total.num_accepted_tokens / total.num_draft_tokens
    assert (total.acceptance_rate or 0) > 0.9


@pytest.mark.parametrize("every", [5, 20])
def test_a_shy_drafter_shows(lab: Lab, every: int) -> None:
    """N04 A drafter that is always right because it rarely speaks is seen through by tokens per pass."""
    prompt, params = random_prompt(4, 4), SamplingParams(max_tokens=101)

    def shy(known: list[int], nodes: int, depth: int) -> TokenTree:
        speaks = len(known) % every == 0
        return oracle(lab.script)(known, nodes, depth) if speaks else TokenTree()

    stats = lab.check(prompt, params, 1, shy).speculation
    assert stats.acceptance_rate == 1.0
    assert stats.mean_acceptance_length == 2.0
    assert stats.num_steps - stats.num_drafts >= stats.num_steps * 0.7
    assert stats.tokens_per_step == pytest.approx(100 / stats.num_steps)
    assert (stats.tokens_per_step or 9) < 1.3
