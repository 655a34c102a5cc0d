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
"""Of the features' own variance."""

_LARGEST_GAIN = 10.0


@dataclass(frozen=True, slots=True)
class Sample:
    """Pairs from the captured data. features: `[N, captured, hidden]` of a position, finals: `[N, hidden]`
    the target's last residual at the position after it, which is what a head is to foresee."""

    features: Tensor
    finals: Tensor


def start_parameters(
    shape: HeadShape, weights: DecoderWeights, vocabulary: Tensor, start: Start, seed: int, sample: Sample
) -> Parameters:
    """Float32, on the CPU. vocabulary: `[draft vocabulary]` target ids.

    Output matrix and final norm are the target's: they are the tokens' meaning, which a small budget cannot
    teach anew. The rest:

    random: normal with deviation 0.02, norms one.
    target: where shapes allow, the target's last layer; the fused feature is the last captured one and noise.
    fit: norms that bring every dimension of the features to the same scale (targets have some a hundred times
        as large as others), and of them the linear map that foresees the last residual best (ridge
        regression); the layer starts as nothing added to it.
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
        _fitted(parameters, shape, sample)
    return parameters


def _fitted(parameters: Parameters, shape: HeadShape, sample: Sample) -> None:
    features = sample.features.float()
    if shape.fc_norm:
        features = torch.nn.functional.rms_norm(features, features.shape[-1:], eps=shape.norm_eps)
        for place in range(features.shape[1]):
            gain = _gain(features[:, place])
            parameters[f"fc_norm.{place}.weight"] = gain
            features[:, place] *= gain
    finals = sample.finals.float()
    finals = finals / finals.square().mean().sqrt()
    parameters["fc.weight"] = _ridge(features.flatten(1), finals).t().contiguous()
    parameters["midlayer.hidden_norm.weight"] = _gain(finals)
    for name, matrix in parameters.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            matrix *= 0.1
        elif name.startswith("midlayer.") and matrix.dim() == 2:
            matrix *= matrix.shape[1] ** -0.5 / 0.02


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
