"""What every weight of a decoder is called in `DecoderWeights`, in a checkpoint and in a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from paceline.models.families.blueprint import Blueprint
from paceline.models.spec import DecoderWeights, LayerWeights

_TOP_CHECKPOINT = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
_LAYER_CHECKPOINT = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
# With norms on both sides of a block, `post_attention_layernorm` means what it says.
_SANDWICH_CHECKPOINT = {
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_attn_norm": "post_attention_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}
_TOP_GGUF = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}
_LAYER_GGUF = {
    "attn_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "gate_bias": "ffn_gate.bias",
    "up_bias": "ffn_up.bias",
    "down_bias": "ffn_down.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
}


def weight_shapes(blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    """Every weight the decoder has, by its own name (`embed`, `layers.3.q_bias`), and its shape."""
    spec = blueprint.spec
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (spec.vocab_size, spec.hidden_size),
        "final_norm": (spec.hidden_size,),
    }
    if not blueprint.tied:
        shapes["lm_head"] = (spec.vocab_size, spec.hidden_size)
    layer = _layer_shapes(blueprint)
    for index in range(spec.num_layers):
        shapes.update({f"layers.{index}.{part}": shape for part, shape in layer.items()})
    return shapes


def checkpoint_name(name: str, blueprint: Blueprint) -> str:
    """The name that transformers gives the weight `name`."""
    table = _LAYER_CHECKPOINT | (_SANDWICH_CHECKPOINT if blueprint.spec.post_norms else {})
    return _rename(name, _TOP_CHECKPOINT, "model.layers", table)


def layer_name(part: str) -> str:
    """What transformers calls a part of a layer (`q_bias`) within the layer."""
    return _LAYER_CHECKPOINT[part]


def gguf_name(name: str) -> str:
    """The name that llama.cpp gives the weight `name`."""
    return _rename(name, _TOP_GGUF, "blk", _LAYER_GGUF)


def is_norm(name: str) -> bool:
    return name.endswith("_norm")


def assemble(weights: Mapping[str, Tensor], num_layers: int) -> DecoderWeights:
    """Put named weights in their places. Every name must come from `weight_shapes`."""
    layers: list[dict[str, Tensor]] = [{} for _ in range(num_layers)]
    for index, part, tensor in _layer_parts(weights):
        layers[index][part] = tensor
    return DecoderWeights(
        embed=weights["embed"],
        final_norm=weights["final_norm"],
        layers=[LayerWeights(**layer) for layer in layers],
        lm_head=weights.get("lm_head"),
    )


def _layer_parts(weights: Mapping[str, Tensor]) -> Iterator[tuple[int, str, Tensor]]:
    for name, tensor in weights.items():
        if name.startswith("layers."):
            _, index, part = name.split(".")
            yield int(index), part, tensor


def _layer_shapes(blueprint: Blueprint) -> dict[str, tuple[int, ...]]:
    spec = blueprint.spec
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "mlp_norm": (hidden,),
        "q": (q_width, hidden),
        "k": (kv_width, hidden),
        "v": (kv_width, hidden),
        "o": (hidden, q_width),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if spec.qk_norm:
        shapes.update(q_norm=(spec.head_dim,), k_norm=(spec.head_dim,))
    if spec.post_norms:
        shapes.update(post_attn_norm=(hidden,), post_mlp_norm=(hidden,))
    shapes.update({f"{part}_bias": shapes[part][:1] for part in blueprint.biased})
    return shapes


def _rename(name: str, top: Mapping[str, str], prefix: str, table: Mapping[str, str]) -> str:
    if not name.startswith("layers."):
        return top[name]
    _, index, part = name.split(".")
    return f"{prefix}.{index}.{table[part]}"
