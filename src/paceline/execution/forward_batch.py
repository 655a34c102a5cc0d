"""The only place where ids become tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.kernels.batch import IntArray, TokenBatch


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's part of a pass: known tokens at `start ..` and guesses below the last of them.

    The slots of the known tokens are in the row of the slot tables; each guess brings its own.
    wanted: whether the logits of the last known token and of every guess are computed, in that order.
    """

    row: int
    start: int
    tokens: Sequence[int]
    wanted: bool
    tree_tokens: Sequence[int] = ()
    tree_parents: Sequence[int] = ()
    tree_slots: Sequence[int] = ()


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
            starts, lengths = _paths(segment, path_slots)
            tokens[below], slots[below] = segment.tree_tokens, segment.tree_slots
            prefix_len[below], path_start[below], path_len[below] = end, starts, lengths
            positions[below] = path_len[below] + (end - 1)
        if segment.wanted:
            logit_rows.extend(range(at - 1, at + len(segment.tree_tokens)))
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


def _paths(segment: Segment, flat: list[int]) -> tuple[list[int], list[int]]:
    """Appends every guess's own path (ancestors and itself) to `flat`; returns starts and lengths."""
    paths: list[list[int]] = []
    starts, lengths = [], []
    for parent, slot in zip(segment.tree_parents, segment.tree_slots, strict=True):
        path = [*(paths[parent] if parent >= 0 else ()), slot]
        paths.append(path)
        starts.append(len(flat))
        lengths.append(len(path))
        flat.extend(path)
    return starts, lengths
