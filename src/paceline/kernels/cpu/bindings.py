"""The C interface of the kernels, as ctypes structures and typed calls."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import KernelError
from paceline.kernels.cpu.build import load_library

if TYPE_CHECKING:
    from paceline.kernels.batch import TokenBatch
    from paceline.kernels.kv_cache import KVCache

NativeDType = Literal["float32", "bfloat16", "int8"]

DTYPE_CODES: dict[str, int] = {"float32": 0, "bfloat16": 1, "int8": 2}
MATRIX_IDS = {
    name: i for i, name in enumerate(["qkv", "o", "gate_up", "down", "embed", "head", "join", "fc"])
}
_MASK64 = 0xFFFFFFFFFFFFFFFF
_VECTORS = "attn_norm mlp_norm q_norm k_norm post_attn_norm post_mlp_norm qkv_bias o_bias gate_bias up_bias"
_HEAD_VECTORS = "embed_norm hidden_norm input_norm fc_norms"
VECTOR_IDS = {
    name: i for i, name in enumerate([*_VECTORS.split(), "down_bias", "final_norm", *_HEAD_VECTORS.split()])
}
BATCH_RULES = {
    1: "a token id is outside the vocabulary",
    2: "a slot is outside the cache",
    3: "a row is outside the tables",
    4: "prefix_len is outside the table's width",
    5: "a path lies outside path_slots",
    6: "prefix_len + path_len is not position + 1",
    7: "a visible slot is outside the cache",
    8: "logit_rows names a token that is not in the batch",
}

_DECODER_FAILURES = {
    1: "the system refuses to start {threads} threads: lower threads, or raise the limit on processes.",
    2: "not enough memory for the decoder's packed weights.",
}


class SpecStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ["vocab", "hidden", "intermediate", "heads", "kv_heads", "head_dim"]),
        *((name, c_int32) for name in ["layers", "ropes", "gelu", "qk_norm", "post_norms", "tied"]),
        *((name, c_int32) for name in ["captured", "attention_input", "dtype"]),
        *((name, c_float) for name in ["norm_eps", "attn_scale", "embed_scale"]),
        *((name, c_void_p) for name in ["windows", "layer_ropes", "inv_freq", "rope_scale", "capture"]),
    ]


class BatchStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_int32) for name in ["tokens_count", "logits_count", "paths_count", "rows_count"]),
        ("table_width", c_int32),
        ("table_stride", c_int64),
        *((name, c_void_p) for name in ["tokens", "positions", "slots", "rows", "prefix_len", "path_start"]),
        *((name, c_void_p) for name in ["path_len", "path_slots", "tables", "logit_rows"]),
    ]


class KvStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ["keys", "values", "features"]),
        ("layer_bytes", c_int64),
        ("slots", c_int32),
    ]


class PartStruct(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("dtype", c_int32), ("rows", c_int32)]


class _SamplingStruct(ctypes.Structure):
    _fields_ = [
        ("count", c_int32),
        ("vocab", c_int32),
        ("stride", c_int64),
        *((name, c_void_p) for name in ["logits", "temperatures", "seeds", "positions", "ids"]),
    ]


@contextlib.contextmanager
def _sampling_rows(
    logits: Tensor,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
    token_ids: Tensor | None = None,
) -> Iterator[Any]:
    """A reference to a `_SamplingStruct`; what it points at lives as long as the context."""
    logits = (
        logits if logits.dtype == torch.float32 and logits.stride(1) == 1 else logits.float().contiguous()
    )
    count, vocab = logits.shape
    if not len(temperatures) == len(seeds) == len(positions) == count:
        raise ValueError(f"{count} rows of logits need {count} temperatures, seeds and positions")
    ids = token_ids if token_ids is None else token_ids.to("cpu", torch.int64).contiguous()
    heat = np.array(temperatures, dtype=np.float32)
    keys = np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64)
    places = np.array(positions, dtype=np.int64)
    yield ctypes.byref(
        _SamplingStruct(
            *(count, vocab, logits.stride(0), logits.data_ptr()),
            *(heat.ctypes.data, keys.ctypes.data, places.ctypes.data),
            None if ids is None else ids.data_ptr(),
        )
    )


def coupled_argmax(
    logits: Tensor, temperatures: Sequence[float], seeds: Sequence[int], positions: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """See `reference.sampling.coupled_argmax`; for CPU tensors."""
    tokens, finite = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits), dtype=torch.bool)
    with _sampling_rows(logits, temperatures, seeds, positions) as rows:
        library().paceline_coupled_argmax(rows, tokens.data_ptr(), finite.data_ptr())
    return tokens, finite


def top_candidates(
    logits: Tensor,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
    count: int,
    token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `reference.sampling.top_candidates`; for CPU tensors, and count at least 1."""
    tokens, scores = torch.empty(len(logits), count, dtype=torch.int32), torch.empty(len(logits), count)
    with _sampling_rows(logits, temperatures, seeds, positions, token_ids) as rows:
        library().paceline_top_candidates(rows, count, tokens.data_ptr(), scores.data_ptr())
    return tokens, scores


