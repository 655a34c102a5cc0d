"""The sampling rule against exact probabilities, and what the coupling of draft and target accepts."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare

from paceline.core.params import SamplingParams
from paceline.core.sampling import Unsampleable, choose, logprobs_of, processed
from paceline.core.token_tree import ROOT, TokenTree

VOCAB = 8
LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -0.5, 1.5, -1.0, 0.2], dtype=np.float32)
Floats = NDArray[np.float64]


def softmax(logits: Floats) -> Floats:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def exact(logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float) -> Floats:
    """The filters as their papers state them, on a sorted list of probabilities, one token at a time."""
    probs = softmax(logits / temperature)
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    if top_k:
        order = order[:top_k]
    kept, mass, total = [], 0.0, sum(probs[token] for token in order)
    for token in order:
        if mass / total >= top_p:
            break
        kept.append(token)
        mass += probs[token]
    kept = [token for token in kept if probs[token] >= min_p * probs[order[0]]]
    result = np.zeros(len(probs))
    result[kept] = probs[kept] / probs[kept].sum()
    return result


FILTERS = [
    {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for temperature, top_k, top_p, min_p in itertools.product((0.7, 1.0, 1.6), (0, 3), (1.0, 0.8), (0.0, 0.2))
]


def assert_follows(counts: NDArray[np.int64], probs: Floats) -> None:
    assert counts[probs == 0].sum() == 0, "a token outside the filter was chosen"
    expected = probs * counts.sum()
    # The statistic is only chi-square distributed where cells are not nearly empty: those are pooled.
    large = expected >= 5
    seen, wanted = [*counts[large], counts[~large].sum()], [*expected[large], expected[~large].sum()]
    if wanted[-1] < 5:
        seen[-2:], wanted[-2:] = [sum(seen[-2:])], [sum(wanted[-2:])]
    assert chisquare(seen, wanted).pvalue > 1e-4


@pytest.mark.parametrize("filters", FILTERS)
def test_chosen_tokens_follow_the_filtered_distribution(filters: dict[str, float]) -> None:
    counts = np.zeros(VOCAB, dtype=np.int64)
    for seed in range(4000):
        params = SamplingParams(seed=seed, **filters).resolved()  # type: ignore[arg-type]
        counts[choose(LOGITS, params, [1, 2, 3], 3, ())] += 1
    assert_follows(counts, exact(LOGITS.astype(np.float64), **filters))  # type: ignore[arg-type]


def test_chosen_tokens_follow_the_distribution_along_positions() -> None:
    params = SamplingParams(seed=7, temperature=1.0).resolved()
    counts = np.zeros(VOCAB, dtype=np.int64)
    for position in range(4000):
        counts[choose(LOGITS, params, [0] * position, 0, ())] += 1
    assert_follows(counts, softmax(LOGITS.astype(np.float64)))


def toy_logits(prefix: list[int], salt: int) -> NDArray[np.float32]:
    return _toy_logits(tuple(prefix), salt)


@cache
def _toy_logits(prefix: tuple[int, ...], salt: int) -> NDArray[np.float32]:
    rng = np.random.default_rng([salt, *prefix])
    return rng.normal(scale=1.5, size=VOCAB).astype(np.float32)


def draft_tree(kind: str, params: SamplingParams, prompt: list[int]) -> TokenTree:
    """Guesses two deep from a draft whose logits differ from the target's."""
    tree = TokenTree()
    if kind == "none":
        return tree
    if kind == "fixed siblings":
        for token in (0, 1, 2):
            tree.add(tree.add(ROOT, token), token)
        return tree
    salt = {"same": 1, "near": 2, "far": 3}[kind]
    mixed = 0.7 if kind == "near" else 0.0

    def guess(prefix: list[int]) -> int:
        logits = mixed * toy_logits(prefix, 1) + (1 - mixed) * toy_logits(prefix, salt)
        return choose(logits.astype(np.float32), params, prefix, len(prompt), ())

    first = guess(prompt)
    tree.add(tree.add(ROOT, first), guess([*prompt, first]))
    return tree


@pytest.mark.parametrize("kind", ["none", "same", "near", "far", "fixed siblings"])
@pytest.mark.parametrize("filters", FILTERS)
def test_joint_distribution_of_two_tokens_is_the_targets(kind: str, filters: dict[str, float]) -> None:
    prompt = [3, 1]
    counts = np.zeros((VOCAB, VOCAB), dtype=np.int64)
    for seed in range(800):
        params = SamplingParams(seed=seed, **filters).resolved()  # type: ignore[arg-type]

        def target(prefix: list[int], params: SamplingParams = params) -> int:
            return choose(toy_logits(prefix, 1), params, prefix, len(prompt), ())

        tree = draft_tree(kind, params, prompt)

        def after(node: int, tree: TokenTree = tree) -> int:
            return target(prompt + [tree.tokens[other] for other in tree.path(node)])

        _, tokens = tree.walk(after)
        plain = [target(prompt)]
        while len(plain) < len(tokens):
            plain.append(target(prompt + plain))
        assert tokens == plain, "the coupled output is not the target's own"
        if len(tokens) == 1:
            tokens.append(target(prompt + tokens))
        counts[tokens[0], tokens[1]] += 1
    first = exact(toy_logits(prompt, 1).astype(np.float64), **filters)  # type: ignore[arg-type]
    joint = np.stack(
        [
            first[a] * exact(toy_logits([*prompt, a], 1).astype(np.float64), **filters)  # type: ignore[arg-type]
            for a in range(VOCAB)
        ]
    )
    assert_follows(counts.ravel(), joint.ravel())


