"""Which implementation serves which device."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from paceline.kernels import ops, reference

from .trees import PASSES, make_layer, make_pass

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    saved = dict(ops._IMPLEMENTATIONS)
    yield
    ops._IMPLEMENTATIONS.clear()
    ops._IMPLEMENTATIONS.update(saved)


def test_a_registered_function_comes_before_the_specification() -> None:
    ops.register("cpu", SimpleNamespace(rms_norm=lambda x, _weight, _eps: x + 1))
    x = torch.zeros(2, 3)
    assert torch.equal(ops.rms_norm(x, torch.ones(3), 1e-5), x + 1)
    # What it lacks stays with the specification.
    total, normed = ops.add_rms_norm(x, x + 2, torch.ones(3), 1e-5)
    assert torch.equal(total, x + 2)
    torch.testing.assert_close(normed, torch.ones(2, 3))
    ops.register("cpu", None)
    assert torch.equal(ops.rms_norm(x, torch.ones(3), 1e-5), x)


def test_passes_that_a_device_takes_are_planned_as_trees() -> None:
    batch = make_pass(PASSES["mixed"])
    layer = make_layer(batch, 2, 1, 64)
    gathered = ops.plan_attention(batch, [0], CPU, separate=False)
    assert isinstance(gathered, list)
    ops.register("cpu", SimpleNamespace(takes_tree=lambda batch: len(batch) < 1000))
    tree = ops.plan_attention(batch, [0], CPU, separate=False, pad_slots_to=64)
    assert isinstance(tree, ops.TreePlan)
    assert isinstance(ops.plan_attention(batch, [0], CPU, separate=True), list)
    torch.testing.assert_close(
        ops.attention(*layer, tree, 0.1, 0), ops.attention(*layer, gathered, 0.1, 0), rtol=0, atol=1e-5
    )


def test_cuda_is_served_by_triton_where_it_is_installed() -> None:
    pytest.importorskip("triton", reason="Triton is not published for this system")
    found = ops.implementation("cuda")
    assert found.__name__ == "paceline.kernels.triton"
    assert all(hasattr(reference, name) for name in found.__all__ if name != "takes_tree")


def test_without_triton_the_specification_serves_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    ops._IMPLEMENTATIONS.pop("cuda", None)
    assert ops.implementation("cuda") is None


def test_a_cpu_never_imports_triton() -> None:
    script = (
        "import sys, torch, paceline\n"
        "from paceline.kernels import ops\n"
        "ops.rms_norm(torch.zeros(1, 4), torch.ones(4), 1e-5)\n"
        "ops.coupled_argmax(torch.zeros(1, 4), [0.0], [0], [0])\n"
        "assert 'paceline.kernels.triton' not in sys.modules\n"
        "assert 'triton' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
