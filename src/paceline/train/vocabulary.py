"""The draft vocabulary: the tokens that a head can say."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.train.store import FeatureStore, StoredSequence


@dataclass(frozen=True)
class DraftVocabulary:
    """ids: `[size]` int64 target ids, ascending. index: `[vocabulary]` int64, each target id's row or -1.
    covered: share of the training answers' tokens that it has."""

    ids: Tensor
    index: Tensor
    covered: float

    @property
    def members(self) -> Tensor:
        """`t2d`: `[vocabulary]` bool."""
        return self.index >= 0

    @property
    def offsets(self) -> Tensor:
        """`d2t`: what to add to a row to get its target id."""
        return self.ids - torch.arange(len(self.ids))


def draft_vocabulary(
    store: FeatureStore, sequences: list[StoredSequence], vocab_size: int, size: int
) -> DraftVocabulary:
    """The `size` most frequent tokens of the answers, then the lowest ids, which tokenizers give to the
    commonest pieces; the whole vocabulary if it has no more."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sequence in sequences:
        counts += np.bincount(store.answer(sequence), minlength=vocab_size)
    chosen = np.sort(np.argsort(-counts, kind="stable")[: min(size, vocab_size)])
    index = np.full(vocab_size, -1, dtype=np.int64)
    index[chosen] = np.arange(len(chosen))
    covered = float(counts[chosen].sum() / max(1, counts.sum()))
    return DraftVocabulary(torch.from_numpy(chosen), torch.from_numpy(index), covered)