def coupled_acceptance(temperature: float, spread: float, error: float) -> tuple[float, float, float]:
    """(acceptance of the coupled guess, of the draft's argmax, 1 - TV) over 60 pairs of distributions."""
    rng = np.random.default_rng(11)
    coupled = greedy = bound = 0.0
    for pair in range(60):
        target = rng.normal(scale=spread, size=200).astype(np.float32)
        draft = (target + rng.normal(scale=error, size=200)).astype(np.float32)
        p, q = (softmax(x.astype(np.float64) / temperature) for x in (target, draft))
        bound += np.minimum(p, q).sum()
        for seed in range(40):
            params = SamplingParams(seed=1000 * pair + seed, temperature=temperature).resolved()
            token = choose(target, params, [], 0, ())
            coupled += (token == choose(draft, params, [], 0, ())) / 40
            greedy += (token == int(draft.argmax())) / 40
    return coupled / 60, greedy / 60, bound / 60


@pytest.mark.parametrize("spread", [4.0, 1.0])
def test_coupling_stays_near_the_optimum(spread: float) -> None:
    coupled, greedy, bound = coupled_acceptance(1.0, spread, 0.4)
    # 1/(1 + TV) lower-bounds the ratio to the optimum (arXiv 2408.07978): 2(1-TV)/(1+(1-TV)) never over it.
    assert coupled >= bound / (2 - bound) - 0.03
    assert coupled <= bound + 0.03
    assert coupled > greedy


def test_top_k_one_and_tiny_temperature_are_greedy() -> None:
    for seed in range(20):
        one = SamplingParams(temperature=1.0, top_k=1, seed=seed).resolved()
        cold = SamplingParams(temperature=1e-6, top_p=0.5, seed=seed).resolved()
        assert choose(LOGITS, one, [1], 1, ()) == choose(LOGITS, cold, [1], 1, ()) == 0


def test_ties_go_to_the_lowest_id() -> None:
    tied = np.array([0.0, 3.0, 3.0, 1.0], dtype=np.float32)
    assert choose(tied, SamplingParams().resolved(), [0], 1, ()) == 1
    assert choose(tied, SamplingParams(presence_penalty=0.5).resolved(), [0], 1, ()) == 1


def test_penalties_count_the_output_and_repetition_the_prompt_too() -> None:
    logits = np.array([1.0, 1.0, -1.0, 1.0], dtype=np.float32)
    params = SamplingParams(presence_penalty=0.25, frequency_penalty=0.5).resolved()
    scores = processed(logits, params, [0, 1, 1, 2], 1, ())
    assert scores.tolist() == [1.0, 1.0 - 1.0 - 0.25, -1.0 - 0.5 - 0.25, 1.0]
    repeated = processed(logits, SamplingParams(repetition_penalty=2.0).resolved(), [0, 2], 2, ())
    assert repeated.tolist() == [0.5, 1.0, -2.0, 1.0]


def test_bias_bad_words_and_min_tokens_mask() -> None:
    params = SamplingParams(logit_bias={3: 5.0}, bad_words=[[6], [1, 5]], min_tokens=2, stop_token_ids=[4])
    scores = processed(LOGITS, params.resolved(), [9, 1], 1, (2,))
    assert scores[3] == 5.0
    assert np.isneginf(scores[[2, 4, 5, 6]]).all()
    later = processed(LOGITS, params.resolved(), [9, 1, 0], 1, (2,))
    assert np.isfinite(later[[2, 4, 5]]).all()


def test_what_cannot_be_sampled_is_said() -> None:
    nan = np.array([1.0, np.nan], dtype=np.float32)
    with pytest.raises(Unsampleable, match="not finite"):
        choose(nan, SamplingParams().resolved(), [0], 1, ())
    everything = SamplingParams(bad_words=[[0], [1]]).resolved()
    with pytest.raises(Unsampleable, match="masked"):
        choose(np.zeros(2, dtype=np.float32), everything, [0], 1, ())


def test_logprobs_are_of_the_raw_distribution() -> None:
    entry = logprobs_of(LOGITS, 5, 3)
    expected = np.log(softmax(LOGITS.astype(np.float64)))
    assert entry.logprob == pytest.approx(expected[5], abs=1e-9)
    assert entry.rank == 2
    assert [token for token, _ in entry.top] == [0, 5, 1]


def test_large_vocabulary_top_p_equals_the_full_sort() -> None:
    rng = np.random.default_rng(3)
    for spread in (0.1, 1.0, 5.0):
        logits = rng.normal(scale=spread, size=5000).astype(np.float32)
        params = SamplingParams(temperature=1.0, top_p=0.9).resolved()
        kept = np.isfinite(processed(logits, params, [], 0, ()))
        assert (kept == (exact(logits.astype(np.float64), 1.0, 0, 0.9, 0.0) > 0)).all()
