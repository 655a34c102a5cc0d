"""The face of every draft head, whichever kernels run it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from paceline.kernels.batch import IntArray, TokenBatch
from paceline.kernels.kv_cache import KVCache
from paceline.models.head_spec import HeadSpec


class HeadDecoder(Protocol):
    """A head's forward pass over a `KVCache(spec.num_modules, slots, spec.num_kv_heads, spec.head_dim,
    kv_dtype)`; one for the first modules alone serves as long as no other is asked for. What it returns may
    live in buffers that the next call overwrites.

    target_ids: int64 `[draft_vocab]`, the target's id of each row of the logits; None = the same ids.
    """

    spec: HeadSpec
    target_ids: Tensor | None

    @property
    def kv_dtype(self) -> torch.dtype:
        """What its KV cache holds."""
        ...

    def fuse(self, features: Tensor) -> Tensor:
        """Features `[n, captured, target_hidden]` as what `forward` reads, `[n, hidden]` float32. Of the
        target's features only: the head's own output goes back as it is."""
        ...

    def forward(
        self, batch: TokenBatch, hidden: Tensor, kv: KVCache, module: int = 0
    ) -> tuple[Tensor, Tensor]:
        """One pass of one module, whose keys and values are layer `module` of the cache.

        hidden: `[T, hidden]` float32. Token i of the batch is the one at position `positions[i] + 1` and
        `hidden[i]` belongs to position `positions[i]`, which is also where the rope stands.

        Returns for the batch's `logit_rows` logits `[rows, draft_vocab]` and what the next draft step is fed,
        `[rows, hidden]`; both float32.
        """
        ...

    def chain(
        self,
        batch: TokenBatch,
        hidden: Tensor,
        kv: KVCache,
        *,
        slots: IntArray,
        temperatures: Sequence[float],
        seeds: Sequence[int],
        positions: Sequence[int],
        count: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A pass as `forward` (module 0), and then one guess after the other below each wanted row, each the
        best candidate of the one before, fed the state that came with it: on the native kernels a whole chain
        in one call. Step s runs module `s % num_modules`.

        slots: int32 `[rows, steps - 1]`, where the keys and values of the guesses go; the last guess is not
        computed, so it needs none. temperatures, seeds, positions: of each wanted row, as for
        `ops.top_candidates`; positions are those that the first guesses stand for.

        Returns the `count` best candidates of every step, int32 `[rows, steps, count]` in the target's ids,
        and their scores, float32, both on the CPU, as `ops.top_candidates` has them: the chain is
        `tokens[:, :, 0]`, the others are its siblings. And what each step put out, `[rows, steps, hidden]`,
        for who goes on below its candidates. A row whose logits are not finite has token -1 and goes on with
        token 0, for nothing.
        """
        ...
