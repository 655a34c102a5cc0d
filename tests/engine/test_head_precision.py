"""In which precision a head runs that nobody chose one for."""

from __future__ import annotations

import pytest

from paceline.config import load_config
from paceline.engine import head_setup
from paceline.engine.head_setup import head_precision
from paceline.engine.model_setup import torch_dtype
from paceline.errors import KernelError


@pytest.mark.parametrize(
    ("dtype", "draft_dtype", "device", "expected"),
    [
        ("bfloat16", "auto", "cpu", "int8"),
        ("int8", "auto", "cpu", "int8"),
        ("float32", "auto", "cpu", "float32"),
        ("bfloat16", "bfloat16", "cpu", "bfloat16"),
        ("float32", "int8", "cpu", "int8"),
        ("bfloat16", "auto", "cuda", "bfloat16"),
    ],
)
def test_eight_bits_take_the_place_of_sixteen(
    monkeypatch: pytest.MonkeyPatch, dtype: str, draft_dtype: str, device: str, expected: str
) -> None:
    monkeypatch.setattr(head_setup, "library", lambda: None)
    config = load_config(options={"dtype": dtype, "draft_dtype": draft_dtype})
    assert head_precision(config, device) == expected


def test_not_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise KernelError("no compiler.")

    monkeypatch.setattr(head_setup, "library", missing)
    config = load_config(options={"dtype": "bfloat16"})
    assert head_precision(config, "cpu") == "bfloat16"


def test_where_there_are_none_eight_bits_are_refused() -> None:
    with pytest.raises(KernelError, match="int8 weights need a CPU: choose draft_dtype = bfloat16"):
        torch_dtype("int8", "draft_dtype")
