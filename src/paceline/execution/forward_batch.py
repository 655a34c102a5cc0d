"""The only place where ids become tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from paceline.kernels.batch import IntArray, TokenBatch


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's part of a pass: known tokens at `start ..` and guesses below the last of them.

    The slots of the known tokens are in the row of the slot tables. tree_paths: for each guess the slots of
    its ancestors in the tree and its own; an ancestor was computed by an earlier pass or comes before it in
    this one. With no known tokens the guesses hang below position `start - 1`.
    wanted: whether the logits of the last known token, if any, and of every guess are computed, in that
    order.
    """

    row: int
    start: int
    tokens: Sequence[int]
    wanted: bool
    tree_tokens: Sequence[int] = ()
    tree_paths: Sequence[Sequence[int]] = ()


class SlotTables:
    """One row per running sequence: the slot of every committed position. `rows[r, p]` is int32."""

    def __init__(self, num_rows: int, context_length: int) -> None:
        self.rows: IntArray = np.zeros((num_rows, context_length), dtype=np.int32)

    def write(self, row: int, start: int, slots: Sequence[int]) -> None:
        self.rows[row, start : start + len(slots)] = slots


def build_batch(segments: Sequence[Segment], tables: SlotTables) -> TokenBatch:
    """The segments' tokens one after the other: a segment's known tokens, then its guesses."""
    size = sum(len(segment.tokens) + len(segment.tree_tokens) for segment in segments)
    columns = np.empty((7, size), dtype=np.int32)
    tokens, positions, slots, rows, prefix_len, path_start, path_len = columns
    path_slots: list[int] = []
    logit_rows: list[int] = []
    at = 0
    for segment in segments:
        known, end = len(segment.tokens), segment.start + len(segment.tokens)
        here = slice(at, at + known)
        tokens[here] = segment.tokens
        positions[here] = np.arange(segment.start, end, dtype=np.int32)
        slots[here] = tables.rows[segment.row, segment.start : end]
        prefix_len[here] = positions[here] + 1
        path_start[here] = path_len[here] = 0
        rows[at : at + known + len(segment.tree_tokens)] = segment.row
        at += known
        if segment.tree_tokens:
            below = slice(at, at + len(segment.tree_tokens))
            tokens[below], slots[below] = segment.tree_tokens, [path[-1] for path in segment.tree_paths]
            lengths = [len(path) for path in segment.tree_paths]
            prefix_len[below], path_len[below] = end, lengths
            path_start[below] = list(accumulate(lengths[:-1], initial=len(path_slots)))
            positions[below] = path_len[below] + (end - 1)
            for path in segment.tree_paths:
                path_slots.extend(path)
        if segment.wanted:
            logit_rows.extend(range(at - 1 if known else at, at + len(segment.tree_tokens)))
        at += len(segment.tree_tokens)
    return TokenBatch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        rows=rows,
        prefix_len=prefix_len,
        path_start=path_start,
        path_len=path_len,
        path_slots=np.asarray(path_slots, dtype=np.int32),
        tables=tables.rows,
        logit_rows=np.asarray(logit_rows, dtype=np.int32),
    )


def tree_paths(parents: Sequence[int], slots: Sequence[int]) -> list[tuple[int, ...]]:
    """`Segment.tree_paths` of a tree whose nodes all take part in the pass. parents: -1 = the root."""
    paths: list[tuple[int, ...]] = []
    for parent, slot in zip(parents, slots, strict=True):
        paths.append((*paths[parent], slot) if parent >= 0 else (slot,))
    return paths
