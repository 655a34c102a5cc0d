"""Outputs of the past on disk: arrays of numbers in a NumPy archive, never code."""

from __future__ import annotations

import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib.npyio import NpzFile

from paceline.core.suffix_cache import SuffixCache
from paceline.errors import ConfigError

VERSION = 1
_ALL_AT_ONCE = 2**62
_UNREADABLE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, MemoryError)
"""RuntimeError: parts that are encrypted, or packed in a way that is not known."""
_PATIENCE_S = 30.0
"""Others hold the file for as long as reading and writing takes."""


@dataclass(slots=True)
class SuffixFile:
    """Engines may share one: each adds its own outputs to what the others have kept meanwhile.

    sharing: as `speculation.suffix_cache`; a file is for one way only, so that what was kept per tenant is
    never shared.  vocabulary: fingerprint of the tokenizer, whose ids the texts are.

    Raises ConfigError where it could not be written.
    """

    path: Path
    sharing: str
    vocabulary: str
    vocab_size: int
    _num_read: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not self.path.parent.is_dir():
            raise ConfigError(
                f"speculation.suffix_cache_file is {self.path}, but there is no folder {self.path.parent}: "
                "make it, or name another file."
            )
        try:
            with self._new():
                pass
        except OSError as error:
            raise ConfigError(
                f"speculation.suffix_cache_file is {self.path}, but no file can be written in "
                f"{self.path.parent}: {error.strerror}. Allow it, or name another file."
            ) from None

    def read(self, cache: SuffixCache) -> None:
        """Adds the texts that were kept, if any were. Raises ConfigError for a file that is not of this
        engine's kind, or broken."""
        self._add_kept(cache)
        cache.catch_up(_ALL_AT_ONCE)
        self._num_read = cache.num_added

    def write(self, cache: SuffixCache) -> None:
        """Replaces the file by one with what it holds now and, after that, what was added to the cache since
        it was read; readable by its owner only. Raises OSError, or ConfigError as `read`."""
        # An operating system's lock: it goes with the process, however that ends.
        from filelock import FileLock

        texts = list(cache.texts())
        new = texts[max(0, len(texts) - (cache.num_added - self._num_read)) :]
        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=_PATIENCE_S, mode=0o600)
        with lock:
            whole = cache.emptied()
            self._add_kept(whole)
            for text, tenant in new:
                whole.add(text, tenant)
            self._replace(whole)

    def _add_kept(self, cache: SuffixCache) -> None:
        try:
            with self.path.open("rb") as file:
                archive = np.load(file, allow_pickle=False)
                if not isinstance(archive, NpzFile):
                    raise ValueError("no archive")
                kept = {name: archive[name] for name in archive.files}
        except FileNotFoundError:
            return
        except _UNREADABLE as error:
            raise self._refusal(f"cannot be read ({type(error).__name__}: {error})") from None
        self._check(kept)
        starts = np.cumsum(kept["lengths"]) - kept["lengths"]
        for start, length, tenant in zip(starts, kept["lengths"], kept["tenants"], strict=True):
            cache.add(kept["tokens"][start : start + length], str(tenant))

    def _replace(self, cache: SuffixCache) -> None:
        """All at once: who reads meanwhile has the old file, and so has the next one after a crash."""
        texts = list(cache.texts())
        with self._new() as (file, name):
            np.savez(
                file,
                version=np.array(VERSION),
                sharing=np.array(self.sharing),
                vocabulary=np.array(self.vocabulary),
                tokens=np.concatenate([np.zeros(0, np.int32), *(text for text, _ in texts)]),
                lengths=np.array([len(text) for text, _ in texts], dtype=np.int64),
                tenants=np.array([tenant for _, tenant in texts], dtype="U64"),
            )
            file.flush()
            os.fsync(file.fileno())
            name.replace(self.path)

    @contextmanager
    def _new(self) -> Iterator[tuple[IO[bytes], Path]]:
        """A file beside this one, gone at the end unless it was given another name."""
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        try:
            with open(handle, "wb") as file:
                yield file, Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    def _check(self, kept: Mapping[str, np.ndarray[Any, Any]]) -> None:
        if str(kept.get("version", "")) != str(VERSION):
            raise self._refusal(f"is not of version {VERSION}")
        if str(kept.get("vocabulary", "")) != self.vocabulary:
            raise self._refusal("holds outputs in another vocabulary than the model's")
        if str(kept.get("sharing", "")) != self.sharing:
            raise self._refusal(f"was not kept with speculation.suffix_cache = {self.sharing}")
        tokens, lengths, tenants = (kept.get(name, np.zeros(0)) for name in ("tokens", "lengths", "tenants"))
        whole = tokens.dtype == np.int32 and lengths.dtype == np.int64 and tenants.dtype.kind == "U"
        fits = tokens.ndim == lengths.ndim == tenants.ndim == 1 and len(lengths) == len(tenants)
        if not (whole and fits) or (lengths < 0).any() or lengths.sum() != len(tokens):
            raise self._refusal("is broken: its parts do not fit together")
        if len(tokens) and not (tokens.min() >= 0 and tokens.max() < self.vocab_size):
            raise self._refusal("is broken: it holds tokens that the model does not have")

    def _refusal(self, problem: str) -> ConfigError:
        return ConfigError(
            f"speculation.suffix_cache_file: {self.path} {problem}: remove it, or name another file."
        )
