"""A trained head on disk, in the layouts in which EAGLE-3 heads are published."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.train.head_shape import HeadShape, Parameters
from paceline.train.vocabulary import DraftVocabulary

Layout = Literal["eagle3", "speculators"]
LAYOUTS: tuple[str, ...] = get_args(Layout)

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
TRAINING = "training.json"
"""What the head was made of, and how; no loader needs it."""


def write_head(
    folder: Path,
    shape: HeadShape,
    parameters: Parameters,
    vocabulary: DraftVocabulary,
    training: Mapping[str, Any],
    *,
    target: str,
    layout: Layout = "eagle3",
) -> None:
    """Weights in bfloat16. What was there before stays whole until the new files are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in parameters.items()
    }
    if shape.draft_vocab_size < shape.vocab_size:
        tensors |= {"d2t": vocabulary.offsets, "t2d": vocabulary.members}
    config = _original_config(shape) if layout == "eagle3" else _speculators_config(shape, target)
    if layout == "speculators":
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    _replace_tensors(folder / WEIGHTS, tensors)
    _replace_text(folder / CONFIG, config)
    _replace_text(folder / TRAINING, training)


def _layer_config(shape: HeadShape) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": shape.context_length,
        "vocab_size": shape.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _flags(shape: HeadShape) -> dict[str, Any]:
    return {
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.hidden_size,
        "norm_before_residual": shape.norm_before_residual,
        "fc_norm": shape.fc_norm,
        "norm_output": shape.norm_output,
        "num_aux_hidden_states": len(shape.capture),
    }


def _original_config(shape: HeadShape) -> dict[str, Any]:
    # Nested ids count layers by their outputs: one less than the layer at whose entry the feature is taken.
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(shape),
        **_flags(shape),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [place - 1 for place in shape.capture],
        },
    }


def _speculators_config(shape: HeadShape, target: str) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "accept_tolerance": 0.0}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        **_flags(shape),
        "eagle_aux_hidden_state_layer_ids": list(shape.capture),
        "transformer_layer_config": _layer_config(shape),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _replace_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    fresh = path.with_name(f"{path.name}.new")
    save_file(dict(tensors), fresh, metadata={"format": "pt"})
    os.replace(fresh, path)


def _replace_text(path: Path, content: Mapping[str, Any]) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(fresh, path)
