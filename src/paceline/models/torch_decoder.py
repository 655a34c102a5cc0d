"""A decoder in plain torch: the specification in tests, and the fallback where there are no kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.kernels import ops

if TYPE_CHECKING:
    from paceline.kernels.batch import TokenBatch
    from paceline.kernels.kv_cache import KVCache
    from paceline.models.spec import DecoderSpec, DecoderWeights, LayerWeights


@dataclass(frozen=True)
class PassInputs:
    """A batch as tensors on the decoder's device.

    tokens, slots: `[T]`. logit_rows: `[L]`. cos, sin: rope tables `[T, D / 2]`, one per rope. plan: attention
    indices.
    """

    tokens: Tensor
    logit_rows: Tensor
    cos: list[Tensor]
    sin: list[Tensor]
    slots: Tensor
    plan: ops.SlotPlan | ops.TreePlan

    def tensors(self) -> list[Tensor]:
        """Every tensor, in an order that depends on their number alone."""
        if isinstance(self.plan, ops.TreePlan):
            plan = self.plan.tensors()
        else:
            plan = list(chain.from_iterable([b.tokens, b.slots, *b.masks.values()] for b in self.plan))
        return [self.tokens, self.logit_rows, *self.cos, *self.sin, self.slots, *plan]


class TorchDecoder:
    """Weights in `dtype` on `device`; norms, softmax and the residual stream in float32.

    exact: one token at a time through everything but the cache, so that a logit depends neither on the tokens
    that share the pass nor on how a prompt is cut. Slower; off by default.
    reduce: spec and weights are one rank's share (`models.shard`), and this gives the sum of what every rank
    adds to the residual stream, `[tokens, hidden]` float32, the same bits on every rank.
    capture: as of `NativeDecoder`.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        exact: bool = False,
        reduce: Callable[[Tensor], Tensor] | None = None,
        capture: Sequence[int] = (),
    ) -> None:
        self.spec = spec
        self.capture = spec.checked_capture(capture)
        self.dtype = dtype
        self.device = torch.device(device)
        self.exact = exact
        self._reduce = reduce
        self._embed = weights.embed.detach().to(self.device, dtype)
        self._head = (
            self._embed if weights.lm_head is None else weights.lm_head.detach().to(self.device, dtype)
        )
        self._final_norm = weights.final_norm.detach().to(self.device, torch.float32)
        self._layers = [moved(layer, self.device, dtype) for layer in weights.layers]
        self._inv_freq = [torch.tensor(rope.inv_freq, device=self.device) for rope in spec.ropes]

    @property
    def kv_dtype(self) -> torch.dtype:
        """What a `KVCache` for this decoder must hold."""
        return self.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of matrices, which a pass over one token reads once."""
        matrices = [
            t for layer in self._layers for t in vars(layer).values() if t is not None and t.dim() == 2
        ]
        return sum(t.numel() * t.element_size() for t in [*matrices, self._head])

    @torch.inference_mode()
    def forward(self, batch: TokenBatch, kv: KVCache, layers: int | None = None) -> Tensor:
        """Logits `[len(batch.logit_rows), vocab_size]`, float32, on the decoder's device. layers: as of
        `NativeDecoder.forward`."""
        return self.run(self.prepare(batch), kv, layers)

    @torch.inference_mode()
    def run(self, inputs: PassInputs, kv: KVCache, layers: int | None = None) -> Tensor:
        """`forward` from prepared inputs: nothing in it waits for the host or asks it for a value."""
        depth = self.spec.checked_depth(layers)
        captured = self.capture if depth == self.spec.num_layers and kv.features is not None else ()
        x = self._embed[inputs.tokens].float() * self.spec.embed_scale
        # A layer's last branch is added by whatever norm comes next, in one kernel.
        branch = torch.zeros_like(x)
        for i in range(depth + 1):
            if i in captured:
                assert kv.features is not None
                kv.features[inputs.slots, captured.index(i)] = (x + branch).to(kv.features.dtype)
            if i < depth:
                x, branch = self._layer(x, branch, i, kv, inputs)
        (logits,) = self._rows(self._logits, x[inputs.logit_rows], branch[inputs.logit_rows])
        return logits

    @torch.inference_mode()
    def prepare(self, batch: TokenBatch, *, pad_slots_to: int = 1) -> PassInputs:
        """`batch` on the device. pad_slots_to: the number of slots a token looks at is rounded up to a
        multiple of this, so that passes share shapes."""
        positions = torch.from_numpy(batch.positions).to(self.device, torch.float32)
        angles = [positions[:, None] * inv_freq for inv_freq in self._inv_freq]
        scales = [rope.scale for rope in self.spec.ropes]
        return PassInputs(
            tokens=torch.from_numpy(batch.tokens).to(self.device, torch.int64),
            logit_rows=torch.from_numpy(batch.logit_rows).to(self.device, torch.int64),
            cos=[a.double().cos().float() * scale for a, scale in zip(angles, scales, strict=True)],
            sin=[a.double().sin().float() * scale for a, scale in zip(angles, scales, strict=True)],
            slots=torch.from_numpy(batch.slots).to(self.device, torch.int64),
            plan=ops.plan_attention(
                batch,
                [layer.window for layer in self.spec.layers],
                self.device,
                separate=self.exact,
                pad_slots_to=pad_slots_to,
            ),
        )

    def _layer(
        self, x: Tensor, branch: Tensor, index: int, kv: KVCache, shared: PassInputs
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and the branch that is still to be added to it, before and after."""
        spec, layer = self.spec.layers[index], self._layers[index]
        keys, values = kv.keys[index], kv.values[index]
        x, q, k, v = self._rows(lambda *row: self._qkv(layer, *row), x, branch)
        cos, sin = shared.cos[spec.rope], shared.sin[spec.rope]
        q = ops.rope_store(q, k, v, cos, sin, keys, values, shared.slots)
        attended = ops.attention(q, keys, values, shared.plan, self.spec.attn_scale, spec.window)
        x, branch = self._rows(lambda *row: self._mlp(layer, *row), x, attended.flatten(1))
        return x, branch

    def _rows(self, function: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> tuple[Tensor, ...]:
        """function over the rows of `tensors`: at once, or (exact) in calls of one row in its own storage."""
        if not self.exact or not len(tensors[0]):
            return function(*tensors)
        rows = [function(*(t[i : i + 1].clone() for t in tensors)) for i in range(len(tensors[0]))]
        return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))

    def _qkv(self, layer: LayerWeights, x: Tensor, branch: Tensor) -> tuple[Tensor, ...]:
        spec = self.spec
        x, normed = ops.add_rms_norm(x, branch, layer.attn_norm, spec.norm_eps)
        q = ops.linear(normed, layer.q, layer.q_bias).view(-1, spec.num_heads, spec.head_dim)
        k = ops.linear(normed, layer.k, layer.k_bias).view(-1, spec.num_kv_heads, spec.head_dim)
        v = ops.linear(normed, layer.v, layer.v_bias).view(-1, spec.num_kv_heads, spec.head_dim)
        if layer.q_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, spec.norm_eps)
        if layer.k_norm is not None:
            k = ops.rms_norm(k, layer.k_norm, spec.norm_eps)
        return x, q, k, v

    def _mlp(self, layer: LayerWeights, x: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
        eps = self.spec.norm_eps
        branch = self._summed(ops.linear(attended, layer.o, layer.o_bias))
        if layer.post_attn_norm is not None:
            branch = ops.rms_norm(branch, layer.post_attn_norm, eps)
        x, normed = ops.add_rms_norm(x, branch, layer.mlp_norm, eps)
        gated = ops.gated_linear(
            normed, layer.gate, layer.up, layer.gate_bias, layer.up_bias, self.spec.activation
        )
        branch = self._summed(ops.linear(gated, layer.down, layer.down_bias))
        if layer.post_mlp_norm is not None:
            branch = ops.rms_norm(branch, layer.post_mlp_norm, eps)
        return x, branch

    def _summed(self, part: Tensor) -> Tensor:
        return part if self._reduce is None else self._reduce(part)

    def _logits(self, x: Tensor, branch: Tensor) -> tuple[Tensor]:
        _, normed = ops.add_rms_norm(x, branch, self._final_norm, self.spec.norm_eps)
        return (ops.linear(normed, self._head),)


def moved(layer: LayerWeights, device: torch.device, dtype: torch.dtype) -> LayerWeights:
    parts = {f.name: getattr(layer, f.name) for f in fields(layer)}
    moved = {
        name: part.detach().to(device, dtype if part.dim() == 2 else torch.float32)
        for name, part in parts.items()
        if part is not None
    }
    return replace(layer, **moved)
