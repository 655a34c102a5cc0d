"""A draft head in plain torch: the specification in tests, and the path where there are no kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.kernels import ops
from paceline.models.head_chain import draft_chain
from paceline.models.torch_decoder import moved

if TYPE_CHECKING:
    from paceline.kernels.batch import IntArray, TokenBatch
    from paceline.kernels.kv_cache import KVCache
    from paceline.models.head_spec import HeadSpec, HeadWeights, ModuleWeights
    from paceline.models.spec import LayerWeights


@dataclass(frozen=True)
class _Rotation:
    """What attention needs of a pass. cos, sin: `[T, D / 2]`. slots: `[T]`."""

    cos: Tensor
    sin: Tensor
    slots: Tensor
    plan: ops.SlotPlan | ops.TreePlan


class TorchHead:
    """Weights in `dtype` on `device`; norms, softmax and the residual stream in float32. See `HeadSpec` for
    what is computed and `HeadDecoder` for the calls."""

    def __init__(
        self,
        spec: HeadSpec,
        weights: HeadWeights,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = torch.device(device)
        self.target_ids = None if weights.target_ids is None else weights.target_ids.to(self.device)
        self._embed = self._matrix(weights.embed)
        self._head = self._embed if weights.lm_head is None else self._matrix(weights.lm_head)
        self._fc = None if weights.fc is None else self._matrix(weights.fc)
        self._input_norm = None if weights.input_norm is None else self._vector(weights.input_norm)
        self._fc_norms = [self._vector(norm) for norm in weights.fc_norms]
        self._modules = [self._moved(module) for module in weights.modules]
        self._inv_freq = torch.tensor(spec.rope.inv_freq, device=self.device)

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.dtype

    @torch.inference_mode()
    def fuse(self, features: Tensor) -> Tensor:
        """See `HeadDecoder.fuse`."""
        eps = self.spec.norm_eps
        parts = features.to(self.device, torch.float32)
        if self._fc_norms:
            normed = [ops.rms_norm(parts[:, i], norm, eps) for i, norm in enumerate(self._fc_norms)]
            parts = torch.stack(normed, dim=1)
        x = parts.flatten(1)
        if self._input_norm is not None:
            x = ops.rms_norm(x, self._input_norm, eps)
        return x if self._fc is None else ops.linear(x, self._fc)

    @torch.inference_mode()
    def forward(
        self, batch: TokenBatch, hidden: Tensor, kv: KVCache, module: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See `HeadDecoder.forward`."""
        spec, weights, layer = self.spec, self._modules[module], self._modules[module].layer
        rotation = self._rotation(batch)
        x, attended = self._inputs(weights, self._embedded(batch), hidden.to(self.device, torch.float32))
        q, k, v = self._qkv(layer, attended)
        keys, values = kv.keys[module], kv.values[module]
        q = ops.rope_store(q, k, v, rotation.cos, rotation.sin, keys, values, rotation.slots)
        mixed = ops.attention(q, keys, values, rotation.plan, spec.attn_scale, 0).flatten(1)
        # What follows looks at no other token.
        rows = torch.from_numpy(batch.logit_rows).to(self.device, torch.int64)
        branch = ops.linear(mixed[rows], layer.o, layer.o_bias)
        x, normed = ops.add_rms_norm(x[rows], branch, layer.mlp_norm, spec.norm_eps)
        gated = ops.gated_linear(
            normed, layer.gate, layer.up, layer.gate_bias, layer.up_bias, spec.activation
        )
        branch = ops.linear(gated, layer.down, layer.down_bias)
        x, normed = ops.add_rms_norm(x, branch, weights.norm, spec.norm_eps)
        return ops.linear(normed, self._head), normed if spec.norm_output else x

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
        """See `HeadDecoder.chain`."""
        return draft_chain(
            *(self, batch, hidden, kv),
            slots=slots,
            temperatures=temperatures,
            seeds=seeds,
            positions=positions,
            count=count,
        )

    def _embedded(self, batch: TokenBatch) -> Tensor:
        x = self._embed[torch.from_numpy(batch.tokens).to(self.device, torch.int64)].float()
        if self.spec.zero_first:
            x[torch.from_numpy(batch.positions == 0).to(self.device)] = 0.0
        return x

    def _inputs(self, weights: ModuleWeights, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream `[T, hidden]`, and what attention reads `[T, attention_input]`."""
        eps, attn_norm = self.spec.norm_eps, weights.layer.attn_norm
        embedded = ops.rms_norm(embedded, weights.embed_norm, eps)
        if weights.join is not None and weights.hidden_norm is not None:
            normed = ops.rms_norm(hidden, weights.hidden_norm, eps)
            x = ops.linear(torch.cat((embedded, normed), dim=1), weights.join)
            return x, ops.rms_norm(x, attn_norm, eps)
        normed = ops.rms_norm(hidden, attn_norm, eps)
        x = normed if self.spec.norm_before_residual else hidden
        return x, torch.cat((embedded, normed), dim=1)

    def _qkv(self, layer: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec
        q = ops.linear(x, layer.q, layer.q_bias).view(-1, spec.num_heads, spec.head_dim)
        k = ops.linear(x, layer.k, layer.k_bias).view(-1, spec.num_kv_heads, spec.head_dim)
        v = ops.linear(x, layer.v, layer.v_bias).view(-1, spec.num_kv_heads, spec.head_dim)
        if layer.q_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, spec.norm_eps)
        if layer.k_norm is not None:
            k = ops.rms_norm(k, layer.k_norm, spec.norm_eps)
        return q, k, v

    def _rotation(self, batch: TokenBatch) -> _Rotation:
        positions = torch.from_numpy(batch.positions).to(self.device, torch.float32)
        angles = (positions[:, None] * self._inv_freq).double()
        scale = self.spec.rope.scale
        return _Rotation(
            cos=angles.cos().float() * scale,
            sin=angles.sin().float() * scale,
            slots=torch.from_numpy(batch.slots).to(self.device, torch.int64),
            plan=ops.plan_attention(batch, [0], self.device, separate=False),
        )

    def _moved(self, module: ModuleWeights) -> ModuleWeights:
        return replace(
            module,
            embed_norm=self._vector(module.embed_norm),
            layer=moved(module.layer, self.device, self.dtype),
            norm=self._vector(module.norm),
            hidden_norm=None if module.hidden_norm is None else self._vector(module.hidden_norm),
            join=None if module.join is None else self._matrix(module.join),
        )

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.device, self.dtype)

    def _vector(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self.device, torch.float32)
