"""D. Sampled decoding and everything that changes the logits, at every place of a round."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare

from paceline import LLM, RequestOutput, SamplingParams
from paceline.core.token_tree import ROOT, TokenTree
from tests.cases.drafters import RuleDrafter, constant
from tests.cases.lab import Lab, assert_same, random_prompt
from tests.tiny import DRAFTED, ENGINE, write_markov

SAMPLES = 1500
SIZE = 8
Probabilities = NDArray[np.float64]


def random_logits(seed: int, scale: float = 1.5) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((SIZE, SIZE)) * scale).astype(np.float32)


TARGET = random_logits(1)
DRAFTS = {"near": TARGET + 0.4 * random_logits(2), "far": random_logits(3, 3.0), "against": -TARGET}


@pytest.fixture(scope="module")
def chain(models: Path) -> Path:
    """A target of eight tokens whose distributions are known."""
    return write_markov(models / "chain", TARGET)


def filtered(logits: NDArray[np.float32], params: SamplingParams) -> Probabilities:
    """Row-wise probabilities after temperature, top-k, top-p and min-p, written down naively."""
    rows = []
    for row in logits.astype(np.float64) / (params.temperature or 1.0):
        weights = np.exp(row - row.max())
        weights /= weights.sum()
        order = np.argsort(-weights)
        keep = np.ones(len(row), bool)
        if params.top_k:
            keep[order[params.top_k :]] = False
        if params.top_p:
            before = np.cumsum(np.where(keep[order], weights[order], 0)) - weights[order]
            keep[order[before >= params.top_p * weights[keep].sum()]] = False
        if params.min_p:
            keep &= weights >= params.min_p * weights.max()
        rows.append(np.where(keep, weights, 0) / weights[keep].sum())
    return np.array(rows)


def sampled(llm: LLM, params: SamplingParams, count: int = SAMPLES, **changes: object) -> list[RequestOutput]:
    """One output per seed 0 .. count, from the prompt "a"."""
    values = {"max_tokens": 4, "temperature": params.temperature, "top_p": params.top_p} | changes
    each = [SamplingParams(**values, seed=seed) for seed in range(count)]  # type: ignore[arg-type]
    return llm.generate([[0]] * count, each)


def assert_distributed(observed: Sequence[int], expected: Probabilities) -> None:
    """Chi-square of category numbers against probabilities; categories of probability 0 never occur."""
    counts = np.bincount(observed, minlength=len(expected)).astype(np.float64)
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    rare = possible & (expected * len(observed) < 5)
    common = possible & ~rare
    observed_bins = [*counts[common], counts[rare].sum()] if rare.any() else counts[common]
    expected_bins = [*expected[common], expected[rare].sum()] if rare.any() else expected[common]
    scaled = np.array(expected_bins) * len(observed)
    assert chisquare(observed_bins, scaled * (np.sum(observed_bins) / scaled.sum())).pvalue > 1e-3


def test_sampling_is_not_argmax(models: Path) -> None:
    """D01 Sampled tokens follow the target's distribution, the unlikely ones included."""
    model = write_markov(models / "three", np.log(np.tile([0.5, 0.3, 0.2], (3, 1))))
    drafter = RuleDrafter(constant(0))
    llm = LLM(model, draft=drafter, num_speculative_tokens=2, **ENGINE)
    outputs = sampled(llm, SamplingParams(temperature=1.0), 300)
    for place in range(4):
        assert_distributed([output.token_ids[place] for output in outputs], np.array([0.5, 0.3, 0.2]))


FILTERED, PLAIN = SamplingParams(temperature=0.7, top_p=0.8), SamplingParams(temperature=1.0)


