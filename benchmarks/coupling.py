"""How much the Gumbel coupling of draft and target accepts, next to the optimum 1 - TV (arXiv 2408.07978).

    python benchmarks/coupling.py

Synthetic pairs of distributions over 200 tokens: a target with normal logits, a draft with added noise,
temperature 1. `top 2`: acceptance when the draft offers its two best tokens as siblings. `argmax`: what
offering the draft's most likely token accepts.
"""

from __future__ import annotations

import argparse

import numpy as np

from paceline.core.noise import gumbel_noise

VOCAB = 200


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def row(spread: float, error: float, pairs: int, draws: int) -> list[float]:
    """[1 - TV, coupled top 1, coupled top 2, argmax], each a mean over pairs and seeds."""
    rng = np.random.default_rng(0)
    sums = np.zeros(4)
    for pair in range(pairs):
        target = rng.normal(scale=spread, size=VOCAB)
        draft = target + rng.normal(scale=error, size=VOCAB)
        overlap = np.minimum(softmax(target), softmax(draft)).sum()
        top1 = top2 = argmax = 0
        for seed in range(draws):
            noise = gumbel_noise(pair * draws + seed, 0, VOCAB)
            token = int(np.argmax(target + noise))
            offered = np.argsort(-(draft + noise))[:2]
            top1 += token == offered[0]
            top2 += token in offered
            argmax += token == int(np.argmax(draft))
        sums += [overlap, top1 / draws, top2 / draws, argmax / draws]
    return list(sums / pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--draws", type=int, default=200)
    args = parser.parse_args()
    print("| target | draft error | 1 - TV | coupled top 1 | coupled top 2 | argmax |")
    print("|---|---|---|---|---|---|")
    for name, spread in (("peaked", 4.0), ("medium", 2.0), ("flat", 1.0)):
        for error in (0.25, 0.5, 1.0):
            cells = " | ".join(f"{value:.3f}" for value in row(spread, error, args.pairs, args.draws))
            print(f"| {name} (spread {spread:g}) | {error:g} | {cells} |")


if __name__ == "__main__":
    main()
