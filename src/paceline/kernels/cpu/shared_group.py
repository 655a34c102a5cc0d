"""The memory in which the ranks of one group meet, as the kernels see it (group.h)."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import tempfile
from ctypes import POINTER, c_double, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from paceline.errors import EngineError, KernelError
from paceline.kernels.cpu.build import load_library

if TYPE_CHECKING:
    from paceline.kernels.cpu.bindings import DecoderHandle

_ROW_FLOATS = 64  # the decoder's rows are padded to this


@dataclass(frozen=True, slots=True)
class GroupShape:
    """ranks: processes.  rows: tokens of the largest pass.  hidden, vocab: elements of the model's rows."""

    ranks: int
    rows: int
    hidden: int
    vocab: int

    def struct(self) -> _ShapeStruct:
        return _ShapeStruct(self.ranks, self.rows, -(-self.hidden // _ROW_FLOATS) * _ROW_FLOATS, self.vocab)


class _ShapeStruct(ctypes.Structure):
    _fields_ = [(name, c_int32) for name in ("ranks", "rows", "width", "vocab")]


def new_memory(shape: GroupShape) -> int:
    """A file descriptor of zeroed memory for a group; pages are taken when they are first used.

    The memory has no name: who does not inherit the descriptor cannot map it, and it goes with the last
    process that does. The caller closes the descriptor. Raises KernelError for more ranks than the kernels
    count.
    """
    lib = _library()
    most = lib.paceline_group_most_ranks()
    if shape.ranks > most:
        raise KernelError(f"{shape.ranks} ranks in one group: the native kernels take at most {most}.")
    size = lib.paceline_group_bytes(ctypes.byref(shape.struct()))
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("paceline-group", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


class NativeGroup:
    """One rank's view of the memory. Sums are float32, in rank order: the same bits on every rank.

    descriptor: of `new_memory(shape)`; it may be closed afterwards. patience_s: how long this rank waits for
    the others at one meeting before it gives the group up; 0 = for ever, until another rank gives up.
    """

    def __init__(self, descriptor: int, shape: GroupShape, rank: int, patience_s: float) -> None:
        self.shape = shape
        self._lib = _library()
        struct = shape.struct()
        size = self._lib.paceline_group_bytes(ctypes.byref(struct))
        self._memory = mmap.mmap(descriptor, size)
        start = self._lib.paceline_group_logits_offset(ctypes.byref(struct))
        self.logits = torch.frombuffer(self._memory, dtype=torch.float32, offset=start)
        """`[rows * vocab]`: the ranks write their parts of a pass's logits here."""
        self._pointer: int | None = self._lib.paceline_group_new(
            self.logits.data_ptr() - start, ctypes.byref(struct), rank, patience_s
        )
        if not self._pointer:
            raise MemoryError("not enough memory for the group of ranks")

    def __del__(self) -> None:
        if getattr(self, "_pointer", None):
            self._lib.paceline_group_free(self._pointer)
            self._pointer = None

    def join(self, handle: DecoderHandle) -> None:
        """Makes the decoder a rank of the group, which must outlive its passes."""
        self._lib.paceline_decoder_join(handle.pointer, self._pointer)

    def begin(self, number: int) -> None:
        """Says which pass comes next; numbers grow. A rank that fails before it meets the others in a pass
        goes on with the next one, and the others, who wait for it, then do too."""
        self._lib.paceline_group_begin(self._pointer, number)

    def abandon(self) -> None:
        """Ends the meetings of all ranks, for good; from any thread."""
        self._lib.paceline_group_abandon(self._pointer)

    def check(self) -> None:
        """Raises EngineError if a meeting has failed: what the pass returned is worth nothing."""
        if self._lib.paceline_group_lost(self._pointer):
            raise EngineError("a rank of the group did not come to a sum of the pass")


@functools.cache
def _library() -> ctypes.CDLL:
    lib = load_library()
    shape = POINTER(_ShapeStruct)
    lib.paceline_group_most_ranks.restype = c_int32
    lib.paceline_group_most_ranks.argtypes = []
    lib.paceline_group_bytes.restype = c_int64
    lib.paceline_group_bytes.argtypes = [shape]
    lib.paceline_group_logits_offset.restype = c_int64
    lib.paceline_group_logits_offset.argtypes = [shape]
    lib.paceline_group_new.restype = c_void_p
    lib.paceline_group_new.argtypes = [c_void_p, shape, c_int32, c_double]
    lib.paceline_group_free.restype = None
    lib.paceline_group_free.argtypes = [c_void_p]
    lib.paceline_group_begin.restype = None
    lib.paceline_group_begin.argtypes = [c_void_p, c_uint64]
    lib.paceline_group_abandon.restype = None
    lib.paceline_group_abandon.argtypes = [c_void_p]
    lib.paceline_group_lost.restype = c_int32
    lib.paceline_group_lost.argtypes = [c_void_p]
    lib.paceline_decoder_join.restype = None
    lib.paceline_decoder_join.argtypes = [c_void_p, c_void_p]
    return lib
