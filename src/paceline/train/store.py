"""What the target computed over its own answers, on disk: the training data of a head.

A folder of flat files, each the concatenation of all sequences, read through memory maps:

    tokens.bin    int32    [tokens]                   prompt and answer
    features.bin  bfloat16 [tokens, captured, hidden]  residual at the entry of the captured layers
    finals.bin    bfloat16 [answer tokens, hidden]    last residual where an answer token is predicted
    lse.bin       float32  [answer tokens]            log of the sum of the exponentials of all logits there
    best.bin      int32    [answer tokens]            the target's likeliest token there
    sequences.jsonl        one line per sequence, written last: what it does not list does not exist
    meta.json              what the data was made of
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import ModelError

_INDEX = "sequences.jsonl"
_META = "meta.json"


@dataclass(frozen=True, slots=True)
class StoredSequence:
    """Where one sequence lies. start: of its tokens. answer_start: of its rows of finals, lse and best.

    prompt_length, length: tokens. source: line of the answers' file, from 0.
    """

    start: int
    length: int
    prompt_length: int
    answer_start: int
    category: str
    temperature: float
    source: int

    @property
    def answer_length(self) -> int:
        return self.length - self.prompt_length


@dataclass(frozen=True, slots=True)
class StoreMeta:
    """capture: capture indices (entry of that layer), without the last residual. answers: the file's name."""

    target: str
    fingerprint: str
    capture: tuple[int, ...]
    hidden_size: int
    dtype: str
    answers: str


@dataclass(frozen=True, slots=True)
class CapturedSequence:
    """One sequence's tensors, as described above."""

    tokens: Sequence[int]
    prompt_length: int
    category: str
    temperature: float
    source: int
    features: Tensor
    finals: Tensor
    lse: Tensor
    best: Tensor


def _kinds(meta: StoreMeta) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {
        "tokens": (torch.int32, ()),
        "features": (torch.bfloat16, (len(meta.capture), meta.hidden_size)),
        "finals": (torch.bfloat16, (meta.hidden_size,)),
        "lse": (torch.float32, ()),
        "best": (torch.int32, ()),
    }


def _row_bytes(kind: tuple[torch.dtype, tuple[int, ...]]) -> int:
    dtype, shape = kind
    return dtype.itemsize * int(np.prod(shape, dtype=np.int64))


class StoreWriter:
    """Appends sequences; a writer that was killed is continued from the last complete one.

    Raises ModelError if the folder holds data of another target, capture or answers' file.
    """

    def __init__(self, folder: Path, meta: StoreMeta) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        _check_same(folder, meta)
        self.meta = meta
        self.sequences = stored_sequences(folder)
        last = self.sequences[-1] if self.sequences else None
        self._tokens = last.start + last.length if last else 0
        self._answers = last.answer_start + last.answer_length if last else 0
        self._files: dict[str, BinaryIO] = {}
        for name, kind in _kinds(meta).items():
            rows = self._tokens if name in ("tokens", "features") else self._answers
            self._files[name] = _opened_at(folder / f"{name}.bin", rows * _row_bytes(kind))
        self._index: TextIO = (folder / _INDEX).open("w", encoding="utf-8")
        self._index.writelines(_line(sequence) for sequence in self.sequences)
        self._index.flush()

    def add(self, captured: Sequence[CapturedSequence]) -> None:
        """All of them or, after a crash, none."""
        lines = []
        for one in captured:
            tokens = torch.tensor(one.tokens, dtype=torch.int32)
            parts = {"tokens": tokens, "features": one.features, "finals": one.finals}
            parts |= {"lse": one.lse, "best": one.best.to(torch.int32)}
            for name, tensor in parts.items():
                self._files[name].write(tensor.contiguous().view(torch.uint8).numpy().data)
            sequence = StoredSequence(
                self._tokens,
                len(one.tokens),
                one.prompt_length,
                self._answers,
                one.category,
                one.temperature,
                one.source,
            )
            self._tokens += sequence.length
            self._answers += sequence.answer_length
            self.sequences.append(sequence)
            lines.append(_line(sequence))
        for file in self._files.values():
            file.flush()
        self._index.writelines(lines)
        self._index.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._index.close()


