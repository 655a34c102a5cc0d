"""The protocol between two ranks in one process: rank 1 first, with rank 0's words already there."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.triton.all_reduce import all_reduce_kernel

MOST = 700


@pytest.mark.parametrize("count", [1, 512, 700])
def test_two_ranks(count: int) -> None:
    parts = [torch.randn(count) for _ in range(2)]
    words = [torch.zeros(2 * 2 * MOST, dtype=torch.int64) for _ in range(2)]
    peers = torch.tensor([w.data_ptr() for w in words])
    calls = [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
    for call in range(1, 4):
        parts = [part + call for part in parts]
        half = words[1].view(2, 2, MOST)[call % 2]
        expected = (call << 32) | (parts[0].view(torch.int32).long() & 0xFFFFFFFF)
        half[0, :count] = expected
        totals = [torch.empty(count) for _ in range(2)]
        for rank in (1, 0):
            grid = (-(-count // 512),)
            all_reduce_kernel[grid](
                *(parts[rank], totals[rank], words[rank], peers, calls[rank], count, MOST, rank),
                RANKS=2,
                BLOCK=512,
            )
            calls[rank] += 1
            # What rank 0 sends is what was put there for it.
            assert torch.equal(half[0, :count], expected)
        assert torch.equal(totals[0], parts[0] + parts[1])
        assert torch.equal(totals[1], totals[0])
