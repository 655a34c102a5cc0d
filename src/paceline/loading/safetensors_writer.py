"""Writing a safetensors file one tensor at a time, so that a whole model is never in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class SafetensorsWriter:
    """`with SafetensorsWriter(path, shapes) as writer: writer.add(name, tensor)` for every name in `shapes`.

    The header comes first in the file but is known last: its room is reserved and padded with spaces, as
    the format allows.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        widest = {
            name: {"dtype": "BF16", "shape": list(s), "data_offsets": [0, 0]} for name, s in shapes.items()
        }
        digits = 2 * len(str(sum(4 * int(np.prod(s)) for s in shapes.values())))
        self._room = -(-(len(json.dumps(widest)) + digits * len(shapes)) // 64) * 64 + 56
        self._entries: dict[str, dict[str, object]] = {}
        self._end = 0
        self._file: BinaryIO = path.open("wb")
        self._file.write(b"\0" * (8 + self._room))

    def add(self, name: str, tensor: Tensor) -> None:
        """Append one tensor in the smallest type that holds its values exactly."""
        assert tuple(tensor.shape) == tuple(self._shapes[name])
        stored = narrow(tensor).contiguous()
        data = stored.view(torch.uint8) if stored.dim() else stored.reshape(1).view(torch.uint8)
        self._file.write(data.numpy().data)
        self._entries[name] = {
            "dtype": _NAMES[stored.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._end, self._end + data.numel()],
        }
        self._end += data.numel()

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()

    def _finish(self) -> None:
        header = json.dumps(self._entries).encode()
        assert self._entries.keys() == self._shapes.keys()
        assert len(header) <= self._room
        self._file.seek(0)
        self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
        # The folder is renamed into place afterwards; after a power cut the name must not outlive the bytes.
        self._file.flush()
        os.fsync(self._file.fileno())


def narrow(tensor: Tensor) -> Tensor:
    """The same values in bfloat16 or float16 if a matrix fits there exactly, else in float32.

    Vectors stay float32: they are small, and a norm weight should not lose its type to chance.
    """
    if tensor.dtype in (torch.float16, torch.bfloat16):
        # Four-byte neighbours must stay aligned in the file.
        return tensor if tensor.dim() > 1 and tensor.numel() % 2 == 0 else tensor.float()
    tensor = tensor.float()
    if tensor.dim() < 2 or tensor.numel() % 2:
        return tensor
    for dtype in (torch.bfloat16, torch.float16):
        if _fits(tensor[:1], dtype) and _fits(tensor, dtype):
            return tensor.to(dtype)
    return tensor


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(tensor.to(dtype).float(), tensor)
