"""top_candidates, native and in torch, against numpy and against coupled_argmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.noise import gumbel_noise
from paceline.kernels import ops, reference
from paceline.kernels.cpu import bindings

IMPLEMENTATIONS = [bindings.top_candidates, reference.top_candidates, ops.top_candidates]
HEATS = [0.0, 1.0, 0.7, 1.3, 1e-3, 100.0, 2.0, 0.5]


def scaled(logits: np.ndarray, heat: float, seed: int, position: int) -> np.ndarray:
    if not heat:
        return logits
    with np.errstate(over="ignore"):
        return logits / np.float32(heat) + gumbel_noise(seed, position, len(logits))


def log_softmax(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64) - values.max()
    return wide - np.log(np.exp(wide).sum())


@pytest.mark.parametrize("top_candidates", IMPLEMENTATIONS)
@pytest.mark.parametrize("vocab", [1, 5, 15, 16, 17, 1000, 49_152])
@pytest.mark.parametrize("count", [1, 4, 40])
def test_agrees_with_numpy(top_candidates, vocab: int, count: int) -> None:
    generator = np.random.default_rng(vocab)
    spread = generator.uniform(0.1, 30, (len(HEATS), 1))
    logits = (generator.standard_normal((len(HEATS), vocab)) * spread).astype(np.float32)
    logits[3, generator.integers(0, vocab, vocab // 2)] = -np.inf
    logits[3, 0] = 0.0
    seeds, positions = list(range(len(HEATS))), [3 * i for i in range(len(HEATS))]
    tokens, scores = top_candidates(torch.from_numpy(logits), HEATS, seeds, positions, count)
    assert (tokens.dtype, scores.dtype) == (torch.int32, torch.float32)
    assert tokens.shape == scores.shape == (len(HEATS), count)
    for i, heat in enumerate(HEATS):
        values = scaled(logits[i], heat, seeds[i], positions[i])
        best = [t for t in np.argsort(-values, kind="stable")[:count].tolist() if values[t] > -np.inf]
        missing = count - len(best)
        assert tokens[i].tolist() == best + [-1] * missing
        want = log_softmax(values[best]) if heat else log_softmax(values)[best]
        np.testing.assert_allclose(scores[i, : len(best)], want, rtol=1e-5, atol=2e-5)
        assert scores[i, len(best) :].tolist() == [-np.inf] * missing


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_first_candidate_is_the_token_the_rule_chooses(data: st.DataObject) -> None:
    vocab = data.draw(st.integers(1, 3000))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = generator.standard_normal((3, vocab)) * data.draw(st.sampled_from([0.0, 0.1, 1.0, 8.0, 1e4]))
    # Multiples of a quarter tie often.
    rows = torch.from_numpy((np.round(logits * 4) / 4).astype(np.float32))
    heats = [data.draw(st.sampled_from([0.0, 0.3, 1.0, 5.0, 1e-7])) for _ in range(3)]
    seeds = [data.draw(st.integers(-(2**63), 2**64 - 1)) for _ in range(3)]
    count = data.draw(st.integers(1, 20))
    native = bindings.top_candidates(rows, heats, seeds, [7, 8, 9], count)
    torch_one = reference.top_candidates(rows, heats, seeds, [7, 8, 9], count)
    for tokens, _ in (native, torch_one):
        assert tokens[:, 0].tolist() == reference.coupled_argmax(rows, heats, seeds, [7, 8, 9])[0].tolist()
    assert native[0].tolist() == torch_one[0].tolist()
    torch.testing.assert_close(native[1], torch_one[1], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("order", ["rising", "falling", "flat"])
def test_the_order_of_the_logits_does_not_matter(order: str) -> None:
    line = {"rising": torch.linspace(-9, 9, 20_011), "falling": torch.linspace(9, -9, 20_011)}
    logits = line.get(order, torch.zeros(20_011))[None]
    for heat in (0.0, 0.01, 1.0):
        got = bindings.top_candidates(logits, [heat], [3], [4], 33)
        want = reference.top_candidates(logits, [heat], [3], [4], 33)
        assert got[0].tolist() == want[0].tolist()


@pytest.mark.parametrize("top_candidates", IMPLEMENTATIONS)
def test_ties_go_to_the_lower_id(top_candidates) -> None:
    logits = torch.zeros(1, 100)
    logits[:, [33, 17, 99]] = 5.0
    assert top_candidates(logits, [0.0], [0], [0], 5)[0].tolist() == [[17, 33, 99, 0, 1]]


@pytest.mark.parametrize("top_candidates", IMPLEMENTATIONS)
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_broken_rows_hold_no_candidate_and_masks_are_skipped(top_candidates, heat: float) -> None:
    logits = torch.randn(5, 50)
    logits[0, 49] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    logits[3, :48] = float("-inf")
    tokens, scores = top_candidates(logits, [heat] * 5, [0] * 5, [0] * 5, 3)
    assert tokens[:3].tolist() == [[-1] * 3] * 3
    assert scores[:3].tolist() == [[float("-inf")] * 3] * 3
    assert sorted(tokens[3].tolist()) == [-1, 48, 49]
    assert scores[3].isfinite().tolist() == [True, True, False]
    assert scores[4].isfinite().all()


@pytest.mark.parametrize("top_candidates", IMPLEMENTATIONS)
def test_quotients_that_overflow_tie(top_candidates) -> None:
    logits = torch.tensor([[3.0, 1.0, 5.0, -2.0]])
    tokens, scores = top_candidates(logits, [1e-40], [0], [0], 4)
    assert tokens.tolist() == [[0, 1, 2, -1]]
    torch.testing.assert_close(scores[0, :3].exp(), torch.full((3,), 1 / 3))


@pytest.mark.parametrize("top_candidates", IMPLEMENTATIONS)
@pytest.mark.parametrize("part", [1, 15, 16, 700])
def test_places_of_a_part_of_the_vocabulary(top_candidates, part: int) -> None:
    """Noise and result are those of the whole vocabulary in which all other tokens are masked."""
    generator = torch.Generator().manual_seed(part)
    ids = torch.randperm(49_152, generator=generator)[:part].sort().values
    logits = torch.randn(len(HEATS), part, generator=generator) * 4
    logits[1, part // 2 :] = float("-inf")
    whole = torch.full((len(HEATS), 49_152), float("-inf"))
    whole[:, ids] = logits
    seeds, positions = list(range(len(HEATS))), [3 * i for i in range(len(HEATS))]
    tokens, scores = top_candidates(logits, HEATS, seeds, positions, 5, ids)
    want, want_scores = top_candidates(whole, HEATS, seeds, positions, 5)
    assert tokens.tolist() == want.tolist()
    torch.testing.assert_close(scores, want_scores, rtol=1e-5, atol=1e-5)


def test_rows_may_be_a_view_and_of_any_float_type() -> None:
    wide = torch.randn(6, 200).bfloat16()
    tokens, _ = ops.top_candidates(wide[::2, 10:150], [0.0] * 3, [0] * 3, [0] * 3, 2)
    assert (
        tokens[:, 0].tolist()
        == ops.coupled_argmax(wide[::2, 10:150], [0.0] * 3, [0] * 3, [0] * 3)[0].tolist()
    )


def test_no_rows_give_no_candidates() -> None:
    for top_candidates in IMPLEMENTATIONS:
        assert top_candidates(torch.zeros(0, 7), [], [], [], 4)[0].shape == (0, 4)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        ops.top_candidates(torch.zeros(1, 4), [0.0], [0], [0], 0)
    with pytest.raises(ValueError, match="2 rows"):
        ops.top_candidates(torch.zeros(2, 4), [0.0], [0], [0], 1)
    with pytest.raises(ValueError, match="token ids"):
        ops.top_candidates(torch.zeros(1, 4), [0.0], [0], [0], 1, torch.arange(5))
