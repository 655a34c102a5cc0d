"""C. Greedy decoding: speculation on equals speculation off, for chains, trees, ties and any length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline import LLM, SamplingParams
from paceline.core.token_tree import ROOT, TokenTree
from tests.cases.drafters import bushy, half_right, mistaken
from tests.cases.lab import Lab, assert_same, random_prompt
from tests.tiny import DRAFTED, ENGINE, VOCAB, write_markov, write_random

LONG = SamplingParams(max_tokens=40)


@pytest.fixture(scope="module")
def ties(models: Path) -> Lab:
    """Every token has a twin with exactly its logit."""
    half = VOCAB // 2
    return Lab(write_random(models / "ties", tied_rows=[(i, i + half) for i in range(half)]))


def test_first_guess_is_verified(lab: Lab) -> None:
    """C01 A lone guess that the target would not choose is never taken."""
    output = lab.check(random_prompt(1, 8), LONG, 1, mistaken(lab.script, lab.vocab))
    assert output.speculation.num_drafts > 30
    assert output.speculation.num_accepted_tokens == 0


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("length", [1, 17, 40])
def test_equal_logits_fall_to_the_lowest_id(ties: Lab, k: int, length: int) -> None:
    """C02 Of tied tokens the lowest id is chosen, however prompt and guesses are split over passes."""
    prompt = random_prompt(length, length)
    assert max(ties.check(prompt, LONG, k).token_ids) < VOCAB // 2
    assert_same(ties.check(prompt, LONG, k, half_right(ties.script, ties.vocab)), ties.baseline(prompt, LONG))
    chunked = LLM(ties.model, draft="none", max_batch_tokens=16, **ENGINE)
    assert_same(chunked.generate([prompt], LONG)[0], ties.baseline(prompt, LONG))


def test_greedy_row_beside_a_sampled_row(ties: Lab) -> None:
    """C03 Temperature 0 is greedy, ties included, whatever its neighbours and its other filters."""
    greedy = SamplingParams(max_tokens=20, temperature=0.0, top_p=0.5, top_k=3, min_p=0.1)
    prompts = [random_prompt(1, 9), random_prompt(2, 9)]
    alone = ties.baseline(prompts[0], SamplingParams(max_tokens=20))
    for seed in range(20):
        sampled = SamplingParams(max_tokens=20, temperature=1.0, seed=seed)
        pair = ties.speculate_all(prompts, [greedy, sampled], 3, half_right(ties.script, ties.vocab))
        assert pair[0].token_ids == alone.token_ids
        assert pair[1].token_ids == ties.baseline(prompts[1], sampled).token_ids


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize(("width", "depth"), [(4, 3), (2, 8), (1, 4)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees(lab: Lab, batch: int, width: int, depth: int, temperature: float) -> None:
    """C04 Accepted nodes may lie anywhere in a tree, for any batch: the output is the baseline's."""
    prompts = [random_prompt(seed, 3 + 13 * seed) for seed in range(batch)]
    params = [SamplingParams(max_tokens=30, temperature=temperature, seed=seed) for seed in range(batch)]
    outputs = lab.speculate_all(prompts, params, 16, bushy(lab.script, lab.vocab, width, depth))
    for prompt, wanted, output in zip(prompts, params, outputs, strict=True):
        assert_same(output, lab.baseline(prompt, wanted))
        assert output.speculation.num_accepted_tokens > 10
        assert 3 <= len(output.speculation.accepted_by_depth) <= depth


def test_tree_of_depth_one(lab: Lab) -> None:
    """C06 Of several guesses for one place at most one is taken, and the bonus token follows it."""
    prompt = random_prompt(4, 6)
    output = lab.check(prompt, LONG, 4, bushy(lab.script, lab.vocab, 4, 1))
    stats = output.speculation
    assert stats.accepted_by_depth == [stats.num_accepted_tokens] == [stats.num_drafts]
    assert stats.num_steps == 20
    nothing_right = lab.check(prompt, LONG, 4, lambda *_: TokenTree.build([0, 1, 2, 0], [ROOT] * 4))
    assert nothing_right.speculation.num_accepted_tokens <= 5


@pytest.mark.parametrize("k", range(1, 17))
def test_every_draft_length(lab: Lab, k: int) -> None:
    """C07 The draft length changes nothing, at no length and over many partly wrong rounds."""
    params = SamplingParams(max_tokens=128)
    for seed in range(2):
        lab.check(random_prompt(seed, 5), params, k, half_right(lab.script, lab.vocab, seed=k))


@pytest.mark.parametrize("k", [1, 4])
def test_a_likely_token_is_not_good_enough(models: Path, k: int) -> None:
    """C08 At temperature 0 a guess that the target finds likely, but not likeliest, is refused."""
    target = np.log(np.tile([0.3, 0.5, 0.1, 0.1], (4, 1)))
    draft = np.log(np.tile([0.6, 0.2, 0.1, 0.1], (4, 1)))
    folders = [write_markov(models / f"c08-{k}-{place}", each) for place, each in enumerate((target, draft))]
    llm = LLM(folders[0], draft=folders[1], num_speculative_tokens=k, **DRAFTED)
    (output,) = llm.generate([[2]], SamplingParams(max_tokens=20))
    assert output.token_ids == [1] * 20
    assert output.speculation.num_draft_tokens > 0
    assert output.speculation.num_accepted_tokens == 0
