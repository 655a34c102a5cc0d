"""Random decoders and a tiny ledger of sequences for tests of the forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.batch import TokenBatch
from paceline.kernels.kv_cache import KVCache
from paceline.models.spec import DecoderSpec, DecoderWeights, LayerSpec, LayerWeights, RopeSpec


def make_spec(**changes: Any) -> DecoderSpec:
    base: dict[str, Any] = {
        "family": "test",
        "vocab_size": 131,
        "hidden_size": 72,
        "intermediate_size": 104,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "context_length": 1024,
        "layers": (LayerSpec(), LayerSpec()),
        "norm_eps": 1e-5,
    }
    base |= changes
    dim = base["head_dim"]
    base.setdefault("attn_scale", dim**-0.5)
    base.setdefault("ropes", (make_rope(dim, 10_000.0),))
    return DecoderSpec(**base)


def make_rope(dim: int, theta: float, scale: float = 1.0) -> RopeSpec:
    return RopeSpec(tuple(float(theta ** (-2 * i / dim)) for i in range(dim // 2)), scale)


def make_weights(
    spec: DecoderSpec, seed: int = 0, *, tied: bool = True, biases: bool = False
) -> DecoderWeights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(out: int, inputs: int) -> Tensor:
        return torch.randn(out, inputs, generator=generator) * inputs**-0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    def bias(size: int) -> Tensor | None:
        return 0.1 * torch.randn(size, generator=generator) if biases else None

    h, i, d = spec.hidden_size, spec.intermediate_size, spec.head_dim
    attn, kv = spec.num_heads * d, spec.num_kv_heads * d
    layers = [
        LayerWeights(
            attn_norm=norm(h),
            q=matrix(attn, h),
            k=matrix(kv, h),
            v=matrix(kv, h),
            o=matrix(h, attn),
            mlp_norm=norm(h),
            gate=matrix(i, h),
            up=matrix(i, h),
            down=matrix(h, i),
            q_bias=bias(attn),
            k_bias=bias(kv),
            v_bias=bias(kv),
            o_bias=bias(h),
            gate_bias=bias(i),
            up_bias=bias(i),
            down_bias=bias(h),
            q_norm=norm(d) if spec.qk_norm else None,
            k_norm=norm(d) if spec.qk_norm else None,
            post_attn_norm=norm(h) if spec.post_norms else None,
            post_mlp_norm=norm(h) if spec.post_norms else None,
        )
        for _ in spec.layers
    ]
    head = None if tied else matrix(spec.vocab_size, h)
    return DecoderWeights(matrix(spec.vocab_size, h), norm(h), layers, head)


class Decoder(Protocol):
    spec: DecoderSpec
    capture: tuple[int, ...]

    @property
    def kv_dtype(self) -> torch.dtype: ...

    def forward(self, batch: TokenBatch, kv: KVCache) -> Tensor: ...


@dataclass
class World:
    """One decoder, its cache, and rows of committed slots. Slots are handed out in the order of `order`."""

    decoder: Decoder
    num_slots: int = 2048
    rows: int = 4
    seed: int | None = None
    tables: Any = field(init=False)

    def __post_init__(self) -> None:
        self.cache = self.new_cache()
        self.tables = np.zeros((self.rows, 1100), dtype=np.int32)
        self.lengths = [0] * self.rows
        order = np.arange(self.num_slots)
        if self.seed is not None:
            np.random.default_rng(self.seed).shuffle(order)
        self._free = iter(order.tolist())

    def new_cache(self) -> KVCache:
        spec = self.decoder.spec
        return KVCache(
            *(spec.num_layers, self.num_slots, spec.num_kv_heads, spec.head_dim, self.decoder.kv_dtype),
            num_captured=len(self.decoder.capture),
            hidden_size=spec.hidden_size,
        )

    def run(self, *pieces: Piece) -> list[np.ndarray]:
        """One pass over all pieces; the logits of every token of each."""
        batch, ends = self.batch(*pieces)
        logits = self.decoder.forward(batch, self.cache).numpy().copy()
        return np.split(logits, ends)

    def batch(self, *pieces: Piece) -> tuple[TokenBatch, list[int]]:
        """The pieces as one batch, and where each but the first begins."""
        parts = [piece.build(self) for piece in pieces]
        ends = np.cumsum([len(part["tokens"]) for part in parts])
        return _join(parts, self.tables), ends[:-1].tolist()

    def take(self) -> int:
        return next(self._free)


class Piece(Protocol):
    def build(self, world: World) -> dict[str, list[int]]: ...


@dataclass
class Chunk:
    """The next tokens of a row, committed at once."""

    row: int
    tokens: list[int]

    def build(self, world: World) -> dict[str, list[int]]:
        start = world.lengths[self.row]
        slots = [world.take() for _ in self.tokens]
        end = start + len(slots)
        world.tables[self.row, start:end] = slots
        world.lengths[self.row] = end
        n = len(slots)
        return {
            "tokens": self.tokens,
            "positions": list(range(start, end)),
            "slots": slots,
            "rows": [self.row] * n,
            "prefix_len": list(range(start + 1, end + 1)),
            "path_start": [0] * n,
            "path_len": [0] * n,
            "path_slots": [],
        }


@dataclass
class Tree:
    """Nodes below the end of a row, none committed. parents[i] < i, or -1 below the row's last token."""

    row: int
    tokens: list[int]
    parents: list[int]

    def build(self, world: World) -> dict[str, list[int]]:
        prefix = world.lengths[self.row]
        slots = [world.take() for _ in self.tokens]
        paths: list[list[int]] = []
        for i, parent in enumerate(self.parents):
            paths.append([*(paths[parent] if parent >= 0 else []), slots[i]])
        lengths = [len(path) for path in paths]
        return {
            "tokens": self.tokens,
            "positions": [prefix + n - 1 for n in lengths],
            "slots": slots,
            "rows": [self.row] * len(slots),
            "prefix_len": [prefix] * len(slots),
            "path_start": [sum(lengths[:i]) for i in range(len(slots))],
            "path_len": lengths,
            "path_slots": [slot for path in paths for slot in path],
        }


def _join(parts: list[dict[str, list[int]]], tables: Any) -> TokenBatch:
    merged: dict[str, list[int]] = {name: [] for name in parts[0]}
    for part in parts:
        shift = len(merged["path_slots"])
        for name, values in part.items():
            merged[name] += [v + shift for v in values] if name == "path_start" else values
    arrays = {name: np.array(values, dtype=np.int32) for name, values in merged.items()}
    return TokenBatch(**arrays, tables=tables, logit_rows=np.arange(len(arrays["tokens"]), dtype=np.int32))
