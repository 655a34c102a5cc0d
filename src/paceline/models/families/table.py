"""The supported model families, as a table, and the one function that reads a config with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import ModelError
from paceline.models.families.blueprint import Blueprint
from paceline.models.families.rope import flatten, rope_parameters, rope_spec
from paceline.models.spec import Activation, DecoderSpec, LayerSpec, RopeSpec

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """One row of the table.

    defaults: values that the family's configs leave out. windows: attention window of each layer, 0 = all.
    qkv_bias: "always" for families whose q, k and v have a bias unasked, "config" to obey `attention_bias`.
    """

    title: str
    architectures: tuple[str, ...]
    defaults: Config
    windows: Callable[[Config, str], tuple[int, ...]]
    qkv_bias: Literal["never", "always", "config"] = "never"
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    scaled_embedding: bool = False
    local_rope: bool = False


def _full(config: Config, where: str) -> tuple[int, ...]:
    return (0,) * whole_number(config, "num_hidden_layers", where)


def _mistral_windows(config: Config, where: str) -> tuple[int, ...]:
    window = config.get("sliding_window") or 0
    layers = whole_number(config, "num_hidden_layers", where)
    kinds = set(config.get("layer_types") or ())
    if kinds and kinds != {"sliding_attention" if window else "full_attention"}:
        raise ModelError(
            f"{where}: layer_types {sorted(kinds)} contradicts sliding_window={window or None} of a mistral "
            "model, whose layers are all alike. Correct the file."
        )
    return (window,) * layers


def _qwen_windows(config: Config, where: str) -> tuple[int, ...]:
    window = (config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0
    first = config.get("max_window_layers") or 0
    layers = whole_number(config, "num_hidden_layers", where)
    kinds = config.get("layer_types") or [
        "sliding_attention" if window and index >= first else "full_attention" for index in range(layers)
    ]
    return _by_kind(kinds, window, layers, where)


def _gemma_windows(config: Config, where: str) -> tuple[int, ...]:
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    layers = whole_number(config, "num_hidden_layers", where)
    kinds = config.get("layer_types") or [
        "sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(layers)
    ]
    return _by_kind(kinds, config.get("sliding_window") or 0, layers, where)


def _by_kind(kinds: list[str], window: int, layers: int, where: str) -> tuple[int, ...]:
    known = {"full_attention", "sliding_attention"}
    if len(kinds) != layers or not set(kinds) <= known:
        raise ModelError(
            f"{where}: layer_types must name {layers} layers, each one of {sorted(known)}; "
            f"found {len(kinds)} of {sorted(set(kinds))}. Correct the file or choose another model."
        )
    if "sliding_attention" in kinds and window <= 0:
        raise ModelError(f"{where}: layer_types has sliding_attention but no sliding_window is set. Add it.")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


_QWEN_DEFAULTS = {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}

# The defaults are those of the transformers config classes: a saved config may leave them out.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "Llama 2 / 3.x, SmolLM2",
        ("LlamaForCausalLM",),
        {"max_position_embeddings": 2048},
        _full,
        qkv_bias="config",
        mlp_bias=True,
    ),
    "mistral": Family(
        "Mistral",
        ("MistralForCausalLM",),
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        _mistral_windows,
    ),
    "qwen2": Family("Qwen 2 / 2.5", ("Qwen2ForCausalLM",), _QWEN_DEFAULTS, _qwen_windows, qkv_bias="always"),
    # Qwen 2 with a module for multi-token prediction beside it (arXiv 2505.07608).
    "mimo": Family("MiMo 7B", ("MiMoForCausalLM",), _QWEN_DEFAULTS, _qwen_windows, qkv_bias="always"),
    "qwen3": Family(
        "Qwen 3 (dense)",
        ("Qwen3ForCausalLM",),
        _QWEN_DEFAULTS | {"head_dim": 128},
        _qwen_windows,
        qkv_bias="config",
        qk_norm=True,
    ),
    "gemma3_text": Family(
        "Gemma 3 (text)",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        _gemma_windows,
        qkv_bias="config",
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        scaled_embedding=True,
        local_rope=True,
    ),
}

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
_REFUSED_FEATURES: Mapping[str, str] = {
    "quantization_config": "a quantised checkpoint: use the unquantised one, or a GGUF file",
    "num_local_experts": "a mixture of experts: use a dense model",
    "num_experts": "a mixture of experts: use a dense model",
    "n_routed_experts": "a mixture of experts: use a dense model",
    "final_logit_softcapping": "soft-capped logits: use a model without them",
    "attn_logit_softcapping": "soft-capped attention logits: use a model without them",
    "use_bidirectional_attention": "bidirectional attention: use a causal language model",
}
# What a multimodal Gemma 3 config says outside its `text_config` and means for the text part too.
_GEMMA_OUTER = ("architectures", "quantization_config", "tie_word_embeddings")


def supported() -> str:
    """The supported families in one line, for messages."""
    return ", ".join(f"{family.title} [{kind}]" for kind, family in FAMILIES.items())


def blueprint(config: Config, where: str = "config.json") -> Blueprint:
    """Read a model config (the dict of a `config.json`) into a decoder.

    where: the file's name, for messages.
    Raises ModelError, naming what was found and what works, for anything that cannot be run exactly.
    """
    kind, family, config = _select(config, where)
    _refuse_features(config, where)
    heads = whole_number(config, "num_attention_heads", where)
    kv_heads = (
        whole_number(config, "num_key_value_heads", where) if config.get("num_key_value_heads") else heads
    )
    hidden = whole_number(config, "hidden_size", where)
    head_dim = whole_number(config, "head_dim", where) if config.get("head_dim") else hidden // heads
    if heads % kv_heads:
        raise ModelError(
            f"{where}: {heads} attention heads cannot share {kv_heads} key-value heads. Correct the file."
        )
    context = whole_number(config, "max_position_embeddings", where)
    windows = family.windows(config, where)
    spec = DecoderSpec(
        family=kind,
        vocab_size=whole_number(config, "vocab_size", where),
        hidden_size=hidden,
        intermediate_size=whole_number(config, "intermediate_size", where),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=context,
        layers=tuple(LayerSpec(window, int(family.local_rope and window > 0)) for window in windows),
        ropes=_ropes(config, family, head_dim, context, where),
        norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        attn_scale=float(config.get("query_pre_attn_scalar") or head_dim) ** -0.5,
        activation=_activation(config, family, where),
        embed_scale=math.sqrt(hidden) if family.scaled_embedding else 1.0,
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
    )
    tied = bool(config.get("tie_word_embeddings"))
    return Blueprint(spec, _biased(config, family), tied, family.norm_offset)


def _select(config: Config, where: str) -> tuple[str, Family, Config]:
    kind = config.get("model_type")
    if kind == "gemma3":
        kind = "gemma3_text"
        if not isinstance(config.get("text_config"), dict):
            raise ModelError(f"{where} has no text_config: its model has no text part. Choose another model.")
        shared = {key: config[key] for key in _GEMMA_OUTER if key in config}
        config = {**config["text_config"], **shared}
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or not isinstance(kind, str):
        raise ModelError(
            f"{where} describes model_type {kind!r}, which is not supported. Supported: {supported()}. "
            "Choose a model of one of these families."
        )
    for architecture in config.get("architectures") or ():
        if architecture not in family.architectures:
            raise ModelError(
                f"{where} describes architecture {architecture!r}, which is not a causal language model of a "
                f"supported family. Supported for {kind}: {', '.join(family.architectures)}."
            )
    return kind, family, {**family.defaults, **config}


def _refuse_features(config: Config, where: str) -> None:
    for key, meaning in _REFUSED_FEATURES.items():
        if config.get(key):
            found = config[key]
            if isinstance(found, dict):
                found = found.get("quant_method", found)
            raise ModelError(
                f"{where} has {key}={found!r}, which is not supported: {meaning}. Supported: {supported()}."
            )


def whole_number(config: Config, key: str, where: str) -> int:
    """A count that config must hold. Raises ModelError otherwise."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ModelError(
            f"{where}: {key} must be a positive whole number, found {value!r}. "
            "Correct the file or download it again."
        )
    return value


