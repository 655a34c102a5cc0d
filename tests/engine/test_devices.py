"""Whatever calls CUDA does so on its own device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.core.scheduler import Limits
from paceline.engine import machine, model_setup
from paceline.engine.device_groups import DeviceGroup
from paceline.engine.model_setup import ModelSetup
from paceline.errors import EngineError
from paceline.execution.devices import current
from paceline.execution.forward_batch import Segment
from paceline.execution.model_runner import ModelRunner
from paceline.execution.parallel import Place


@pytest.fixture
def made_current(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The CUDA devices that are current, the innermost last; no driver is asked."""
    stack: list[torch.device] = []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        stack.append(which)
        yield
        stack.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    return stack


def test_a_pass_runs_on_the_device_that_holds_the_cache(made_current: list[torch.device]) -> None:
    seen: list[list[torch.device]] = []
    decoder: Any = SimpleNamespace(forward=lambda *_: seen.append(list(made_current)))
    for name, expected in (("cuda:1", [torch.device("cuda:1")]), ("cpu", [])):
        kv: Any = SimpleNamespace(keys=SimpleNamespace(device=torch.device(name)))
        ModelRunner(decoder, kv, num_rows=1, context_length=8).forward([Segment(0, 0, [1], True)])
        assert seen.pop() == expected
    assert made_current == []


def test_a_device_by_name_will_do(made_current: list[torch.device]) -> None:
    with current("cuda:3"):
        assert made_current == [torch.device("cuda:3")]


def setup(places: tuple[Place, ...], device: str) -> ModelSetup:
    spec = SimpleNamespace(num_layers=1, num_kv_heads=1, head_dim=1, hidden_size=6)
    model: Any = SimpleNamespace(name="m", spec=spec)
    return ModelSetup(model, "float32", device, DeviceGroup(places, 1))


def test_what_is_captured_counts_as_memory() -> None:
    model = setup((), "cpu")
    assert model.kv_bytes_per_token == model.slot_bytes() == 8
    assert model.slot_bytes((0, 5, 9)) == 8 + 3 * 6 * 4


def test_memory_is_that_of_the_groups_own_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {None: 100, torch.device("cuda:1"): 50, torch.device("cuda:2"): 70}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (free[device], 1000))
    assert setup((), "cuda").free_bytes == 100
    assert setup((Place(device="cuda:2"),), "cuda").free_bytes == 70
    assert setup((Place(device="cuda:2"), Place(device="cuda:1")), "cuda").free_bytes == 50
    assert machine.free_memory("cuda:1") == 50


@pytest.mark.parametrize(("free_tokens", "slots"), [(10**9, 4096), (8000, 2000), (600, 512), (300, 300)])
def test_a_host_gives_no_more_memory_than_it_has(
    monkeypatch: pytest.MonkeyPatch, free_tokens: int, slots: int
) -> None:
    """Whatever an engine elsewhere asks for."""
    drafter = setup((), "cpu")
    monkeypatch.setattr(model_setup, "free_memory", lambda _: free_tokens * drafter.kv_bytes_per_token)
    assert drafter.affordable(Limits(4096, 4096, max_batch_tokens=512)).num_slots == slots
    greedy = Limits(4096, 2**31, max_batch_tokens=2**30)
    assert drafter.affordable(greedy).num_slots <= free_tokens


def test_a_host_without_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_setup, "free_memory", lambda _: 3)
    with pytest.raises(EngineError, match="no memory left"):
        setup((), "cpu").affordable(Limits(64, 64))
