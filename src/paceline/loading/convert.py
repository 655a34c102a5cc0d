"""The conversion cache: a GGUF file is dequantised once and then memory-mapped."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from paceline.cache_dir import cache_dir
from paceline.errors import ModelError
from paceline.loading.info import ModelInfo, Provenance
from paceline.loading.safetensors_writer import SafetensorsWriter
from paceline.loading.tokenizer import Tokenizer

# Part of the key: raise it whenever what is written changes its meaning.
FORMAT = 1
WEIGHTS, TOKENIZER, INFO = "model.safetensors", "tokenizer.json", "info.json"

_STALE_SECONDS = 24 * 3600


class CachedModel(msgspec.Struct, frozen=True):
    """info.json. sizes: bytes of every other file, to notice a damaged cache."""

    info: ModelInfo
    sizes: dict[str, int]


def converted(path: Path, *, expected_sha256: str | None = None, source: str | None = None) -> Path:
    """The folder with the converted form of a GGUF file, made now if it does not exist yet.

    expected_sha256: refuse any other file. source: its name in the provenance.
    Safe when several processes convert at once: each writes a folder of its own and the first to finish
    puts it in place. Raises ModelError for an unreadable file, a full disk or an unwritable cache.
    """
    target = cache_dir() / "models" / f"{path.stem}-{_key(path)}"
    if read_info(target) is not None:
        return target
    digest = _sha256(path)
    if expected_sha256 is not None and digest != expected_sha256:
        raise ModelError(
            f"{path} is damaged: its sha256 is {digest}, not {expected_sha256}. Install it again."
        )
    with _explained(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target.parent)
        with _scratch(target) as scratch:
            _convert(path, scratch, Provenance("gguf", source or str(path), digest))
            _put_in_place(scratch, target)
    return target


def read_info(folder: Path) -> ModelInfo | None:
    """What a converted folder says about itself; None if it is absent, incomplete or damaged."""
    try:
        cached = msgspec.json.decode((folder / INFO).read_bytes(), type=CachedModel)
        whole = all((folder / name).stat().st_size == size for name, size in cached.sizes.items())
    except (OSError, msgspec.MsgspecError):
        return None
    return cached.info if whole else None


def _convert(path: Path, folder: Path, provenance: Provenance) -> None:
    from tqdm import tqdm

    from paceline.loading.gguf_file import GgufFile
    from paceline.loading.gguf_tokenizer import build_tokenizer, eos_ids, special_tokens
    from paceline.models.families import weight_shapes

    file = GgufFile(path)
    Tokenizer(build_tokenizer(file.metadata, str(path))).save(folder / TOKENIZER)
    shapes = weight_shapes(file.blueprint)
    quiet = not sys.stderr.isatty()
    with SafetensorsWriter(folder / WEIGHTS, shapes) as writer:
        for name, tensor in tqdm(
            file.weights(), f"converting {path.name}", len(shapes), disable=quiet, leave=False
        ):
            writer.add(name, tensor)
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    info = ModelInfo(
        spec=file.blueprint.spec,
        provenance=provenance,
        eos_token_ids=eos_ids(file.metadata),
        bos_token_id=bos,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        special_tokens=special_tokens(file.metadata),
    )
    sizes = {name: (folder / name).stat().st_size for name in (WEIGHTS, TOKENIZER)}
    (folder / INFO).write_bytes(msgspec.json.encode(CachedModel(info, sizes)))


def _put_in_place(scratch: Path, target: Path) -> None:
    try:
        scratch.rename(target)
    except OSError:
        if read_info(target) is not None:  # another process was faster
            return
        if not target.exists():
            raise
        # A damaged cache is in the way. Move it out in one step, so that no reader sees half of it.
        target.rename(scratch.with_name(scratch.name + ".old"))
        scratch.rename(target)
        shutil.rmtree(scratch.with_name(scratch.name + ".old"), ignore_errors=True)


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(
                f"the disk is full: the converted model does not fit into {folder}. Free some space or set "
                "PACELINE_CACHE_DIR to a folder on another disk."
            ) from error
        raise ModelError(
            f"cannot write the converted model to {folder}: {error.strerror or error}. Make the folder "
            "writable or set PACELINE_CACHE_DIR to another one."
        ) from error


def _remove_stale(folder: Path) -> None:
    """Remove what conversions that were killed have left."""
    for entry in folder.glob(".*"):
        with contextlib.suppress(OSError):
            if time.time() - entry.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(entry, ignore_errors=True)


def _key(path: Path) -> str:
    try:
        path = path.resolve(strict=True)
        status = os.stat(path)
    except OSError as error:
        raise ModelError(
            f"cannot read {path}: {error.strerror}. Check the path and its permissions."
        ) from error
    identity = f"{FORMAT}|{path}|{status.st_size}|{status.st_mtime_ns}"
    return hashlib.sha256(identity.encode()).hexdigest()[:16]


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(
            f"cannot read {path}: {error.strerror}. Check the path and its permissions."
        ) from error
