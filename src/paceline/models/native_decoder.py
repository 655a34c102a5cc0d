"""A decoder on the CPU kernels: one native call per forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paceline.errors import KernelError
from paceline.kernels.cpu.bindings import DTYPE_CODES, DecoderHandle, NativeDType, SpecStruct

if TYPE_CHECKING:
    from paceline.kernels.batch import TokenBatch
    from paceline.kernels.cpu.head_bindings import HeadHandle
    from paceline.kernels.cpu.shared_group import NativeGroup
    from paceline.kernels.kv_cache import KVCache
    from paceline.models.head_spec import HeadSpec
    from paceline.models.spec import DecoderSpec, DecoderWeights, LayerWeights

_NORMS = ("attn_norm", "mlp_norm", "q_norm", "k_norm", "post_attn_norm", "post_mlp_norm")
_BIASES = ("o_bias", "gate_bias", "up_bias", "down_bias")
_MAX_HEAD_DIM = 1008
_MAX_GROUP = 48


class NativeDecoder:
    """Packs the weights at construction (the source tensors are not kept) and runs whole passes.

    Every logit is computed in an order that depends on the token alone: the same bits come out whatever
    shares the pass, however the prompt is cut, and whether a token is a tree node or already committed.

    dtype: of weights and products. "int8" keeps 8-bit weights in groups of 64 with 16-bit activations. Norms,
    softmax and the residual stream are float32 always.
    threads: workers, the calling thread included. cores: pin worker i to `cores[i % len]` during a pass.
    group: spec and weights are one rank's share (`models.shard`); its passes meet those of the other ranks.
    capture: places as of `DecoderSpec.checked_capture`. The residual stream of every token of a pass is
    written to the cache's features there, rounded to their type; no logit depends on it. All ranks of a group
    name the same places, and those that nobody reads may have a cache without features.

    Raises KernelError when the kernels cannot be built, do not cover the shape, or lack threads or memory for
    the weights.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        *,
        dtype: NativeDType,
        threads: int,
        cores: Sequence[int] | None = None,
        group: NativeGroup | None = None,
        capture: Sequence[int] = (),
    ) -> None:
        check_shape(spec, threads)
        self.spec = spec
        self.capture = spec.checked_capture(capture)
        self.dtype = dtype
        self._handle = _new_handle(spec, dtype, weights.lm_head is None, self.capture, threads, cores)
        self._group = group
        self._logits = torch.empty(0) if group is None else group.logits
        if group is not None:
            group.join(self._handle)
        for i, layer in enumerate(weights.layers):
            load_layer(self._handle, i, layer)
        self._handle.pack(0, "head", [weights.embed if weights.lm_head is None else weights.lm_head])
        if weights.lm_head is not None:
            self._handle.pack(0, "embed", [weights.embed])
        self._handle.set_vector(0, "final_norm", weights.final_norm)

    @property
    def kv_dtype(self) -> torch.dtype:
        """What a `KVCache` for this decoder must hold."""
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed matrices, which a pass over one token reads once."""
        return self._handle.weight_bytes

    def read_weights(self) -> None:
        """Reads all weights once with the decoder's threads and does nothing else: the floor of a pass."""
        self._handle.read_weights()

    def forward(self, batch: TokenBatch, kv: KVCache, layers: int | None = None) -> Tensor:
        """Logits `[len(batch.logit_rows), vocab_size]`, float32. The tensor is a view of a buffer that the
        next call overwrites.

        layers: only the first so many run, then the final norm and the head: the logits of a model cut off
        there. Their keys and values are written; nothing is captured.

        Raises ValueError for a malformed batch or a cache of the wrong kind, on every rank of a group alike,
        and EngineError when the group is lost."""
        depth = self.spec.checked_depth(layers)
        self._check_cache(kv)
        rows, vocab = len(batch.logit_rows), self.spec.vocab_size
        if self._group is not None and len(batch) > self._group.shape.rows:
            raise ValueError(f"{len(batch)} tokens in a pass of a group made for {self._group.shape.rows}")
        if self._logits.numel() < rows * vocab:
            self._logits = torch.empty(rows * vocab)
        self._handle.forward(batch, kv, depth, self._logits)
        if self._group is not None:
            self._group.check()
        return self._logits[: rows * vocab].view(rows, vocab)

    def _check_cache(self, kv: KVCache) -> None:
        spec, keys = self.spec, kv.keys
        wanted = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
        if (
            (keys.shape[0], *keys.shape[2:]) != wanted
            or keys.dtype != self.kv_dtype
            or keys.device.type != "cpu"
        ):
            raise ValueError(
                f"the cache holds {tuple(keys.shape)} {keys.dtype} on {keys.device}; this decoder needs "
                f"(layers, *, kv_heads, head_dim) = {wanted}, {self.kv_dtype} on cpu"
            )
        kept = () if kv.features is None else tuple(kv.features.shape[1:])
        if kept != ((len(self.capture), spec.hidden_size) if self.capture else ()) and (
            kept or not self._group
        ):
            raise ValueError(
                f"the cache keeps features of {kept} a slot; this decoder captures {len(self.capture)} "
                f"places of {spec.hidden_size} numbers"
            )


