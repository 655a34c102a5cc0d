"""What a draft head is, as data: a small decoder that reads the target's hidden states beside its tokens.

EAGLE-3 (arXiv 2503.01840), EAGLE 3.1 and the multi-token-prediction modules of DeepSeek-V3 (arXiv 2412.19437)
differ in flags only; nothing downstream asks for the kind.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.models.spec import Activation, RopeSpec

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.models.spec import LayerWeights


@dataclass(frozen=True)
class HeadSpec:
    """One pre-norm block (or `num_modules` of them) on a stream made from the target's features.

    What the head does with token x[p + 1], whose embedding is e, and with h of position p, which is `fuse` of
    the target's features there or the head's own output:

        joined:      x = join [embed_norm(e), hidden_norm(h)];  a = attn_norm(x)
        otherwise:   a = [embed_norm(e), attn_norm(h)];  x = attn_norm(h) if norm_before_residual else h
        then:        x += o attention(q a, k a, v a);  x += mlp(mlp_norm(x));  logits = lm_head norm(x)
        fed back:    norm(x) if norm_output else x

        fuse(f) = fc concat(f), with input_norm over the whole (`norm_before_fc`) or a norm per feature
        (`fc_norm`) before it; without fc the feature itself

    capture: the target's layers at whose entry a feature is taken (0 = embeddings, its number of layers =
    what its last layer leaves, before the final norm), in the order in which they are put together.
    target_hidden_size: width of one feature. vocab_size: rows of the embedding, the target's ids.
    draft_vocab_size: rows of the logits. zero_first: the embedding at position 0 is zero.
    context_length: positions for which the rope holds.
    """

    capture: tuple[int, ...]
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rope: RopeSpec
    norm_eps: float
    attn_scale: float
    activation: Activation = "silu"
    fused: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    joined: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    zero_first: bool = False
    num_modules: int = 1

    @property
    def attention_input(self) -> int:
        """Width of what queries, keys and values are made of."""
        return self.hidden_size if self.joined else 2 * self.hidden_size


@dataclass
class ModuleWeights:
    """The weights of one block. `layer.attn_norm` is EAGLE's `hidden_norm`; hidden_norm and join
    `[hidden, 2 hidden]` belong to joined heads."""

    embed_norm: Tensor
    layer: LayerWeights
    norm: Tensor
    hidden_norm: Tensor | None = None
    join: Tensor | None = None


@dataclass
class HeadWeights:
    """All weights of one head; matrices are `[out, in]`. None = the head has no such part.

    embed: `[vocab, hidden]`, often the target's own tensor. lm_head: `[draft_vocab, hidden]`; None = embed.
    target_ids: int64 `[draft_vocab]`, the target's id of each row of the logits; None = the same ids.
    """

    embed: Tensor
    modules: list[ModuleWeights]
    lm_head: Tensor | None = None
    target_ids: Tensor | None = None
    fc: Tensor | None = None
    input_norm: Tensor | None = None
    fc_norms: list[Tensor] = field(default_factory=list)


def module_shapes(spec: HeadSpec) -> dict[str, tuple[int, ...]]:
    """Every weight of one module but the biases, by the name of its field (those of the layer as
    `layer.q`), and its shape."""
    hidden, inner, wide = spec.hidden_size, spec.intermediate_size, spec.attention_input
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "embed_norm": (hidden,),
        "norm": (hidden,),
        "layer.attn_norm": (hidden,),
        "layer.q": (heads, wide),
        "layer.k": (kv_heads, wide),
        "layer.v": (kv_heads, wide),
        "layer.o": (hidden, heads),
        "layer.mlp_norm": (hidden,),
        "layer.gate": (inner, hidden),
        "layer.up": (inner, hidden),
        "layer.down": (hidden, inner),
    }
    if spec.joined:
        shapes |= {"hidden_norm": (hidden,), "join": (hidden, 2 * hidden)}
    if spec.qk_norm:
        shapes |= {"layer.q_norm": (spec.head_dim,), "layer.k_norm": (spec.head_dim,)}
    return shapes


def shared_shapes(spec: HeadSpec) -> dict[str, tuple[int, ...]]:
    """Every weight outside the modules, as `module_shapes`; `fc_norms.1` is the second of the list."""
    features = len(spec.capture)
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (spec.vocab_size, spec.hidden_size),
        "lm_head": (spec.draft_vocab_size, spec.hidden_size),
    }
    if spec.fused:
        shapes["fc"] = (spec.hidden_size, features * spec.target_hidden_size)
    if spec.norm_before_fc:
        shapes["input_norm"] = (features * spec.target_hidden_size,)
    if spec.fc_norm:
        shapes |= {f"fc_norms.{i}": (spec.target_hidden_size,) for i in range(features)}
    return shapes
