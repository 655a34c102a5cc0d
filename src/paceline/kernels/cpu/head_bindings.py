"""The C interface of a draft head (`kernels/cpu/head.h`)."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_int32, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from paceline.kernels.cpu import bindings
from paceline.kernels.cpu.bindings import BatchStruct, KvStruct, PartStruct, SpecStruct

if TYPE_CHECKING:
    from paceline.kernels.batch import IntArray, TokenBatch
    from paceline.kernels.kv_cache import KVCache

_MASK64 = 0xFFFFFFFFFFFFFFFF


class HeadStruct(ctypes.Structure):
    _fields_ = [
        ("block", SpecStruct),
        *((name, c_int32) for name in ["features", "target_hidden", "fused", "joined"]),
        *((name, c_int32) for name in ["norm_before_residual", "norm_output", "zero_first"]),
        *((name, c_int32) for name in ["embed_rows", "embed_dtype"]),
        ("embed", c_void_p),
    ]


class _ChainStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ["steps", "count"]),
        *((name, c_void_p) for name in ["slots", "temperatures", "seeds", "positions", "ids"]),
    ]


class HeadHandle:
    """Owns one packed head and its thread team; freed with the object. What `spec.embed` points at must live
    as long."""

    def __init__(self, spec: HeadStruct, threads: int, cores: Sequence[int] | None) -> None:
        self._lib = _library()
        self._pointer: int | None = bindings.new_object(self._lib.paceline_head_new, spec, threads, cores)
        self._blocks = self._lib.paceline_head_blocks(self._pointer)

    def __del__(self) -> None:
        if getattr(self, "_pointer", None):
            self._lib.paceline_head_free(self._pointer)
            self._pointer = None

    @property
    def weight_bytes(self) -> int:
        return int(self._lib.paceline_head_weight_bytes(self._pointer))

    def read_weights(self) -> None:
        """Reads the weights of all blocks and the output matrix once; for measuring memory bandwidth."""
        self._lib.paceline_read_weights(self._blocks)

    def pack(self, module: int, matrix: str, parts: Sequence[Tensor]) -> None:
        """See `DecoderHandle.pack`."""
        bindings.pack_parts(self._lib.paceline_head_pack, self._pointer, module, matrix, parts)

    def set_vector(self, module: int, name: str, value: Tensor) -> None:
        bindings.set_vector(self._lib, self._blocks, module, name, value)

    def fuse(self, features: Tensor, dtype: int, out: Tensor) -> None:
        """features: contiguous, float32 (dtype 0) or bfloat16 (dtype 1)."""
        code = self._lib.paceline_head_fuse(
            self._pointer, features.data_ptr(), dtype, len(features), out.data_ptr()
        )
        bindings.check_memory(code, "the features of this pass")

    def forward(
        self, batch: TokenBatch, hidden: Tensor, kv: KVCache, module: int, logits: Tensor, fed: Tensor
    ) -> None:
        """Runs one pass without the interpreter lock. Raises ValueError naming a broken rule of the batch."""
        code = self._lib.paceline_head_forward(
            *(self._pointer, ctypes.byref(bindings.batch_struct(batch))),
            *(ctypes.byref(bindings.kv_struct(kv)), hidden.data_ptr(), module),
            *(logits.data_ptr(), fed.data_ptr()),
        )
        bindings.check_pass(code)

    def chain(
        self,
        batch: TokenBatch,
        hidden: Tensor,
        kv: KVCache,
        *,
        slots: IntArray,
        temperatures: Sequence[float],
        seeds: Sequence[int],
        positions: Sequence[int],
        ids: Tensor | None,
        tokens: Tensor,
        scores: Tensor,
        fed: Tensor,
    ) -> None:
        """slots `[rows, steps - 1]`; tokens, scores `[rows, steps, count]`; fed `[rows, steps, hidden]`.
        Raises as `forward`."""
        heat = np.array(temperatures, dtype=np.float32)
        keys = np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64)
        places = np.array(positions, dtype=np.int64)
        own = np.ascontiguousarray(slots, dtype=np.int32)
        chain = _ChainStruct(
            *(tokens.shape[1], tokens.shape[2]),
            *(array.ctypes.data for array in (own, heat, keys, places)),
            None if ids is None else ids.data_ptr(),
        )
        code = self._lib.paceline_head_chain(
            *(self._pointer, ctypes.byref(bindings.batch_struct(batch))),
            *(ctypes.byref(bindings.kv_struct(kv)), hidden.data_ptr(), ctypes.byref(chain)),
            *(tokens.data_ptr(), scores.data_ptr(), fed.data_ptr()),
        )
        bindings.check_pass(code)


@functools.cache
def _library() -> ctypes.CDLL:
    lib = bindings.library()
    numbers = POINTER(c_int32)
    lib.paceline_head_new.restype = c_void_p
    lib.paceline_head_new.argtypes = [POINTER(HeadStruct), c_int32, numbers, c_int32, numbers]
    lib.paceline_head_free.restype = None
    lib.paceline_head_free.argtypes = [c_void_p]
    lib.paceline_head_blocks.restype = c_void_p
    lib.paceline_head_blocks.argtypes = [c_void_p]
    lib.paceline_head_weight_bytes.restype = c_int64
    lib.paceline_head_weight_bytes.argtypes = [c_void_p]
    lib.paceline_head_pack.restype = c_int32
    lib.paceline_head_pack.argtypes = [c_void_p, c_int32, c_int32, POINTER(PartStruct), c_int32]
    lib.paceline_head_fuse.restype = c_int32
    lib.paceline_head_fuse.argtypes = [c_void_p, c_void_p, c_int32, c_int32, c_void_p]
    run: list[Any] = [c_void_p, POINTER(BatchStruct), POINTER(KvStruct), c_void_p]
    lib.paceline_head_forward.restype = c_int32
    lib.paceline_head_forward.argtypes = [*run, c_int32, c_void_p, c_void_p]
    lib.paceline_head_chain.restype = c_int32
    lib.paceline_head_chain.argtypes = [*run, POINTER(_ChainStruct), c_void_p, c_void_p, c_void_p]
    return lib