def noise_row(seed: int, position: int, count: int) -> NDArray[np.float32]:
    """`core.noise.gumbel_noise(seed, position, count)`, computed natively."""
    out = np.empty(count, dtype=np.float32)
    library().paceline_noise(seed & _MASK64, position, count, out.ctypes.data)
    return out


class DecoderHandle:
    """Owns one packed decoder and its thread team; freed with the object."""

    def __init__(self, spec: SpecStruct, threads: int, cores: Sequence[int] | None) -> None:
        self._lib = library()
        self._pointer: int | None = new_object(self._lib.paceline_decoder_new, spec, threads, cores)

    def __del__(self) -> None:
        if getattr(self, "_pointer", None):
            self._lib.paceline_decoder_free(self._pointer)
            self._pointer = None

    @property
    def pointer(self) -> int | None:
        """The decoder, for other parts of the C interface."""
        return self._pointer

    @property
    def weight_bytes(self) -> int:
        return int(self._lib.paceline_weight_bytes(self._pointer))

    def read_weights(self) -> None:
        """Reads all packed weights once with the decoder's threads; for measuring memory bandwidth."""
        self._lib.paceline_read_weights(self._pointer)

    def pack(self, layer: int, matrix: str, parts: Sequence[Tensor]) -> None:
        """Packs `[out, in]` tensors, stacked in the given order, as one matrix. Nothing is held on to."""
        pack_parts(self._lib.paceline_pack, self._pointer, layer, matrix, parts)

    def set_vector(self, layer: int, name: str, value: Tensor) -> None:
        set_vector(self._lib, self._pointer, layer, name, value)

    def forward(self, batch: TokenBatch, kv: KVCache, depth: int, logits: Tensor) -> None:
        """Runs one pass through `depth` layers, without the interpreter lock. Raises ValueError naming a
        broken rule of the batch."""
        code = self._lib.paceline_forward(
            *(self._pointer, ctypes.byref(batch_struct(batch)), ctypes.byref(kv_struct(kv))),
            *(depth, logits.data_ptr()),
        )
        check_pass(code)


def new_object(make: Any, spec: ctypes.Structure, threads: int, cores: Sequence[int] | None) -> int:
    """What `make` returns. Raises KernelError when it cannot."""
    pinned = (c_int32 * len(cores or ()))(*(cores or ()))
    failure = c_int32()
    pointer = make(ctypes.byref(spec), threads, pinned, len(pinned), ctypes.byref(failure))
    if not pointer:
        raise KernelError(_DECODER_FAILURES[failure.value].format(threads=threads))
    return int(pointer)


def pack_parts(pack: Any, pointer: int | None, layer: int, matrix: str, parts: Sequence[Tensor]) -> None:
    """See `DecoderHandle.pack`."""
    same = {part.dtype for part in parts} == {torch.bfloat16}
    dtype = torch.bfloat16 if same else torch.float32
    ready = [part.detach().to("cpu", dtype).contiguous() for part in parts]
    structs = (PartStruct * len(ready))(*(PartStruct(t.data_ptr(), int(same), t.shape[0]) for t in ready))
    check_memory(pack(pointer, layer, MATRIX_IDS[matrix], structs, len(ready)), "packing a matrix")


