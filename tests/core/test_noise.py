"""The noise is Gumbel, independent over seeds, positions and tokens, and its logarithm is accurate."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from paceline.core.noise import _log, gumbel_noise

VOCAB = 49_152
Uniform = np.ndarray


def uniform(noise: np.ndarray) -> np.ndarray:
    return np.exp(-np.exp(-noise.astype(np.float64)))


def chi_square_p(u: np.ndarray, bins: int = 256) -> float:
    counts = np.histogram(u, bins=bins, range=(0, 1))[0]
    return float(stats.chisquare(counts).pvalue)


def test_is_gumbel() -> None:
    noise = np.concatenate([gumbel_noise(7, position, VOCAB) for position in range(40)])
    assert noise.dtype == np.float32
    assert np.isfinite(noise).all()
    assert stats.kstest(noise[::7], "gumbel_r").pvalue > 1e-3
    assert abs(noise.mean() - np.euler_gamma) < 0.005
    assert abs(noise.var() - np.pi**2 / 6) < 0.02


@pytest.mark.parametrize("axis", ["tokens", "positions", "seeds", "large seeds"])
def test_uniform_along_every_axis(axis: str) -> None:
    n = 20_000
    ids = np.array([5], dtype=np.int64)
    if axis == "tokens":
        noise = gumbel_noise(1, 2, n)
    elif axis == "positions":
        noise = np.concatenate([gumbel_noise(1, position, ids) for position in range(n)])
    elif axis == "seeds":
        noise = np.concatenate([gumbel_noise(seed, 3, ids) for seed in range(n)])
    else:
        noise = np.concatenate([gumbel_noise((seed << 40) + 9, 3, ids) for seed in range(n)])
    assert chi_square_p(uniform(noise)) > 1e-4


def test_neighbours_are_independent() -> None:
    n = VOCAB
    base = uniform(gumbel_noise(1, 10, n)) - 0.5
    others = {
        "next position": uniform(gumbel_noise(1, 11, n)) - 0.5,
        "next seed": uniform(gumbel_noise(2, 10, n)) - 0.5,
        "swapped": uniform(gumbel_noise(10, 1, n)) - 0.5,
        "next token": np.roll(base, 1),
        "token 16 away": np.roll(base, 16),
        "token 4096 away": np.roll(base, 4096),
    }
    for name, other in others.items():
        correlation = float((base * other).mean() * 12)
        assert abs(correlation) < 5 / np.sqrt(n), name
    grid = np.histogram2d(base, others["next token"], bins=16, range=[[-0.5, 0.5]] * 2)[0]
    assert stats.chisquare(grid.ravel()).pvalue > 1e-4


def test_the_winner_is_uniform_when_logits_are_equal() -> None:
    winners = [int(np.argmax(gumbel_noise(seed, 0, 50))) for seed in range(10_000)]
    assert stats.chisquare(np.bincount(winners, minlength=50)).pvalue > 1e-4


def test_ids_select_the_same_values() -> None:
    ids = np.array([0, 17, 49_151, 3], dtype=np.int64)
    np.testing.assert_array_equal(gumbel_noise(3, 4, ids), gumbel_noise(3, 4, VOCAB)[ids])


def test_seeds_wrap_at_64_bits() -> None:
    np.testing.assert_array_equal(gumbel_noise(-1, 0, 9), gumbel_noise(2**64 - 1, 0, 9))


def test_log_is_accurate() -> None:
    x = np.concatenate(
        [
            np.geomspace(2.0**-33, 32, 200_001),
            1 - np.geomspace(2.0**-24, 0.5, 100_001),
            1 + np.geomspace(2.0**-23, 0.5, 100_001),
        ]
    ).astype(np.float32)
    x = x[x != 1]
    want = np.log(x.astype(np.float64))
    assert np.abs(_log(x) / want - 1).max() < 3e-7


def test_the_upper_tail_is_fine_grained() -> None:
    noise = np.concatenate([gumbel_noise(1, position, VOCAB) for position in range(64)])
    top = np.sort(noise)[-1000:]
    assert len(np.unique(top)) > 990
