"""What a decoder is, as data. A family maps its checkpoint's config to a `DecoderSpec`; nothing
downstream asks for the family again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding in the half-split ("neox") layout.

    inv_freq: `head_dim / 2` inverse frequencies, scaling (linear, llama3, yarn) already applied.
    scale: factor on cos and sin (1 except for yarn).
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class LayerSpec:
    """One layer's attention. window: number of visible positions including the own one, 0 = all."""

    window: int = 0
    rope: int = 0


@dataclass(frozen=True)
class DecoderSpec:
    """A dense pre-norm decoder: attention and gated MLP on a residual stream.

    Norm weights are stored ready to multiply (Gemma's `1 + w` is folded in at load time).
    Sizes are counts of elements; `context_length` counts tokens.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    norm_eps: float
    attn_scale: float
    activation: Activation = "silu"
    embed_scale: float = 1.0
    qk_norm: bool = False
    post_norms: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def checked_capture(self, capture: Sequence[int]) -> tuple[int, ...]:
        """Places in the residual stream: i = the entry of layer i (0 = the embeddings, scaled), `num_layers`
        = what the last layer gives, before the final norm. Raises ValueError for one that is not there, or
        there twice."""
        wrong = [at for at in capture if not 0 <= at <= self.num_layers]
        if wrong or len(set(capture)) < len(capture):
            raise ValueError(
                f"capture is {tuple(capture)}: give different places from 0 to {self.num_layers}, the layers"
            )
        return tuple(capture)

    def checked_depth(self, layers: int | None) -> int:
        """How many layers a pass runs that is asked for the first `layers`, None = all. Raises ValueError."""
        if layers is not None and not 1 <= layers <= self.num_layers:
            raise ValueError(
                f"a pass through {layers} layers of {self.num_layers}: give 1 to {self.num_layers}"
            )
        return self.num_layers if layers is None else layers


@dataclass
class LayerWeights:
    """Matrices are `[out, in]`, norms and biases are vectors. None = the model has no such part."""

    attn_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    post_attn_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None


@dataclass
class DecoderWeights:
    """All weights of one decoder. `lm_head is None` means tied to `embed` (`[vocab, hidden]`)."""

    embed: Tensor
    final_norm: Tensor
    layers: list[LayerWeights] = field(default_factory=list)
    lm_head: Tensor | None = None
