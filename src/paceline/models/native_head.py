"""A draft head on the CPU kernels: one native call per pass, or per chain of guesses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import KernelError
from paceline.kernels.cpu.bindings import DTYPE_CODES, NativeDType, SpecStruct
from paceline.kernels.cpu.head_bindings import HeadHandle, HeadStruct
from paceline.models.native_decoder import check_shape, load_layer

if TYPE_CHECKING:
    from paceline.kernels.batch import IntArray, TokenBatch
    from paceline.kernels.kv_cache import KVCache
    from paceline.models.head_spec import HeadSpec, HeadWeights, ModuleWeights

_PADDED = 64
"""Rows of the kernels are as long as a multiple of this."""


class NativeHead:
    """Packs the matrices at construction (of the source tensors only the embedding is kept, as it is) and
    runs whole passes. See `HeadSpec` for what is computed and `HeadDecoder` for the calls.

    As in `NativeDecoder`, the same bits come out whatever shares the pass, and dtype, threads and cores mean
    the same.

    Raises KernelError when the kernels cannot be built, do not cover the shape, or lack threads or memory.
    """

    def __init__(
        self,
        spec: HeadSpec,
        weights: HeadWeights,
        *,
        dtype: NativeDType,
        threads: int,
        cores: Sequence[int] | None = None,
    ) -> None:
        check_shape(spec, threads)
        if not spec.fused and len(spec.capture) * spec.target_hidden_size != spec.hidden_size:
            raise KernelError("the native kernels do not cover this head: it has no fc for its features.")
        self.spec = spec
        self.dtype = dtype
        ids = weights.target_ids
        self.target_ids = None if ids is None else ids.detach().to("cpu", torch.int64).contiguous()
        raw = weights.embed.detach().cpu()
        self._embed = (raw if raw.dtype == torch.bfloat16 else raw.float()).contiguous()
        self._handle = HeadHandle(_struct(spec, self._embed, dtype), threads, cores)
        self._logits, self._fed, self._fused = torch.empty(0), torch.empty(0), torch.empty(0)
        _load_shared(self._handle, spec, weights)
        for index, module in enumerate(weights.modules):
            _load_module(self._handle, index, module)

    @property
    def kv_dtype(self) -> torch.dtype:
        """What a `KVCache` for this head must hold."""
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed matrices. A pass over one token reads those of one module and the output matrix."""
        return self._handle.weight_bytes

    def read_weights(self) -> None:
        """Reads the weights of all blocks and the output matrix once with the head's threads and does nothing
        else: the floor of a pass."""
        self._handle.read_weights()

    def fuse(self, features: Tensor) -> Tensor:
        """See `HeadDecoder.fuse`."""
        spec = self.spec
        if features.shape[1:] != (len(spec.capture), spec.target_hidden_size):
            raise ValueError(
                f"features of shape {tuple(features.shape)}; this head reads "
                f"[*, {len(spec.capture)}, {spec.target_hidden_size}]"
            )
        narrow = features.dtype == torch.bfloat16
        ready = (features if narrow else features.float()).cpu().contiguous()
        self._fused = _room(self._fused, len(ready) * spec.hidden_size)
        self._handle.fuse(ready, int(narrow), self._fused)
        return self._fused[: len(ready) * spec.hidden_size].view(len(ready), spec.hidden_size)

    def forward(
        self, batch: TokenBatch, hidden: Tensor, kv: KVCache, module: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See `HeadDecoder.forward`; both results are views of buffers that the next call overwrites. Raises
        ValueError for a malformed batch, hidden states of another shape or a cache of the wrong kind."""
        if not 0 <= module < self.spec.num_modules:
            raise ValueError(f"module {module} of a head that has {self.spec.num_modules}")
        hidden = self._checked(batch, hidden, kv, module + 1)
        rows, vocab, width = len(batch.logit_rows), self.spec.draft_vocab_size, self.spec.hidden_size
        self._logits = _room(self._logits, rows * vocab)
        self._fed = _room(self._fed, rows * width)
        self._handle.forward(batch, hidden, kv, module, self._logits, self._fed)
        return self._logits[: rows * vocab].view(rows, vocab), self._fed[: rows * width].view(rows, width)

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
        count: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `HeadDecoder.chain`: all steps in one native call. Raises as `forward`."""
        rows = len(batch.logit_rows)
        lengths = {len(slots), len(temperatures), len(seeds), len(positions), rows}
        if len(lengths) > 1 or slots.ndim != 2 or count < 1:
            raise ValueError(
                f"{rows} chains need as many rows of slots, temperatures, seeds and positions, and at least "
                "one candidate a step"
            )
        shape = (rows, slots.shape[1] + 1, count)
        hidden = self._checked(batch, hidden, kv, min(shape[1], self.spec.num_modules))
        tokens, scores = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
        fed = torch.empty(*shape[:2], self.spec.hidden_size)
        self._handle.chain(
            *(batch, hidden, kv),
            slots=slots,
            temperatures=temperatures,
            seeds=seeds,
            positions=positions,
            ids=self.target_ids,
            tokens=tokens,
            scores=scores,
            fed=fed,
        )
        return tokens, scores, fed

    def _checked(self, batch: TokenBatch, hidden: Tensor, kv: KVCache, modules: int) -> Tensor:
        spec, keys = self.spec, kv.keys
        if (
            keys.shape[0] < modules
            or keys.shape[2:] != (spec.num_kv_heads, spec.head_dim)
            or keys.dtype != self.kv_dtype
            or keys.device.type != "cpu"
        ):
            raise ValueError(
                f"the cache holds {tuple(keys.shape)} {keys.dtype} on {keys.device}; this head needs "
                f"({modules} modules, *, {spec.num_kv_heads}, {spec.head_dim}) {self.kv_dtype} on cpu"
            )
        if hidden.shape != (len(batch), spec.hidden_size):
            raise ValueError(
                f"hidden states {tuple(hidden.shape)} for {len(batch)} tokens; this head reads "
                f"[{len(batch)}, {spec.hidden_size}]"
            )
        return hidden.to("cpu", torch.float32).contiguous()


def _room(buffer: Tensor, size: int) -> Tensor:
    return buffer if buffer.numel() >= size else torch.empty(size)


def _struct(spec: HeadSpec, embed: Tensor, dtype: NativeDType) -> HeadStruct:
    zeros = np.zeros(spec.num_modules, dtype=np.int32)
    inv_freq = np.array(spec.rope.inv_freq, dtype=np.float32)
    scale = np.array([spec.rope.scale], dtype=np.float32)
    block = SpecStruct(
        *(spec.draft_vocab_size, spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads),
        *(spec.head_dim, spec.num_modules, 1, int(spec.activation == "gelu_tanh"), int(spec.qk_norm)),
        *(0, 1, 0, spec.attention_input, DTYPE_CODES[dtype], spec.norm_eps, spec.attn_scale, 1.0),
        *(array.ctypes.data for array in (zeros, zeros, inv_freq, scale, zeros)),
    )
    struct = HeadStruct(
        *(block, len(spec.capture), spec.target_hidden_size, int(spec.fused), int(spec.joined)),
        *(int(spec.norm_before_residual), int(spec.norm_output), int(spec.zero_first)),
        *(len(embed), int(embed.dtype == torch.bfloat16), embed.data_ptr()),
    )
    struct.arrays = (zeros, inv_freq, scale)  # read by the constructor, so they must live until then
    return struct


def _load_shared(handle: HeadHandle, spec: HeadSpec, weights: HeadWeights) -> None:
    handle.pack(0, "head", [weights.embed if weights.lm_head is None else weights.lm_head])
    if weights.fc is not None:
        handle.pack(0, "fc", [weights.fc])
    if weights.input_norm is not None:
        handle.set_vector(0, "input_norm", weights.input_norm)
    if weights.fc_norms:
        short = -spec.target_hidden_size % _PADDED
        handle.set_vector(
            0, "fc_norms", torch.cat([F.pad(norm.float(), (0, short)) for norm in weights.fc_norms])
        )


def _load_module(handle: HeadHandle, index: int, module: ModuleWeights) -> None:
    load_layer(handle, index, module.layer)
    handle.set_vector(index, "embed_norm", module.embed_norm)
    handle.set_vector(index, "final_norm", module.norm)
    if module.hidden_norm is not None:
        handle.set_vector(index, "hidden_norm", module.hidden_norm)
    if module.join is not None:
        handle.pack(index, "join", [module.join])
