"""Random draft heads, passes over them, and the head computed anew from a text, without a cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.kv_cache import KVCache
from paceline.models.head import HeadDecoder
from paceline.models.head_spec import HeadSpec, HeadWeights, ModuleWeights, module_shapes, shared_shapes
from paceline.models.spec import LayerWeights

from .worlds import Piece, World, make_rope

EAGLE: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "eagle 3.1": {"fc_norm": True, "norm_output": True},
    "everything": {
        "fc_norm": True,
        "norm_output": True,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "qk_norm": True,
        "activation": "gelu_tanh",
    },
    "odd sizes": {
        "hidden_size": 70,
        "intermediate_size": 37,
        "target_hidden_size": 54,
        "num_heads": 3,
        "num_kv_heads": 1,
        "head_dim": 20,
        "draft_vocab_size": 33,
    },
    "one feature, whole vocabulary": {"capture": (5,), "draft_vocab_size": 131},
}
MTP: dict[str, dict[str, Any]] = {
    "mtp": {},
    "mtp of the normed state": {"norm_before_fc": True, "zero_first": True, "qk_norm": True},
    "two modules": {"num_modules": 2, "norm_output": True},
}
_MTP = {
    "joined": True,
    "fused": False,
    "capture": (6,),
    "hidden_size": 72,
    "target_hidden_size": 72,
    "draft_vocab_size": 131,
}
VARIANTS = EAGLE | {name: _MTP | changes for name, changes in MTP.items()}


def make_head_spec(**changes: Any) -> HeadSpec:
    base: dict[str, Any] = {
        "capture": (1, 3, 5),
        "target_hidden_size": 48,
        "vocab_size": 131,
        "draft_vocab_size": 61,
        "hidden_size": 72,
        "intermediate_size": 104,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "context_length": 1024,
        "norm_eps": 1e-5,
    }
    base |= changes
    base.setdefault("attn_scale", base["head_dim"] ** -0.5)
    base.setdefault("rope", make_rope(base["head_dim"], 10_000.0))
    return HeadSpec(**base)


def make_head_weights(spec: HeadSpec, seed: int = 0) -> HeadWeights:
    generator = torch.Generator().manual_seed(seed)

    def tensor(shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return 1 + 0.1 * torch.randn(shape, generator=generator)
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    shared = {name: tensor(shape) for name, shape in shared_shapes(spec).items()}
    shared["embed"] *= spec.hidden_size**0.5
    modules = []
    for _ in range(spec.num_modules):
        parts = {name: tensor(shape) for name, shape in module_shapes(spec).items()}
        layer = {name[6:]: parts.pop(name) for name in list(parts) if name.startswith("layer.")}
        modules.append(ModuleWeights(layer=LayerWeights(**layer), **parts))
    ids = torch.randperm(spec.vocab_size, generator=generator)[: spec.draft_vocab_size].sort().values
    return HeadWeights(
        embed=shared["embed"],
        modules=modules,
        lm_head=shared["lm_head"],
        target_ids=ids if spec.draft_vocab_size < spec.vocab_size else None,
        fc=shared.get("fc"),
        input_norm=shared.get("input_norm"),
        fc_norms=[tensor for name, tensor in shared.items() if name.startswith("fc_norms.")],
    )


def make_head(variant: str) -> tuple[HeadSpec, HeadWeights]:
    spec = make_head_spec(**VARIANTS[variant])
    return spec, make_head_weights(spec)


@dataclass
class HeadWorld(World):
    """A head, its cache and rows of committed slots, as `World`."""

    decoder: Any

    def new_cache(self) -> KVCache:
        head: HeadDecoder = self.decoder
        spec = head.spec
        return KVCache(spec.num_modules, self.num_slots, spec.num_kv_heads, spec.head_dim, head.kv_dtype)

    def step(self, *pieces: tuple[Piece, Tensor], module: int = 0) -> list[tuple[Tensor, Tensor]]:
        """One pass; of each piece the logits and the hidden states of its tokens, each fed `Tensor`."""
        batch, ends = self.batch(*(piece for piece, _ in pieces))
        hidden = torch.cat([hidden for _, hidden in pieces])
        logits, out = self.decoder.forward(batch, hidden, self.cache, module)
        return list(
            zip(logits.clone().tensor_split(ends), out.clone().tensor_split(ends), strict=True),
        )


def fuse(spec: HeadSpec, weights: HeadWeights, features: Tensor) -> Tensor:
    """`HeadDecoder.fuse` written straight from the definition, in float64."""
    parts = [features[:, i].double() for i in range(len(spec.capture))]
    if spec.fc_norm:
        parts = [_norm(part, norm, spec) for part, norm in zip(parts, weights.fc_norms, strict=True)]
    x = torch.cat(parts, dim=1)
    if spec.norm_before_fc:
        assert weights.input_norm is not None
        x = _norm(x, weights.input_norm, spec)
    return x @ weights.fc.double().T if weights.fc is not None else x


def recompute(
    spec: HeadSpec, weights: HeadWeights, tokens: list[int], hidden: Tensor, module: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits and fed-back states of a whole text in float64: all positions at once, no cache, no batch.

    tokens[p] is the token at position p + 1, hidden[p] the state of position p.
    """
    own = weights.modules[module]
    layer = own.layer
    n, h = len(tokens), hidden.double()
    e = weights.embed[tokens].double()
    if spec.zero_first:
        e[0] = 0
    e = _norm(e, own.embed_norm, spec)
    if spec.joined:
        assert own.join is not None
        assert own.hidden_norm is not None
        x = torch.cat((e, _norm(h, own.hidden_norm, spec)), 1) @ own.join.double().T
        a = _norm(x, layer.attn_norm, spec)
    else:
        x = _norm(h, layer.attn_norm, spec) if spec.norm_before_residual else h
        a = torch.cat((e, _norm(h, layer.attn_norm, spec)), 1)
    q = (a @ layer.q.double().T).view(n, spec.num_heads, spec.head_dim)
    k = (a @ layer.k.double().T).view(n, spec.num_kv_heads, spec.head_dim)
    v = (a @ layer.v.double().T).view(n, spec.num_kv_heads, spec.head_dim)
    if spec.qk_norm:
        assert layer.q_norm is not None
        assert layer.k_norm is not None
        q, k = _norm(q, layer.q_norm, spec), _norm(k, layer.k_norm, spec)
    q, k = _rotate(q, spec), _rotate(k, spec)
    mixed = torch.empty(n, spec.num_heads, spec.head_dim, dtype=torch.float64)
    for head in range(spec.num_heads):
        kv = head // (spec.num_heads // spec.num_kv_heads)
        scores = q[:, head] @ k[:, kv].T * spec.attn_scale
        scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        mixed[:, head] = scores.softmax(-1) @ v[:, kv]
    x = x + mixed.flatten(1) @ layer.o.double().T
    m = _norm(x, layer.mlp_norm, spec)
    gate, up = m @ layer.gate.double().T, m @ layer.up.double().T
    act = gate * gate.sigmoid()
    if spec.activation == "gelu_tanh":
        act = torch.nn.functional.gelu(gate, approximate="tanh")
    x = x + (act * up) @ layer.down.double().T
    normed = _norm(x, own.norm, spec)
    head_matrix = weights.embed if weights.lm_head is None else weights.lm_head
    return normed @ head_matrix.double().T, normed if spec.norm_output else x


def _norm(x: Tensor, weight: Tensor, spec: HeadSpec) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + spec.norm_eps).sqrt() * weight.double()


def _rotate(x: Tensor, spec: HeadSpec) -> Tensor:
    """Pairs (i, i + D / 2) as complex numbers, turned by position times frequency."""
    angles = np.outer(np.arange(len(x)), np.array(spec.rope.inv_freq))
    turn = torch.from_numpy(np.exp(1j * angles) * spec.rope.scale)[:, None]
    a, b = x.chunk(2, dim=-1)
    turned = torch.complex(a.contiguous(), b.contiguous()) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)
