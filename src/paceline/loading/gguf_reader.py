"""The `gguf` package's reader, with quick arrays and errors that name the tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from paceline.errors import ModelError


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Map a GGUF file and read its header. Raises ModelError if it is missing, truncated or damaged."""
    try:
        return _Reader(path)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except (ValueError, LookupError, OverflowError, TypeError) as error:
        raise ModelError(
            f"cannot read {path} as a GGUF file ({error}): it is truncated or damaged. Download it again."
        ) from error
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}. Check that it exists and is readable.") from error


def metadata_of(reader: gguf.GGUFReader) -> dict[str, Any]:
    """Every key and its value; numbers stored as float32 as the decimals that the authors wrote."""
    return {key: _value(field) for key, field in reader.fields.items()}


def _value(field: gguf.ReaderField) -> Any:
    value = field.contents()
    if field.types == [gguf.GGUFValueType.FLOAT32]:
        return float(str(np.float32(value)))
    return value


class _Reader(gguf.GGUFReader):
    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[NDArray[Any]], list[int], list[gguf.GGUFValueType]]:
        # The package visits the elements of an array one by one through a memory map, which takes seconds
        # for a vocabulary. Here an array of numbers is one part, and strings are cut from plain memory.
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        kind = gguf.GGUFValueType(self._number(orig_offs, 4))
        count, start = self._number(orig_offs + 4, 8), orig_offs + 12
        if kind == gguf.GGUFValueType.STRING:
            parts, end = self._strings(start, count)
        elif kind in self.gguf_scalar_to_np:
            parts = [np.frombuffer(self.data, self.gguf_scalar_to_np[kind], count, start)]
            end = start + parts[0].nbytes
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return end - orig_offs, parts, list(range(len(parts))), [gguf.GGUFValueType.ARRAY, kind]

    def _number(self, offset: int, size: int) -> int:
        return int.from_bytes(self.data[offset : offset + size].tobytes(), "little")

    def _strings(self, offset: int, count: int) -> tuple[list[NDArray[Any]], int]:
        view = self.data.data
        parts: list[NDArray[Any]] = []
        for _ in range(count):
            length = int.from_bytes(view[offset : offset + 8], "little")
            offset += 8
            if offset + length > len(view):
                raise ValueError("a string runs past its end")
            parts.append(np.frombuffer(view[offset : offset + length], np.uint8))
            offset += length
        return parts, offset

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, name_bytes, _, dims, raw_type, offset = field.parts
            name = bytes(name_bytes).decode("utf-8", "replace")
            try:
                kind = gguf.GGMLQuantizationType(int(raw_type[0]))
            except ValueError as error:
                raise ModelError(
                    f"tensor {name} has the unknown type {int(raw_type[0])}. Update the `gguf` package, or "
                    "use a file with another quantisation, for example Q8_0, Q4_K_M or F16."
                ) from error
            block, size = gguf.GGML_QUANT_SIZES[kind]
            end = start_offs + int(offset[0]) + int(np.prod(dims, dtype=np.int64)) * size // block
            if end > len(self.data):
                raise ModelError(
                    f"the file is truncated: tensor {name} ends at byte {end:,} but the file has "
                    f"{len(self.data):,}. Download it again."
                )
        super()._build_tensors(start_offs, fields)
