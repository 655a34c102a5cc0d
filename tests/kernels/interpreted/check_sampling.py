from __future__ import annotations

import numpy as np
import pytest
import torch
import triton as compiler
import triton.language as tl

from paceline.core.noise import gumbel_noise, noise_keys
from paceline.kernels import reference, triton
from paceline.kernels.triton.sampling import gumbel

HEATS = [0.0, 1.0, 0.7, 1e-3, 100.0, 1e-40]
SEEDS = [0, 1, -5, 2**64 - 1, 7, 8]
POSITIONS = [0, 1, 2**31, 3, 131_000, 5]


@compiler.jit
def noise_kernel(keys_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, second = tl.load(keys_ptr).to(tl.uint32), tl.load(keys_ptr + 1).to(tl.uint32)
    tl.store(out_ptr + at, gumbel(at.to(tl.uint32), first, second))


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 0), (2**64 - 1, 7), (-5, 131_000)])
def test_noise_has_the_same_bits_as_in_numpy(seed: int, position: int) -> None:
    out = torch.empty(65_536)
    noise_kernel[(16,)](torch.tensor(noise_keys(seed, position)), out, BLOCK=4096)
    want = gumbel_noise(seed, position, len(out))
    np.testing.assert_array_equal(out.numpy().view(np.int32), want.view(np.int32))


@pytest.mark.parametrize("vocab", [1, 5, 1024, 2500])
@pytest.mark.parametrize("count", [1, 3, 33])
def test_candidates_and_the_token_chosen(vocab: int, count: int) -> None:
    logits = torch.randn(len(HEATS), vocab, generator=torch.Generator().manual_seed(vocab))
    logits = (logits * 12).round() / 4
    logits[2, 1::2] = float("-inf")
    arguments = logits, HEATS, SEEDS, POSITIONS
    tokens, finite = triton.coupled_argmax(*arguments)
    want_tokens, want_finite = reference.coupled_argmax(*arguments)
    assert (tokens.tolist(), finite.tolist()) == (want_tokens.tolist(), want_finite.tolist())
    tokens, scores = triton.top_candidates(*arguments, count)
    want, want_scores = reference.top_candidates(*arguments, count)
    assert (tokens.dtype, scores.dtype) == (torch.int32, torch.float32)
    assert tokens.tolist() == want.tolist()
    torch.testing.assert_close(scores, want_scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab", [5, 1024, 2500])
def test_candidates_of_a_part_of_the_vocabulary(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    ids = torch.randperm(50_000, generator=generator)[:vocab].sort().values
    logits = torch.randn(len(HEATS), vocab, generator=generator)
    logits[2, 1::2] = float("-inf")
    tokens, scores = triton.top_candidates(logits, HEATS, SEEDS, POSITIONS, 4, ids)
    want, want_scores = reference.top_candidates(logits, HEATS, SEEDS, POSITIONS, 4, ids)
    assert tokens.tolist() == want.tolist()
    torch.testing.assert_close(scores, want_scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_broken_rows(heat: float) -> None:
    logits = torch.randn(5, 1500)
    logits[0, 1400] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    logits[3, :1498] = float("-inf")
    arguments = logits, [heat] * 5, [0] * 5, [0] * 5
    assert triton.coupled_argmax(*arguments)[1].tolist() == [False, False, False, True, True]
    tokens, scores = triton.top_candidates(*arguments, 3)
    want, want_scores = reference.top_candidates(*arguments, 3)
    assert tokens.tolist() == want.tolist()
    torch.testing.assert_close(scores, want_scores, rtol=1e-5, atol=1e-5)


def test_no_rows_and_views() -> None:
    assert triton.top_candidates(torch.zeros(0, 7), [], [], [], 2)[0].shape == (0, 2)
    wide = torch.randn(6, 200)
    tokens, _ = triton.coupled_argmax(wide[::2, 10:150], [0.0] * 3, [0] * 3, [0] * 3)
    assert tokens.tolist() == wide[::2, 10:150].argmax(-1).tolist()
    tall = wide[:, :5].T
    tokens, _ = triton.coupled_argmax(tall, [0.0] * 5, [0] * 5, [0] * 5)
    assert tokens.tolist() == tall.argmax(-1).tolist()
