"""The tensors of one forward pass over many sequences and token trees at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """T new tokens of R sequences. All arrays are contiguous int32.

    What token i sees, in position order, is
    `tables[rows[i], :prefix_len[i]] ++ path_slots[path_start[i] : path_start[i] + path_len[i]]`:
    exactly `positions[i] + 1` slots, the last of which is `slots[i]`, its own. Entry j of that list is
    absolute position j, so a chunk of a prompt (path_len 0, own slots already in the table) and a node
    of a token tree (path = its ancestors inside the tree and itself) are the same thing to a kernel,
    and the reduction order of a token depends on its position alone.

    Invariant: every slot a token sees was written by an earlier pass, or belongs to a token of this pass.
    """

    tokens: IntArray  # [T] token ids
    positions: IntArray  # [T] absolute positions
    slots: IntArray  # [T] where each token's key and value are written
    rows: IntArray  # [T] row of `tables`
    prefix_len: IntArray  # [T]
    path_start: IntArray  # [T]
    path_len: IntArray  # [T]
    path_slots: IntArray  # [P]
    tables: IntArray  # [R, C] slot of every committed position; a row may be a view of a wider table
    logit_rows: IntArray  # [L] indices of the tokens whose logits are wanted, ascending

    def __len__(self) -> int:
        return len(self.tokens)
