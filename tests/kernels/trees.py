"""Passes over random caches: contexts, trees and queries as the attention tests want them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.batch import TokenBatch

STAR = (-1,) * 7
CHAIN = tuple(range(-1, 11))
BUSHY = (-1, -1, 0, 0, 1, 2, 2, 4, 7, 3, 3)


@dataclass(frozen=True)
class Tree:
    """A tree below `context` committed tokens. parents[i] < i, or -1 below the last of them.

    queries: the nodes that are computed in this pass, the others having been computed in earlier ones.
    """

    context: int
    parents: Sequence[int] = (-1,)
    queries: Sequence[int] | None = None


@dataclass(frozen=True)
class Chunk:
    """`count` tokens of a prompt after `context` others."""

    context: int
    count: int


# One list per pass. A block of the Triton kernel is 64 positions, a stretch 256, a group of tokens 8.
PASSES: dict[str, list[Tree | Chunk]] = {
    "first token": [Chunk(0, 1)],
    "one node": [Tree(5)],
    "node without context": [Tree(0)],
    "star": [Tree(70, STAR)],
    "chain": [Tree(60, CHAIN)],
    "chain over a block's end": [Tree(250, CHAIN)],
    "bushy": [Tree(63, BUSHY)],
    "a few leaves of a larger tree": [Tree(130, BUSHY, (5, 8, 10)), Tree(64, CHAIN, (11,))],
    "prompt": [Chunk(0, 17)],
    "rest of a prompt": [Chunk(186, 11)],
    "mixed": [Chunk(3, 9), Tree(300, BUSHY), Tree(1), Chunk(256, 1), Tree(0, STAR)],
}
NUM_SLOTS = 8000


def make_pass(members: Sequence[Tree | Chunk], seed: int = 0, vocab: int = 33) -> TokenBatch:
    """A batch with the tokens of `members`, rows interleaved, over shuffled slots."""
    generator = np.random.default_rng(seed)
    free = iter(generator.permutation(NUM_SLOTS).astype(np.int32).tolist())
    width = max(m.context + (m.count if isinstance(m, Chunk) else 0) for m in members)
    tables = np.zeros((len(members) + 1, width), dtype=np.int32)
    seen: list[tuple[int, int, list[int]]] = []
    for row, member in enumerate(members, 1):
        prefix = member.context + (member.count if isinstance(member, Chunk) else 0)
        tables[row, :prefix] = [next(free) for _ in range(prefix)]
        if isinstance(member, Chunk):
            seen += [(row, member.context + i + 1, []) for i in range(member.count)]
            continue
        paths: list[list[int]] = []
        for parent in member.parents:
            paths.append([*(paths[parent] if parent >= 0 else []), next(free)])
        queries = range(len(paths)) if member.queries is None else member.queries
        seen += [(row, prefix, paths[i]) for i in queries]
    seen = [seen[i] for i in generator.permutation(len(seen))]
    rows, prefixes, paths = zip(*seen, strict=True)
    lengths = np.array([len(path) for path in paths], dtype=np.int32)
    prefix_len = np.array(prefixes, dtype=np.int32)
    return TokenBatch(
        tokens=generator.integers(0, vocab, len(seen)).astype(np.int32),
        positions=prefix_len + lengths - 1,
        slots=np.array([p[-1] if p else tables[r, n - 1] for r, n, p in seen], dtype=np.int32),
        rows=np.array(rows, dtype=np.int32),
        prefix_len=prefix_len,
        path_start=(np.cumsum(lengths) - lengths).astype(np.int32),
        path_len=lengths,
        path_slots=np.array([slot for path in paths for slot in path], dtype=np.int32),
        tables=tables,
        logit_rows=np.arange(len(seen), dtype=np.int32),
    )


def make_layer(
    batch: TokenBatch, heads: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values for one layer."""
    generator = torch.Generator().manual_seed(heads + dim)
    shapes = [(len(batch), heads, dim), (NUM_SLOTS, kv_heads, dim), (NUM_SLOTS, kv_heads, dim)]
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v
