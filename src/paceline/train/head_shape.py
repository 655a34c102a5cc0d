"""The head that is trained: its sizes and its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import ConfigError, ModelError
from paceline.models.spec import DecoderSpec, RopeSpec

Parameters = dict[str, Tensor]
"""By their names in the original EAGLE-3 layout; matrices `[out, in]`."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """An EAGLE-3 head for a target. capture: capture indices of the features that it fuses.

    norm_before_residual: the residual stream starts from the normed feature. fc_norm: a norm per captured
    feature before they are fused, norm_output: the next step is fed the normed output (both EAGLE 3.1).
    rope_theta: base of the rotary embedding, which is unscaled. context_length: the target's.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    vocab_size: int
    capture: tuple[int, ...]
    norm_eps: float
    rope_theta: float
    context_length: int
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def inv_freq(self) -> Tensor:
        """`[head_dim / 2]` float32."""
        exponents = torch.arange(0, self.head_dim, 2).float() / self.head_dim
        return 1.0 / self.rope_theta**exponents


def default_capture(num_layers: int) -> tuple[int, ...]:
    """Early, middle and late, as the published heads have it. Raises ConfigError for a target too shallow."""
    capture = (2, num_layers // 2, num_layers - 3)
    if not 0 < capture[0] < capture[1] < capture[2]:
        raise ConfigError(f"a target of {num_layers} layers has no three places to capture: name them.")
    return capture


def head_shape(
    spec: DecoderSpec,
    draft_vocab_size: int,
    *,
    capture: tuple[int, ...] = (),
    intermediate_size: int = 0,
    num_kv_heads: int = 0,
    norm_before_residual: bool = False,
    fc_norm: bool = False,
    norm_output: bool = False,
) -> HeadShape:
    """A head as wide as the target. Raises ModelError for a target whose like a head cannot be."""
    if spec.activation != "silu" or spec.embed_scale != 1.0:
        raise ModelError(
            f"a head for the family {spec.family} is not supported: its activation or its scaled embedding "
            "has no place in the EAGLE-3 layout."
        )
    kv_heads = num_kv_heads or spec.num_kv_heads
    if spec.num_heads % kv_heads:
        raise ConfigError(
            f"{spec.num_heads} heads cannot share {kv_heads} key-value heads evenly: choose a divisor."
        )
    return HeadShape(
        hidden_size=spec.hidden_size,
        intermediate_size=intermediate_size or spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=kv_heads,
        head_dim=spec.head_dim,
        draft_vocab_size=draft_vocab_size,
        vocab_size=spec.vocab_size,
        capture=capture or default_capture(spec.num_layers),
        norm_eps=spec.norm_eps,
        rope_theta=_base_of(spec.ropes[spec.layers[-1].rope], spec.head_dim),
        context_length=spec.context_length,
        norm_before_residual=norm_before_residual,
        fc_norm=fc_norm,
        norm_output=norm_output,
    )


def _base_of(rope: RopeSpec, head_dim: int) -> float:
    """The base of a rope's frequencies without its scaling, which spares the fastest ones or treats all
    alike; to the five digits in which bases are given."""
    if len(rope.inv_freq) < 2:
        return 10_000.0
    ratio = rope.inv_freq[1] / rope.inv_freq[0]
    return float(f"{ratio ** (-head_dim / 2):.5g}")


def parameter_shapes(shape: HeadShape) -> Mapping[str, tuple[int, ...]]:
    d, inner, count = shape.hidden_size, shape.intermediate_size, len(shape.capture)
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (d, count * d),
        "midlayer.input_layernorm.weight": (d,),
        "midlayer.hidden_norm.weight": (d,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * d),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * d),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * d),
        "midlayer.self_attn.o_proj.weight": (d, q),
        "midlayer.post_attention_layernorm.weight": (d,),
        "midlayer.mlp.gate_proj.weight": (inner, d),
        "midlayer.mlp.up_proj.weight": (inner, d),
        "midlayer.mlp.down_proj.weight": (d, inner),
        "norm.weight": (d,),
        "lm_head.weight": (shape.draft_vocab_size, d),
    }
    if shape.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (d,) for i in range(count)}
    return shapes