def check_shape(spec: DecoderSpec | HeadSpec, threads: int) -> None:
    """Raises KernelError for what the kernels do not cover."""
    if threads < 1:
        raise ValueError(f"threads must be at least 1, not {threads}")
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    if heads % kv_heads:
        reason = f"{heads} heads cannot share {kv_heads} key-value heads evenly"
    elif heads > _MAX_GROUP * kv_heads:
        reason = f"{heads // kv_heads} heads per key-value head are more than {_MAX_GROUP}"
    elif dim % 2 or not 0 < dim <= _MAX_HEAD_DIM:
        reason = f"head_dim {dim} is not even and at most {_MAX_HEAD_DIM}"
    else:
        return
    raise KernelError(f"the native kernels do not cover this model: {reason}.")


def _new_handle(
    spec: DecoderSpec,
    dtype: NativeDType,
    tied: bool,
    capture: Sequence[int],
    threads: int,
    cores: Sequence[int] | None,
) -> DecoderHandle:
    places = np.array(capture, dtype=np.int32)
    windows = np.array([layer.window for layer in spec.layers], dtype=np.int32)
    ropes = np.array([layer.rope for layer in spec.layers], dtype=np.int32)
    inv_freq = np.array([rope.inv_freq for rope in spec.ropes], dtype=np.float32)
    scale = np.array([rope.scale for rope in spec.ropes], dtype=np.float32)
    struct = SpecStruct(
        *(spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.num_heads, spec.num_kv_heads),
        *(spec.head_dim, spec.num_layers, len(spec.ropes), int(spec.activation == "gelu_tanh")),
        *(int(spec.qk_norm), int(spec.post_norms), int(tied), len(capture), spec.hidden_size),
        DTYPE_CODES[dtype],
        *(spec.norm_eps, spec.attn_scale, spec.embed_scale),
        *(array.ctypes.data for array in (windows, ropes, inv_freq, scale, places)),
    )
    return DecoderHandle(struct, threads, cores)


def load_layer(handle: DecoderHandle | HeadHandle, index: int, layer: LayerWeights) -> None:
    """Packs everything that belongs to one layer."""
    handle.pack(index, "qkv", [layer.q, layer.k, layer.v])
    handle.pack(index, "o", [layer.o])
    handle.pack(index, "gate_up", [layer.gate, layer.up])
    handle.pack(index, "down", [layer.down])
    for name in (*_NORMS, *_BIASES):
        value: Tensor | None = getattr(layer, name)
        if value is not None:
            handle.set_vector(index, name, value)
    biases = [layer.q_bias, layer.k_bias, layer.v_bias]
    if any(bias is not None for bias in biases):
        sizes = [layer.q.shape[0], layer.k.shape[0], layer.v.shape[0]]
        filled = [
            torch.zeros(n) if b is None else b.detach().to("cpu", torch.float32)
            for b, n in zip(biases, sizes, strict=True)
        ]
        handle.set_vector(index, "qkv_bias", torch.cat(filled))
