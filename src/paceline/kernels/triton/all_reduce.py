"""The sum of one small tensor per rank, in one launch: every rank writes to every other and adds what it got.

Has been compiled and interpreted, never run on hardware.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512


class OneShotAllReduce:
    """Sums float32 tensors of up to `most` elements over the ranks of a process group on one NVLink domain.

    Each element travels in a 64-bit word beside the number of the call (the LL protocol of NCCL; for small
    batches: SwiftSpec, arXiv 2506.11309, section 3.3), so that a word which carries the number carries the
    data too, and no barrier is needed. Words lie in two halves, used in turn: who writes a half again has
    everyone's words of the call between, which a rank sends only after it has read this half.

    Ranks must make the same calls in the same order, on one stream each. Every rank adds in rank order, so
    all get the same bits. A CUDA graph may record calls: their number is counted on the device. A rank that
    never comes leaves the others waiting.
    """

    def __init__(self, group: dist.ProcessGroup, most: int, device: torch.device) -> None:
        # Not public yet, and absent from builds without CUDA.
        from torch.distributed import _symmetric_memory as symmetric

        self._ranks, self._rank, self._most = group.size(), group.rank(), most
        words = symmetric.empty(2 * self._ranks * most, dtype=torch.int64, device=device).zero_()
        handle = symmetric.rendezvous(words, group)
        self._words = words
        self._peers = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
        self._calls = torch.zeros(1, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)
        dist.barrier(group)

    def __call__(self, part: Tensor) -> Tensor:
        """The sum, float32 of part's shape. Raises ValueError beyond `most` elements."""
        if part.numel() > self._most:
            raise ValueError(f"{part.numel()} elements are more than the {self._most} there is room for")
        part = part.float().contiguous()
        total = torch.empty_like(part)
        count = part.numel()
        if count:
            with torch.cuda.device_of(part):
                all_reduce_kernel[(triton.cdiv(count, _BLOCK),)](
                    *(part, total, self._words, self._peers, self._calls, count, self._most, self._rank),
                    RANKS=self._ranks,
                    BLOCK=_BLOCK,
                    enable_fp_fusion=True,
                )
        self._calls += 1
        return total


@triton.jit
def all_reduce_kernel(
    part_ptr,
    total_ptr,
    words_ptr,
    peers_ptr,
    calls_ptr,
    count,
    most,
    rank,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    # Never 0, which is what the words hold before the first call.
    number = (tl.load(calls_ptr) + 1).to(tl.int64)
    half = (number % 2) * RANKS * most
    bits = tl.load(part_ptr + at, inside, 0.0).to(tl.uint32, bitcast=True).to(tl.int64)
    word = (number << 32) | bits
    for peer in range(RANKS):
        theirs = tl.load(peers_ptr + peer).to(tl.pointer_type(tl.int64))
        tl.store(theirs + half + rank * most + at, word, inside, cache_modifier=".wt")
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in range(RANKS):
        mine = words_ptr + half + peer * most + at
        word = tl.load(mine, inside, number << 32, volatile=True)
        while tl.max(((word >> 32) != number).to(tl.int32), 0) > 0:
            word = tl.load(mine, inside, number << 32, volatile=True)
        total += (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
    tl.store(total_ptr + at, total, inside)