def set_vector(lib: ctypes.CDLL, pointer: int | None, layer: int, name: str, value: Tensor) -> None:
    """One weight vector of a layer, or of the whole with layer 0."""
    ready = value.detach().to("cpu", torch.float32).contiguous()
    code = lib.paceline_set_vector(pointer, layer, VECTOR_IDS[name], ready.data_ptr(), ready.numel())
    check_memory(code, "a weight vector")


def check_pass(code: int) -> None:
    """Raises ValueError naming a broken rule of the batch."""
    check_memory(code, "the buffers of this pass")
    if code:
        raise ValueError(f"malformed batch: {BATCH_RULES[code]}")


def check_memory(code: int, purpose: str) -> None:
    """Raises MemoryError where a call says that there was too little."""
    if code < 0:
        raise MemoryError(f"not enough memory for {purpose}")


def kv_struct(kv: KVCache) -> KvStruct:
    keys, features = kv.keys, kv.features
    return KvStruct(
        *(keys.data_ptr(), kv.values.data_ptr(), None if features is None else features.data_ptr()),
        *(keys.stride(0) * keys.element_size(), keys.shape[1]),
    )


def batch_struct(batch: TokenBatch) -> BatchStruct:
    tables = batch.tables
    if tables.shape[1] and tables.strides[1] != tables.itemsize:
        raise ValueError("malformed batch: a row of tables is not contiguous")
    return BatchStruct(
        len(batch.tokens),
        len(batch.logit_rows),
        len(batch.path_slots),
        tables.shape[0],
        tables.shape[1],
        tables.strides[0] // tables.itemsize,
        *map(_address, (batch.tokens, batch.positions, batch.slots, batch.rows, batch.prefix_len)),
        *map(_address, (batch.path_start, batch.path_len, batch.path_slots)),
        tables.ctypes.data,
        _address(batch.logit_rows),
    )


def _address(array: NDArray[np.int32]) -> int:
    if array.dtype != np.int32 or not array.flags.c_contiguous:
        raise ValueError("malformed batch: arrays must be contiguous int32")
    return array.ctypes.data


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels, with the types of what this module calls."""
    lib = load_library()
    lib.paceline_coupled_argmax.restype = None
    lib.paceline_coupled_argmax.argtypes = [POINTER(_SamplingStruct), c_void_p, c_void_p]
    lib.paceline_top_candidates.restype = None
    lib.paceline_top_candidates.argtypes = [POINTER(_SamplingStruct), c_int32, c_void_p, c_void_p]
    lib.paceline_noise.restype = None
    lib.paceline_noise.argtypes = [c_uint64, c_int64, c_int32, c_void_p]
    lib.paceline_decoder_new.restype = c_void_p
    numbers = POINTER(c_int32)
    lib.paceline_decoder_new.argtypes = [POINTER(SpecStruct), c_int32, numbers, c_int32, numbers]
    lib.paceline_decoder_free.restype = None
    lib.paceline_decoder_free.argtypes = [c_void_p]
    lib.paceline_weight_bytes.restype = c_int64
    lib.paceline_weight_bytes.argtypes = [c_void_p]
    lib.paceline_read_weights.restype = c_uint64
    lib.paceline_read_weights.argtypes = [c_void_p]
    lib.paceline_pack.restype = c_int32
    lib.paceline_pack.argtypes = [c_void_p, c_int32, c_int32, POINTER(PartStruct), c_int32]
    lib.paceline_set_vector.restype = c_int32
    lib.paceline_set_vector.argtypes = [c_void_p, c_int32, c_int32, c_void_p, c_int32]
    lib.paceline_forward.restype = c_int32
    lib.paceline_forward.argtypes = [c_void_p, POINTER(BatchStruct), POINTER(KvStruct), c_int32, c_void_p]
    return lib
