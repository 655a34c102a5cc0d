"""Rows are moved bit for bit, whatever they hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.execution.rows import joined, taken

BITS = torch.randint(-(2**15), 2**15, (6, 2, 8), dtype=torch.int16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_those_of_torch(dtype: torch.dtype) -> None:
    source = BITS.view(torch.bfloat16) if dtype == torch.bfloat16 else torch.randn(6, 2, 8)
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    rows = taken(source, np.array([4, 0, 4]))
    assert rows.dtype == dtype
    assert torch.equal(rows.view(bits), source[[4, 0, 4]].view(bits))
    columns = taken(source, (slice(None), [1]))
    assert torch.equal(columns.view(bits), source[:, [1]].view(bits))
    whole = joined([source[:2], source[2:3], source[3:]])
    assert torch.equal(whole.view(bits), source.view(bits))
    assert joined([source]) is source


def test_what_is_taken_is_a_copy() -> None:
    source = torch.zeros(3, 2)
    taken(source, np.array([1])).fill_(1)
    assert not source.any()