def _activation(config: Config, family: Family, where: str) -> Activation:
    name = config.get("hidden_activation") or config.get("hidden_act")
    name = name or ("gelu_pytorch_tanh" if family.scaled_embedding else "silu")
    if name not in ACTIVATIONS:
        raise ModelError(
            f"{where} asks for activation {name!r}, which is not supported. "
            f"Supported: {', '.join(ACTIVATIONS)}. Choose another model."
        )
    return ACTIVATIONS[name]


def _biased(config: Config, family: Family) -> tuple[str, ...]:
    biased: tuple[str, ...] = ()
    if family.qkv_bias == "always":
        biased += ("q", "k", "v")
    elif family.qkv_bias == "config" and config.get("attention_bias"):
        biased += ("q", "k", "v", "o")
    if family.mlp_bias and config.get("mlp_bias"):
        biased += ("gate", "up", "down")
    return biased


def _ropes(config: Config, family: Family, head_dim: int, context: int, where: str) -> tuple[RopeSpec, ...]:
    if not family.local_rope:
        return (rope_spec(rope_parameters(config), head_dim, context, where),)
    nested = config.get("rope_parameters") or {}
    full = {**(nested.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
    local = nested.get("sliding_attention") or {}
    return (
        rope_spec(flatten(full, config["rope_theta"], config), head_dim, context, where),
        rope_spec(flatten(local, config["rope_local_base_freq"], config), head_dim, context, where),
    )
