"""Outputs of the past on disk: arrays of numbers in a NumPy archive, never code."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.npyio import NpzFile

from paceline.core.suffix_cache import SuffixCache
from paceline.errors import ConfigError

VERSION = 1
_ALL_AT_ONCE = 2**62
_UNREADABLE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, MemoryError)
"""RuntimeError: parts that are encrypted, or packed in a way that is not known."""


@dataclass(frozen=True, slots=True)
class SuffixFile:
    """sharing: as `speculation.suffix_cache`; a file is for one way only, so that what was kept per tenant is
    never shared.  vocabulary: fingerprint of the tokenizer, whose ids the texts are.

    Raises ConfigError when it could not be written where it is to be.
    """

    path: Path
    sharing: str
    vocabulary: str
    vocab_size: int

    def __post_init__(self) -> None:
        if not self.path.parent.is_dir():
            raise ConfigError(
                f"speculation.suffix_cache_file is {self.path}, but there is no folder {self.path.parent}: "
                "make it, or name another file."
            )

    def read(self, cache: SuffixCache) -> None:
        """Adds the texts that were kept, if any were. Raises ConfigError for a file that is not of this
        engine's kind, or broken."""
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
            cache.catch_up(_ALL_AT_ONCE)

    def write(self, cache: SuffixCache) -> None:
        """Replaces the file as a whole, readable by its owner only. Raises OSError."""
        texts = list(cache.texts())
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                np.savez(
                    file,
                    version=np.array(VERSION),
                    sharing=np.array(self.sharing),
                    vocabulary=np.array(self.vocabulary),
                    tokens=np.concatenate([np.zeros(0, np.int32), *(text for text, _ in texts)]),
                    lengths=np.array([len(text) for text, _ in texts], dtype=np.int64),
                    tenants=np.array([tenant for _, tenant in texts], dtype="U64"),
                )
            new.replace(self.path)
        finally:
            new.unlink(missing_ok=True)

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
