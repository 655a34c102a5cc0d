"""Which of the target's tokens the rows of a head's logits stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.loading.heads.stored import StoredTensors

_INTEGERS = (torch.int64, torch.int32)


def target_ids(stored: StoredTensors, draft_vocab_size: int, vocab_size: int) -> Tensor | None:
    """int64 `[draft_vocab_size]`, or None where the head has the target's vocabulary.

    `d2t` holds offsets: row i stands for token `i + d2t[i]`. `t2d`, if it is there, says of every token
    whether it is among them. Raises ModelError if the tables contradict the config or each other.
    """
    where = f"{stored.folder}: d2t"
    if "d2t" not in stored.names:
        if draft_vocab_size != vocab_size:
            raise ModelError(
                f"{where} is missing: config.json says draft_vocab_size={draft_vocab_size} and the target "
                f"has {vocab_size} tokens, so the file must say which. Download the head again."
            )
        return None
    offsets = stored.read("d2t")
    if offsets.dtype not in _INTEGERS or offsets.shape != (draft_vocab_size,):
        raise ModelError(
            f"{where} is {str(offsets.dtype).removeprefix('torch.')} {list(offsets.shape)}, expected int64 "
            f"[{draft_vocab_size}] by draft_vocab_size in config.json. Correct one of the two."
        )
    ids = torch.arange(draft_vocab_size) + offsets.long()
    outside = int(((ids < 0) | (ids >= vocab_size)).sum())
    if outside or len(set(ids.tolist())) != len(ids):
        problem = f"{outside} of them outside the target's {vocab_size}" if outside else "some of them twice"
        raise ModelError(
            f"{where} names {len(ids)} tokens, {problem}. It must hold offsets (token = row + d2t[row]): if "
            "it holds ids, subtract the row numbers; else the head was made for another vocabulary."
        )
    _check_membership(stored, ids, vocab_size)
    return None if torch.equal(ids, torch.arange(vocab_size)) else ids


def _check_membership(stored: StoredTensors, ids: Tensor, vocab_size: int) -> None:
    if "t2d" not in stored.names:
        return
    member = stored.read("t2d").bool()
    if member.shape != (vocab_size,):
        raise ModelError(
            f"{stored.folder}: t2d is about {list(member.shape)} tokens, the target has {vocab_size}. The "
            "head was made for another vocabulary: choose one made for this target."
        )
    if not torch.equal(member.nonzero()[:, 0], ids.sort().values):
        raise ModelError(
            f"{stored.folder}: t2d and d2t name different tokens, so one of them is wrong. "
            "Download the head again."
        )
