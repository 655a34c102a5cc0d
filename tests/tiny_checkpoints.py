"""Tiny random models of every supported family, written as checkpoints and as GGUF files."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from gguf.quants import dequantize, quantize

VOCAB = 320
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_GEMMA = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "num_hidden_layers": 7,
}

# name -> (config class, what differs from _SIZES)
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama3-rope": ("LlamaConfig", {"rope_parameters": _LLAMA3_ROPE}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": _LINEAR_ROPE}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": _YARN_ROPE}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 8, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("Qwen2Config", {"rope_parameters": _YARN_ROPE}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3-biases": ("Qwen3Config", {"head_dim": 32, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", _GEMMA),
    "gemma3-linear": (
        "Gemma3TextConfig",
        {
            **_GEMMA,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
}


def tiny_config(case: str, **changes: Any) -> Any:
    """The transformers config of a case."""
    import transformers

    kind, differences = CASES[case]
    return getattr(transformers, kind)(**{**_SIZES, **differences, **changes})


def tiny_model(case: str, **changes: Any) -> Any:
    """A transformers model in float32 whose every weight matters."""
    import transformers

    torch.manual_seed(0)
    config = tiny_config(case, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.15))
    return model.float()


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model(torch.tensor([ids])).logits[0].float()


def tiny_ids(length: int = 40) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def save_checkpoint(model: Any, folder: Path, **options: Any) -> Path:
    """A complete checkpoint folder, tokenizer included."""
    model.save_pretrained(folder, **options)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of `config.json`; None removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def tiny_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE of exactly VOCAB tokens, with `<unk>`, `<s>` and `</s>` at 0, 1 and 2."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the quick brown fox jumps over the lazy dog while the other dogs and foxes look at the moon"
    text += " counting stars in the quiet night, wondering whether anything out there is looking back at them"
    tokenizer.train_from_iterator([text] * 3, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    return tokenizer


# ---- GGUF --------------------------------------------------------------------------------------------

_GGUF_ARCH = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
_GGUF_NAMES = [
    (r"model\.embed_tokens\.", "token_embd."),
    (r"model\.norm\.", "output_norm."),
    (r"lm_head\.", "output."),
    (r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.", r"blk.\1.attn_\2."),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj\.", r"blk.\1.attn_output."),
    (r"model\.layers\.(\d+)\.self_attn\.([qk])_norm\.", r"blk.\1.attn_\2_norm."),
    (r"model\.layers\.(\d+)\.mlp\.(gate|up|down)_proj\.", r"blk.\1.ffn_\2."),
    (r"model\.layers\.(\d+)\.input_layernorm\.", r"blk.\1.attn_norm."),
    (r"model\.layers\.(\d+)\.pre_feedforward_layernorm\.", r"blk.\1.ffn_norm."),
    (r"model\.layers\.(\d+)\.post_feedforward_layernorm\.", r"blk.\1.post_ffw_norm."),
]
_NORM_AFTER_ATTENTION = r"model\.layers\.(\d+)\.post_attention_layernorm\."


def quantise_matrices(model: Any, quantisation: str) -> None:
    """Round a model's matrices to what a GGUF quantisation can hold."""
    if quantisation == "F32":
        return
    kind = gguf.GGMLQuantizationType[quantisation]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                rounded = dequantize(quantize(parameter.numpy(), kind), kind)
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(rounded, dtype=np.float32)))


def write_gguf(
    model: Any,
    path: Path,
    quantisation: str = "F32",
    *,
    drop: str | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    **metadata: Any,
) -> Path:
    """Write a transformers model as llama.cpp's converter does. drop / extra / metadata: to break it."""
    config = model.config
    arch = _GGUF_ARCH[config.model_type]
    writer = gguf.GGUFWriter(path, metadata.pop("arch", arch))
    _write_config(writer, arch, config, metadata)
    _write_vocabulary(writer)
    for name, tensor in {**_gguf_tensors(model, arch), **(extra or {})}.items():
        if name == drop:
            continue
        if tensor.ndim == 2 and quantisation != "F32":
            kind = gguf.GGMLQuantizationType[quantisation]
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_config(writer: gguf.GGUFWriter, arch: str, config: Any, metadata: Mapping[str, Any]) -> None:
    rope = config.rope_parameters
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for key, value in metadata.items():
        full = key.replace("__", ".").replace("ARCH", arch)
        if isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, list):
            writer.add_array(full, value)
        else:
            writer.add_uint32(full, value)


def _write_vocabulary(writer: gguf.GGUFWriter) -> None:
    saved = json.loads(tiny_tokenizer().to_str())
    vocabulary: dict[str, int] = saved["model"]["vocab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocabulary, key=lambda token: vocabulary[token]))
    writer.add_token_types([2, 3, 3, *[1] * (VOCAB - 3)])
    writer.add_token_merges([" ".join(merge) for merge in saved["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}")


def _gguf_tensors(model: Any, arch: str) -> dict[str, np.ndarray]:
    config, tensors = model.config, {}
    for name, tensor in model.state_dict().items():
        array = tensor.detach().float().numpy()
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if arch == "llama" and re.search(r"\.[qk]_proj\.", name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            split = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = split.swapaxes(1, 2).reshape(array.shape)
        if arch == "gemma3" and name.endswith("norm.weight"):
            array = array + 1
        after = "post_attention_norm" if arch == "gemma3" else "ffn_norm"
        for pattern, new in [*_GGUF_NAMES, (_NORM_AFTER_ATTENTION, rf"blk.\1.{after}.")]:
            name = re.sub(pattern, new, name)
        tensors[name] = np.ascontiguousarray(array)
    return tensors