class FeatureStore:
    """The data for reading. All tensors are views of memory maps: copy what is kept.

    Raises ModelError if the folder holds no captured features or they are damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta = _read_meta(folder)
        if self.meta is None:
            raise ModelError(f"{folder} holds no captured features: run the capture stage into it first.")
        self.sequences = stored_sequences(folder)
        if not self.sequences:
            raise ModelError(f"{folder} lists no captured sequence: run the capture stage into it first.")
        last = self.sequences[-1]
        rows = {"tokens": last.start + last.length, "finals": last.answer_start + last.answer_length}
        kinds = _kinds(self.meta)
        self.tokens = _mapped(folder, "tokens", kinds, rows["tokens"])
        self.features = _mapped(folder, "features", kinds, rows["tokens"])
        self.finals = _mapped(folder, "finals", kinds, rows["finals"])
        self.lse = _mapped(folder, "lse", kinds, rows["finals"])
        self.best = _mapped(folder, "best", kinds, rows["finals"])

    def answer(self, sequence: StoredSequence) -> NDArray[np.int32]:
        """The answer's token ids."""
        start = sequence.start + sequence.prompt_length
        tokens: NDArray[np.int32] = self.tokens[start : sequence.start + sequence.length].numpy()
        return tokens

    def describe(self) -> Mapping[str, Any]:
        """For the trained head's provenance."""
        assert self.meta is not None
        return {
            **asdict(self.meta),
            "sequences": len(self.sequences),
            "tokens": len(self.tokens),
            "answer_tokens": len(self.finals),
        }


def _check_same(folder: Path, meta: StoreMeta) -> None:
    found = _read_meta(folder)
    if found is None:
        text = json.dumps(asdict(meta), indent=1)
        (folder / _META).write_text(text, encoding="utf-8")
    elif found != meta:
        differing = [
            f"{name} {getattr(found, name)!r} instead of {getattr(meta, name)!r}"
            for name in asdict(meta)
            if getattr(found, name) != getattr(meta, name)
        ]
        raise ModelError(
            f"{folder} holds captured features of something else ({'; '.join(differing)}): "
            "give another folder, or delete this one."
        )


def _read_meta(folder: Path) -> StoreMeta | None:
    try:
        return msgspec.json.decode((folder / _META).read_bytes(), type=StoreMeta)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{folder / _META} is damaged ({error}): delete the folder.") from None


def stored_sequences(folder: Path) -> list[StoredSequence]:
    """What the folder has. A torn last line belongs to sequences that were never finished."""
    try:
        lines = (folder / _INDEX).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    return [msgspec.json.decode(line, type=StoredSequence) for line in lines]


def _line(sequence: StoredSequence) -> str:
    return json.dumps(asdict(sequence)) + "\n"


def _opened_at(path: Path, size: int) -> BinaryIO:
    path.touch()
    if path.stat().st_size < size:
        raise ModelError(f"{path} is shorter than its index says: delete the folder and capture again.")
    os.truncate(path, size)
    return path.open("ab")


def _mapped(
    folder: Path, name: str, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], rows: int
) -> Tensor:
    dtype, shape = kinds[name]
    path = folder / f"{name}.bin"
    size = rows * _row_bytes(kinds[name])
    if not path.exists() or path.stat().st_size < size:
        raise ModelError(f"{path} is shorter than its index says: delete the folder and capture again.")
    # Mapped copy on write: torch has no read-only tensors, and nobody writes.
    raw = np.memmap(path, dtype=np.uint8, mode="c", shape=(size,))
    return torch.from_numpy(raw).view(dtype).view(rows, *shape)