@pytest.mark.parametrize(("draft", "params"), [*((name, FILTERED) for name in DRAFTS), ("far", PLAIN)])
def test_joint_distribution_of_two_tokens(
    models: Path, chain: Path, draft: str, params: SamplingParams
) -> None:
    """D02 D04 With a draft model near or far, two tokens of one round are jointly distributed as the target
    has them, and are, seed by seed, those of plain decoding."""
    small = write_markov(models / f"chain-{draft}", DRAFTS[draft])
    llm = LLM(chain, draft=small, num_speculative_tokens=3, max_num_seqs=64, **DRAFTED)
    outputs = sampled(llm, params)
    plain = LLM(chain, draft="none", max_num_seqs=64, **ENGINE)
    assert [o.token_ids for o in sampled(plain, params, 300)] == [o.token_ids for o in outputs[:300]]
    step = filtered(TARGET, params)
    joint = ((step[0] @ step)[:, None] * step).ravel()
    assert_distributed([o.token_ids[1] * SIZE + o.token_ids[2] for o in outputs], joint)
    accepted = llm.engine.core.speculation.acceptance_rate
    assert accepted is not None
    assert accepted > 0.6 if draft == "near" else accepted < 0.5


@pytest.mark.parametrize("siblings", [[0, 1], [5, 2, 7]])
def test_siblings_leave_the_distribution_alone(chain: Path, siblings: list[int]) -> None:
    """D06 However many guesses compete for one place, its token is distributed as the target has it."""
    drafter = RuleDrafter(lambda *_: TokenTree.build(siblings, [ROOT] * len(siblings)))
    llm = LLM(chain, draft=drafter, num_speculative_tokens=4, max_num_seqs=64, **ENGINE)
    params = SamplingParams(temperature=1.0)
    step = filtered(TARGET, params)
    outputs = sampled(llm, params, max_tokens=6)
    assert_distributed([output.token_ids[1] for output in outputs], step[0] @ step)
    taken = np.mean([output.speculation.accepted_by_depth[:1] == [1] for output in outputs])
    assert taken > 0


def test_the_draft_model_samples_with_the_targets_filters(lab: Lab) -> None:
    """D03 With one model in both roles and top_k 1, sampled output is greedy and every guess is taken."""
    llm = LLM(lab.model, draft=lab.model, num_speculative_tokens=4, **DRAFTED)
    prompt = random_prompt(5, 7)
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=41, temperature=1.0, top_k=1, seed=3))
    assert output.token_ids == lab.baseline(prompt, SamplingParams(max_tokens=41)).token_ids
    assert output.speculation.acceptance_rate == 1.0
    (free,) = llm.generate(prompt, SamplingParams(max_tokens=41, temperature=1.3, top_p=0.9, seed=3))
    assert free.speculation.acceptance_rate == 1.0


def test_a_pause_in_drafting_changes_no_sample(lab: Lab) -> None:
    """D07 A sampled request whose drafting stops and resumes emits what it would without speculation."""
    table = [(1, 3), (3, 0)]
    llm = LLM(lab.model, draft=lab.model, length_by_batch_size=table, **DRAFTED)
    lengths = [60, 12, 25, 40, 9]
    prompts = [random_prompt(seed, 4 + seed) for seed in range(5)]
    params = [SamplingParams(max_tokens=n, temperature=0.9, seed=n) for n in lengths]
    outputs = llm.generate(prompts, params)
    for prompt, wanted, output in zip(prompts, params, outputs, strict=True):
        assert_same(output, lab.baseline(prompt, wanted))
    stats = outputs[0].speculation
    assert 0 < stats.num_drafts < stats.num_steps
    assert stats.acceptance_rate == 1.0


# ---------------------------------------------------------------- penalties, bias, masks


def test_a_penalty_has_its_effect(models: Path) -> None:
    """D08 A frequency penalty, of either sign, changes what it should and is never dropped."""
    lab = Lab(write_markov(models / "level", np.tile(np.linspace(2.0, 0.5, SIZE), (SIZE, 1))))
    outputs = {}
    for penalty in (-2.0, 0.0, 2.0):
        params = SamplingParams(max_tokens=30, frequency_penalty=penalty)
        outputs[penalty] = lab.check([0, 1, 0, 1], params, 3).token_ids
    assert outputs[-2.0] == outputs[0.0] == [0] * 30
    assert sorted(outputs[2.0][:SIZE]) == list(range(SIZE))


