"""Specs against the transformers models they describe, and everything that must be refused."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from paceline.errors import ModelError
from paceline.models.families import assemble, blueprint, checkpoint_name, gguf_name, weight_shapes
from tests.tiny_checkpoints import CASES, tiny_config


def plain_config(case: str, **changes: Any) -> dict[str, Any]:
    """A config as a dict; None removes a key."""
    config = {**tiny_config(case).to_dict(), **changes}
    return {key: value for key, value in config.items() if value is not None or key == "sliding_window"}


def rotary(case: str) -> Any:
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(case))
    return model.model.rotary_emb


@pytest.mark.parametrize("case", CASES)
def test_rope_frequencies_equal_transformers_to_the_last_bit(case: str) -> None:
    reference = rotary(case)
    ropes = blueprint(plain_config(case)).spec.ropes
    if case.startswith("gemma3"):
        expected = [
            (getattr(reference, f"{kind}_inv_freq"), getattr(reference, f"{kind}_attention_scaling"))
            for kind in ("full_attention", "sliding_attention")
        ]
    else:
        expected = [(reference.inv_freq, reference.attention_scaling)]
    assert len(ropes) == len(expected)
    for rope, (inv_freq, scale) in zip(ropes, expected, strict=True):
        assert torch.equal(torch.tensor(rope.inv_freq), inv_freq)
        assert rope.scale == pytest.approx(scale, abs=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_names_and_shapes_are_those_of_the_transformers_model(case: str) -> None:
    import transformers

    config = tiny_config(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    plan = blueprint(plain_config(case))
    ours = {checkpoint_name(name, plan): shape for name, shape in weight_shapes(plan).items()}
    assert ours == {name: tuple(tensor.shape) for name, tensor in state.items()}


def test_sizes_and_scales() -> None:
    spec = blueprint(plain_config("gemma3")).spec
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (7, 4, 2, 32)
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.context_length) == (
        320,
        64,
        96,
        256,
    )
    assert spec.attn_scale == 24**-0.5
    assert spec.embed_scale == math.sqrt(64)
    assert (spec.activation, spec.qk_norm, spec.post_norms) == ("gelu_tanh", True, True)
    llama = blueprint(plain_config("llama")).spec
    assert (llama.attn_scale, llama.embed_scale, llama.activation) == (0.25, 1.0, "silu")
    assert (llama.qk_norm, llama.post_norms) == (False, False)


def test_windows() -> None:
    def windows(case: str, **changes: Any) -> list[tuple[int, int]]:
        return [(layer.window, layer.rope) for layer in blueprint(plain_config(case, **changes)).spec.layers]

    assert windows("mistral") == [(0, 0)] * 3
    assert windows("mistral-window") == [(8, 0)] * 3
    assert windows("qwen2") == [(0, 0)] * 3
    assert windows("qwen2-window") == [(0, 0), (8, 0), (8, 0)]
    assert windows("qwen2-window", layer_types=None) == [(0, 0), (8, 0), (8, 0)]
    assert windows("gemma3") == [(8, 1)] * 5 + [(0, 0), (8, 1)]
    assert windows("gemma3", layer_types=None) == [(8, 1)] * 5 + [(0, 0), (8, 1)]
    assert windows("gemma3", layer_types=None, sliding_window_pattern=2)[:4] == [(8, 1), (0, 0)] * 2


def test_a_mistral_config_without_sliding_window_has_the_default_of_4096() -> None:
    config = {key: value for key, value in plain_config("mistral").items() if key != "sliding_window"}
    assert blueprint(config).spec.layers[0].window == 4096


@pytest.mark.parametrize(
    ("case", "old"),
    [
        ("llama", {"rope_theta": 10000.0}),
        ("llama3-rope", {"rope_theta": 10000.0, "rope_scaling": CASES["llama3-rope"][1]["rope_parameters"]}),
        ("llama-linear", {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        (
            "qwen2-yarn",
            {
                "rope_theta": 10000.0,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            },
        ),
        ("gemma3", {"rope_theta": 1000000.0, "rope_local_base_freq": 10000.0}),
        (
            "gemma3-linear",
            {"rope_theta": 50000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
    ],
)
def test_the_older_spelling_of_rope_means_the_same(case: str, old: dict[str, Any]) -> None:
    assert blueprint(plain_config(case, rope_parameters=None, **old)) == blueprint(plain_config(case))


def test_multimodal_gemma_is_its_text_part() -> None:
    text = plain_config("gemma3", tie_word_embeddings=None)
    outer = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model"},
    }
    assert blueprint(outer) == blueprint(plain_config("gemma3"))


def test_a_sparse_gemma_config_is_completed_with_the_family_defaults() -> None:
    spec = blueprint(
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 34}}
    )
    assert (spec.spec.num_heads, spec.spec.head_dim, spec.spec.vocab_size) == (8, 256, 262208)
    assert spec.tied


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("llama", {"model_type": "mamba"}, ["mamba", "Llama", "Qwen 3", "Choose"]),
        ("llama", {"model_type": "gemma3", "text_config": None}, ["text_config", "Choose"]),
        (
            "llama",
            {"architectures": ["LlamaForCausalLMEagle3"]},
            ["LlamaForCausalLMEagle3", "LlamaForCausalLM"],
        ),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, ["gptq", "unquantised", "GGUF"]),
        ("llama", {"num_local_experts": 8}, ["num_local_experts", "dense"]),
        ("qwen3", {"num_experts": 8}, ["num_experts", "dense"]),
        ("gemma3", {"final_logit_softcapping": 30.0}, ["final_logit_softcapping", "30.0"]),
        ("gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        ("gemma3", {"use_bidirectional_attention": True}, ["use_bidirectional_attention", "causal"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "full rotary"]),
        ("llama", {"hidden_act": "relu"}, ["relu", "silu"]),
        ("llama", {"num_key_value_heads": 3}, ["4 attention heads", "3 key-value", "Correct"]),
        ("llama", {"hidden_size": None}, ["hidden_size", "None", "download"]),
        ("llama", {"num_hidden_layers": -1}, ["num_hidden_layers", "-1"]),
        ("llama", {"head_dim": 15}, ["head_dim=15", "even"]),
        ("qwen2-window", {"layer_types": ["full_attention"]}, ["layer_types", "3 layers"]),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, ["chunked_attention"]),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, ["sliding_window"]),
        ("mistral-window", {"layer_types": ["full_attention"] * 3}, ["layer_types", "sliding_window=8"]),
    ],
)
def test_what_cannot_be_run_exactly_is_refused(case: str, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        blueprint(plain_config(case, **changes), "some/config.json")
    for word in ["some/config.json", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "longrope"}, ["longrope", "yarn", "llama3"]),
        ({"rope_type": "dynamic", "factor": 2.0}, ["dynamic"]),
        ({"rope_type": "mrope"}, ["mrope"]),
        ({"rope_type": "linear"}, ["factor", "linear"]),
        ({"rope_type": "linear", "factor": "two"}, ["factor", "'two'", "not a number"]),
        ({"rope_type": "llama3", "factor": 2.0}, ["low_freq_factor"]),
    ],
)
def test_unknown_or_incomplete_ropes_are_refused(scaling: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        blueprint(plain_config("llama", rope_parameters=None, rope_scaling=scaling))
    for word in words:
        assert word in str(caught.value)


def test_gguf_names() -> None:
    assert gguf_name("embed") == "token_embd.weight"
    assert gguf_name("layers.12.o") == "blk.12.attn_output.weight"
    assert gguf_name("layers.0.post_mlp_norm") == "blk.0.post_ffw_norm.weight"
    assert gguf_name("layers.3.k_bias") == "blk.3.attn_k.bias"


def test_assemble_puts_every_weight_in_its_place() -> None:
    plan = blueprint(plain_config("qwen2"))
    weights = {name: torch.full((1,), float(n)) for n, name in enumerate(weight_shapes(plan))}
    decoder = assemble(weights, 3)
    assert decoder.lm_head is None
    assert decoder.layers[2].v_bias is weights["layers.2.v_bias"]
    assert decoder.layers[1].q_norm is None
