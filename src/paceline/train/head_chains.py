"""Greedy chains of any head over a known answer: all rows of a sequence in one pass per step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.batch import IntArray, TokenBatch
from paceline.kernels.kv_cache import KVCache
from paceline.models.head import HeadDecoder


def chain_matches(head: HeadDecoder, features: Tensor, tokens: Tensor, first: int, depth: int) -> Tensor:
    """`[rows, depth]` bool: whether each guess of the head's chain is the text's token, true up to the first
    miss. features: `[T, captured, hidden]`, those that the head is to read at each position. tokens: `[T]`
    int64. Row i begins at position `first + i`, whose next token is known, and ends where the text does.
    """
    places, rows = len(tokens) - 1, np.arange(first, len(tokens) - 2, dtype=np.int32)
    spec = head.spec
    kv = KVCache(
        spec.num_modules,
        places + len(rows) * depth,
        spec.num_kv_heads,
        spec.head_dim,
        head.kv_dtype,
    )
    ids = torch.arange(spec.draft_vocab_size) if head.target_ids is None else head.target_ids.cpu()
    matches = torch.zeros(len(rows), depth, dtype=torch.bool)
    guesses = torch.empty(0, dtype=torch.int64)
    table = np.arange(places, dtype=np.int32)[None]
    batch, fed = _known(tokens[1:], table, rows), head.fuse(features[:places])
    for step in range(depth):
        if step:
            batch = _guessed(guesses, table, rows, step, depth)
        logits, fed = head.forward(batch, fed, kv, min(step, spec.num_modules - 1))
        fed = fed.clone()
        guesses = ids[logits.argmax(-1).cpu()]
        ahead = torch.from_numpy(rows + 2 + step).long()
        inside = ahead < len(tokens)
        matches[:, step] = inside & (guesses == tokens[ahead.clamp(max=len(tokens) - 1)])
    return matches.cumprod(1).bool()


def _known(next_tokens: Tensor, table: IntArray, rows: IntArray) -> TokenBatch:
    places = np.arange(len(next_tokens), dtype=np.int32)
    nothing = np.zeros_like(places)
    return TokenBatch(
        tokens=next_tokens.numpy().astype(np.int32),
        positions=places,
        slots=places,
        rows=nothing,
        prefix_len=places + 1,
        path_start=nothing,
        path_len=nothing,
        path_slots=np.zeros(0, dtype=np.int32),
        tables=table,
        logit_rows=rows,
    )


def _guessed(guesses: Tensor, table: IntArray, rows: IntArray, step: int, depth: int) -> TokenBatch:
    """Guess `step` of every row's chain; guess j of row i has a slot of its own behind the text's."""
    count = len(rows)
    own = table.shape[1] + np.arange(count * depth, dtype=np.int32).reshape(count, depth)[:, :step]
    return TokenBatch(
        tokens=guesses.numpy().astype(np.int32),
        positions=rows + np.int32(step),
        slots=np.ascontiguousarray(own[:, -1]),
        rows=np.zeros(count, dtype=np.int32),
        prefix_len=rows + np.int32(1),
        path_start=np.arange(0, count * step, step, dtype=np.int32),
        path_len=np.full(count, step, dtype=np.int32),
        path_slots=own.flatten(),
        tables=table,
        logit_rows=np.arange(count, dtype=np.int32),
    )