PENALTIES = [
    {"frequency_penalty": 1.0},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.3, "presence_penalty": 0.4, "repetition_penalty": 1.2},
    {"frequency_penalty": 0.7, "temperature": 0.8, "seed": 5},
]


@pytest.mark.parametrize("penalties", PENALTIES)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 8])
def test_penalties_count_every_token_once(lab: Lab, penalties: dict[str, float], k: int) -> None:
    """D09 D11 Accepted guesses are counted once and refused ones never, at every place of a round."""
    params = SamplingParams(max_tokens=60, **penalties)  # type: ignore[arg-type]
    output = lab.check(random_prompt(6, 8), params, k)
    assert output.speculation.acceptance_rate == 1.0
    refused = lab.check(random_prompt(6, 8), params, k, constant(11, 12))
    assert refused.speculation.num_draft_tokens > 40


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
def test_one_count_too_many_would_show(models: Path, k: int) -> None:
    """D10 Where a single count decides the argmax, the output is that of counting by hand, for every k."""
    levels = np.linspace(2.0, 1.0, SIZE)
    lab = Lab(write_markov(models / f"counted-{k}", np.tile(levels, (SIZE, 1))))
    counts, by_hand = np.zeros(SIZE), []
    for _ in range(40):
        token = int(np.argmax(levels - 0.31 * counts - 0.17 * (counts > 0)))
        counts[token] += 1
        by_hand.append(token)
    params = SamplingParams(max_tokens=40, frequency_penalty=0.31, presence_penalty=0.17)
    assert lab.check([3, 3, 3], params, k).token_ids == by_hand


@pytest.mark.parametrize("k", [1, 5])
def test_bias_and_min_p_bind_at_every_place(lab: Lab, k: int) -> None:
    """D12 Bias and min_p hold for every token of a round, though the drafter knows nothing of them."""
    prompt = random_prompt(7, 9)
    free = lab.teach(prompt, SamplingParams(max_tokens=30)).token_ids
    naive = constant(*free[:3])
    forced = lab.check(prompt, SamplingParams(max_tokens=30, logit_bias={77: 100.0}), k, naive)
    assert forced.token_ids == [77] * 30
    banned = lab.check(prompt, SamplingParams(max_tokens=30, logit_bias={free[0]: -100.0}), k, naive)
    assert free[0] not in banned.token_ids
    narrow = SamplingParams(max_tokens=30, temperature=1.0, min_p=0.9, seed=1)
    lab.check(prompt, narrow, k, naive)


def test_min_p_keeps_only_the_likely(chain: Path) -> None:
    """D12 Under min_p no token of a round falls below the share of the best one."""
    params = SamplingParams(temperature=1.0, min_p=0.5)
    llm = LLM(chain, draft=RuleDrafter(constant(2, 5, 1)), num_speculative_tokens=3, **ENGINE)
    allowed = filtered(TARGET, params) > 0
    for output in sampled(llm, params, 100, min_p=0.5, max_tokens=12):
        text = [0, *output.token_ids]
        assert all(allowed[a, b] for a, b in pairwise(text))


@pytest.mark.parametrize("k", [0, 1, 2, 5])
@pytest.mark.parametrize("place", range(5))
def test_bad_phrase_never_appears(lab: Lab, k: int, place: int) -> None:
    """D13 A forbidden pair is kept out, whether both of its tokens are guesses or only the second is."""
    params = SamplingParams(max_tokens=30)
    prompts = (random_prompt(seed, 9) for seed in range(100))
    prompt = next(prompt for prompt in prompts if len(set(lab.baseline(prompt, params).token_ids[:8])) == 8)
    free = lab.teach(prompt, params).token_ids
    phrase = free[place : place + 2]
    naive_script = [*prompt, *free]

    def naive(known: list[int], _: int, depth: int) -> TokenTree:
        return TokenTree.chain(naive_script[len(known) : len(known) + depth])

    output = lab.check(prompt, SamplingParams(max_tokens=30, bad_words=[phrase]), k, naive)
    assert tuple(phrase) not in pairwise(output.token_ids)
    assert output.token_ids[: place + 1] == free[: place + 1]
