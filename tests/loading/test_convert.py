"""The conversion cache: warm loads, damage, full disks and races."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from paceline.cache_dir import cache_dir
from paceline.errors import ModelError
from paceline.loading import convert, load
from paceline.loading.safetensors_writer import SafetensorsWriter, narrow
from tests.tiny_checkpoints import tiny_model, write_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tiny_model("llama"), tmp_path / "m.gguf")


def entries(cache: Path) -> list[Path]:
    return sorted((cache / "models").iterdir())


def test_a_second_load_only_maps_what_the_first_wrote(
    path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(str(path))
    monkeypatch.setattr(convert, "_convert", lambda *_: pytest.fail("converted again"))
    monkeypatch.delitem(sys.modules, "gguf", raising=False)
    second = load(str(path))
    assert "gguf" not in sys.modules
    assert second.info == first.info
    assert torch.equal(second.weights.embed, first.weights.embed)
    assert len(entries(private_cache)) == 1


def test_another_file_in_the_same_place_is_another_model(path: Path, private_cache: Path) -> None:
    load(str(path))
    write_gguf(tiny_model("qwen2"), path)
    assert load(str(path)).spec.family == "qwen2"
    assert len(entries(private_cache)) == 2


@pytest.mark.parametrize("name", [convert.WEIGHTS, convert.TOKENIZER, convert.INFO])
@pytest.mark.parametrize("damage", ["cut", "remove"])
def test_a_damaged_cache_is_made_again(path: Path, private_cache: Path, name: str, damage: str) -> None:
    load(str(path))
    broken = entries(private_cache)[0] / name
    broken.write_bytes(broken.read_bytes()[:-7]) if damage == "cut" else broken.unlink()
    assert load(str(path)).tokenizer.vocab_size == 320
    assert len(entries(private_cache)) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing_behind(
    path: Path, private_cache: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = SafetensorsWriter.add

    def add(self: SafetensorsWriter, name: str, tensor: torch.Tensor) -> None:
        if name == "layers.1.q":
            raise OSError(number, os.strerror(number))
        added(self, name, tensor)

    monkeypatch.setattr(SafetensorsWriter, "add", add)
    with pytest.raises(ModelError, match=r"disk is full: .*PACELINE_CACHE_DIR"):
        load(str(path))
    assert entries(private_cache) == []


def test_a_cache_that_cannot_be_written(
    path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (private_cache / "file").touch()
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(private_cache / "file"))
    with pytest.raises(ModelError, match=r"cannot write .*Not a directory.*PACELINE_CACHE_DIR"):
        load(str(path))


def test_an_interrupted_conversion_leaves_nothing_behind(
    path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SafetensorsWriter, "add", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load(str(path))
    assert entries(private_cache) == []


def test_what_killed_conversions_left_is_removed_after_a_day(path: Path, private_cache: Path) -> None:
    old, new = private_cache / "models" / ".old.x", private_cache / "models" / ".new.x"
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 90000,) * 2)
    load(str(path))
    assert not old.exists()
    assert new.exists()


def test_a_slower_process_uses_what_the_faster_one_made(
    path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = convert._convert

    def overtaken(source: Path, folder: Path, provenance: Any) -> None:
        ours(source, folder, provenance)
        final = folder.with_name(folder.name[1:].rpartition(".")[0])
        shutil.copytree(folder, final)

    monkeypatch.setattr(convert, "_convert", overtaken)
    assert load(str(path)).tokenizer.vocab_size == 320
    assert len(entries(private_cache)) == 1


def _load_in_child(path: str, ready: Any, results: Any) -> None:
    ready.wait()
    results.put(float(load(path).weights.embed.sum()))


def test_two_processes_at_once(path: Path, private_cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(2), context.Queue()
    children = [context.Process(target=_load_in_child, args=(str(path), ready, results)) for _ in range(2)]
    for child in children:
        child.start()
    sums = [results.get(timeout=120) for _ in children]
    for child in children:
        child.join()
        child.close()
    results.close()
    results.join_thread()
    assert sums[0] == sums[1] == float(load(str(path)).weights.embed.sum())
    assert len(entries(private_cache)) == 1


def test_a_spec_survives_the_cache_to_the_last_bit(path: Path, private_cache: Path) -> None:
    info = load(str(path)).info
    assert msgspec.json.decode(msgspec.json.encode(info), type=type(info)) == info
    stored = json.loads((entries(private_cache)[0] / convert.INFO).read_text())
    assert stored["info"]["spec"]["norm_eps"] == 1e-6


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", "~/x")
    assert cache_dir() == Path.home() / "x"
    monkeypatch.delenv("PACELINE_CACHE_DIR")
    assert cache_dir().name == "paceline"


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(1, 5), max_size=3),
            st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_the_writer_writes_what_safetensors_reads(
    tmp_path_factory: pytest.TempPathFactory, plan: list[tuple[list[int], torch.dtype, bool]]
) -> None:
    tensors = {
        f"t{i}": (torch.randn(shape) if rough else torch.randint(-8, 8, shape).float()).to(dtype)
        for i, (shape, dtype, rough) in enumerate(plan)
    }
    path = tmp_path_factory.mktemp("writer") / "x.safetensors"
    with SafetensorsWriter(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name].float(), tensor.float())


def test_narrowing_is_exact() -> None:
    assert narrow(torch.tensor([[1.0, 2.0**127]])).dtype == torch.bfloat16
    assert narrow(torch.tensor([[1.0, 1.0009765625]])).dtype == torch.float16
    assert narrow(torch.tensor([[1.0, 0.1]])).dtype == torch.float32
    assert narrow(torch.tensor([1.0, 2.0])).dtype == torch.float32
