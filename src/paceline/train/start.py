"""What the parameters of a head start from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from paceline.models.spec import DecoderWeights
from paceline.train.head_shape import HeadShape, Parameters, parameter_shapes

Start = Literal["fit", "target", "random"]
STARTS: tuple[str, ...] = get_args(Start)

_RIDGE = 0.01
"""Of the inputs' own variance."""

_LARGEST_GAIN = 10.0

_NEAR = 6
"""Fast rotary pairs of a head that turn its attention to the place itself."""

_NEARNESS = 6.0
"""Their part of a query and of a key; the square of it over sqrt(head_dim), times _NEAR, is the score."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Neighbouring positions from the captured data. features: `[N, captured, hidden]` of a position. finals:
    `[N, hidden]`, the target's last residual there. tokens: `[N]`, the token after it. following:
    `[N, hidden]`, the last residual at that token."""

    features: Tensor
    finals: Tensor
    tokens: Tensor
    following: Tensor


def start_parameters(
    shape: HeadShape, weights: DecoderWeights, vocabulary: Tensor, start: Start, seed: int, sample: Sample
) -> Parameters:
    """Float32, on the CPU. vocabulary: `[draft vocabulary]` target ids.

    Output matrix and final norm are the target's: they are the tokens' meaning, which a small budget cannot
    teach anew. The rest:

    random: normal with deviation 0.02, norms one.
    target: where shapes allow, the target's last layer; the fused feature is the last captured one and noise.
    fit: a linear head, by ridge regression. The fused feature is the best guess of the target's last residual
        at its position, and what the attention adds to it the best guess of the step from there to the next
        position's, given the token: so the head's own output means what it was fed, step after step. Norms
        bring every dimension of the features to the same scale (targets have some a hundred times as large
        as others).
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * 0.02
        for name, size in parameter_shapes(shape).items()
    }
    head = weights.embed if weights.lm_head is None else weights.lm_head
    parameters["lm_head.weight"] = head[vocabulary].float().clone()
    parameters["norm.weight"] = weights.final_norm.float().clone()
    if start == "target":
        _from_last_layer(parameters, shape, weights)
    elif start == "fit":
        _fitted(parameters, shape, weights, sample)
    return parameters


def _fitted(parameters: Parameters, shape: HeadShape, weights: DecoderWeights, sample: Sample) -> None:
    norm, ones = parameters["norm.weight"], torch.ones(shape.hidden_size)
    now, then = (_normed(x.float(), norm, shape) for x in (sample.finals, sample.following))
    # The stream holds what the output matrix reads, evened out: the final norm's weight is in it already.
    scale = now.square().mean().sqrt()
    now, then = now / scale, then / scale
    parameters["norm.weight"] = ones * scale
    features = sample.features.float()
    if shape.fc_norm:
        features = _normed(features, ones, shape)
        for place in range(features.shape[1]):
            gain = _gain(features[:, place])
            parameters[f"fc_norm.{place}.weight"] = gain
            features[:, place] *= gain
    parameters["fc.weight"] = _ridge(features.flatten(1), now).t().contiguous()
    for name, matrix in parameters.items():
        if name.startswith("midlayer.") and matrix.dim() == 2:
            matrix *= matrix.shape[1] ** -0.5 / 0.02
    parameters["midlayer.mlp.down_proj.weight"] *= 0.1
    embedded = _normed(weights.embed[sample.tokens].float(), ones, shape)
    _step_by_value(parameters, shape, torch.cat([embedded, now], dim=1), then - now)


def _step_by_value(parameters: Parameters, shape: HeadShape, x: Tensor, step: Tensor) -> None:
    """Values and output matrix such that a place which attends to itself adds the linear guess of `step` from
    what the attention reads, `x` `[N, 2 hidden]`; one head of each group, of as high a rank as fits. Queries
    and keys of these heads begin as a constant in their fastest rotary pairs, which is largest at distance 0:
    the part of `x` that is the same everywhere."""
    deviation = x.std(0).clamp(min=1e-6)
    inward, strength, outward = torch.linalg.svd(deviation[:, None] * _ridge(x, step), full_matrices=False)
    dim, d, prefix = shape.head_dim, shape.hidden_size, "midlayer.self_attn."
    mean = x[:, d:].mean(0)
    always = mean / mean.square().sum()
    q, k, v, o = (parameters[f"{prefix}{name}_proj.weight"] for name in "qkvo")
    q *= 0.3
    k *= 0.3
    o *= 0.1
    near = min(_NEAR, dim // 2)
    for group in range(min(shape.num_kv_heads, len(strength) // dim)):
        key = group * dim
        query = key * (shape.num_heads // shape.num_kv_heads)
        part = slice(key, key + dim)
        root = strength[part].sqrt()
        v[part] = (inward[:, part] * root / deviation[:, None]).t()
        o[:, query : query + dim] = (root[:, None] * outward[part]).t()
        for matrix, first in ((q, query), (k, key)):
            matrix[first : first + near, d:] = _NEARNESS * always
            matrix[first : first + near, :d] = 0.0


def _normed(x: Tensor, weight: Tensor, shape: HeadShape) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, shape.norm_eps)


def _gain(x: Tensor) -> Tensor:
    """`[d]`: what brings each dimension of `x` `[N, d]` to the mean scale."""
    scale = x.square().mean(0).sqrt()
    return (x.square().mean().sqrt() / scale.clamp(min=1e-6)).clamp(1 / _LARGEST_GAIN, _LARGEST_GAIN)


def _ridge(x: Tensor, y: Tensor) -> Tensor:
    """`[in, out]`."""
    scale = x.square().mean(0).sqrt().clamp(min=1e-6)
    x = x / scale
    gram = x.t() @ x
    gram.diagonal().add_(_RIDGE * len(x))
    solution: Tensor = torch.linalg.solve(gram, x.t() @ y)
    return solution / scale[:, None]


def _from_last_layer(parameters: Parameters, shape: HeadShape, weights: DecoderWeights) -> None:
    last, first, d = weights.layers[-1], weights.layers[0], shape.hidden_size
    fc = parameters["fc.weight"]
    fc *= 0.1
    fc[:, -d:] += torch.eye(d)
    layer = {
        "hidden_norm": last.attn_norm,
        "input_layernorm": first.attn_norm,
        "post_attention_layernorm": last.mlp_norm,
        "self_attn.o_proj": last.o,
        "mlp.gate_proj": last.gate,
        "mlp.up_proj": last.up,
        "mlp.down_proj": last.down,
    }
    for name, tensor in layer.items():
        key = f"midlayer.{name}.weight"
        if parameters[key].shape == tensor.shape:
            parameters[key] = tensor.float().clone()
    for name, matrix in (("q", last.q), ("k", last.k), ("v", last.v)):
        wide = parameters[f"midlayer.self_attn.{name}_proj.weight"]
        if wide[:, d:].shape == matrix.shape:
            wide[:, d:] = matrix.float()
