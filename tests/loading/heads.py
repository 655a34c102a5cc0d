"""Tiny draft heads as checkpoint folders, in each layout, and the targets they are made for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.loading import LoadedModel, load
from paceline.models.families import layer_name
from paceline.models.head_spec import HeadWeights
from tests.models.heads import make_head_spec, make_head_weights
from tests.tiny import HIDDEN, write_random
from tests.tiny_checkpoints import VOCAB

LAYERS = 8
DRAFT_VOCAB = 50


def target(folder: Path) -> LoadedModel:
    return load(str(write_random(folder / "target", layers=LAYERS)))


def eagle(**changes: Any) -> HeadWeights:
    """Random weights of a head for `target`; changes: of its spec."""
    sizes = {
        "capture": (2, 4, 5),
        "target_hidden_size": HIDDEN,
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "intermediate_size": 40,
        "num_heads": 3,
        "num_kv_heads": 1,
        "head_dim": 20,
    }
    return make_head_weights(make_head_spec(**(sizes | changes)))


BLOCK = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 30_000.0,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
}
ORIGINAL: Mapping[str, Any] = {
    **BLOCK,
    "architectures": ["LlamaForCausalLMEagle3"],
    "draft_vocab_size": DRAFT_VOCAB,
}
SPECULATORS: Mapping[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "draft_vocab_size": DRAFT_VOCAB,
    "norm_before_residual": False,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": None,
    "transformer_layer_config": BLOCK,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5, "accept_tolerance": 0.0}],
        "verifier": {"name_or_path": "made/target", "architectures": ["MistralForCausalLM"]},
    },
}
LAYOUTS = {"original": ORIGINAL, "speculators": SPECULATORS}


def tensors(weights: HeadWeights, layout: str, vocab: int = VOCAB) -> dict[str, Tensor]:
    """What a checkpoint of that layout holds of the weights: no embedding, offsets for ids."""
    assert weights.lm_head is not None
    assert weights.fc is not None
    module, block = weights.modules[0], {"original": "midlayer", "speculators": "layers.0"}[layout]
    found = {
        "fc.weight": weights.fc,
        "norm.weight": module.norm,
        "lm_head.weight": weights.lm_head,
        f"{block}.input_layernorm.weight": module.embed_norm,
        f"{block}.hidden_norm.weight": module.layer.attn_norm,
    }
    for part, tensor in vars(module.layer).items():
        if tensor is not None and part != "attn_norm":
            found[f"{block}.{layer_name(part)}"] = tensor
    if weights.target_ids is not None:
        found["d2t"] = weights.target_ids - torch.arange(len(weights.target_ids))
        found["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, weights.target_ids, True)
    if weights.input_norm is not None:
        found["input_norm.weight"] = weights.input_norm
    for i, norm in enumerate(weights.fc_norms):
        found[f"fc_norm.{i}.weight"] = norm
    return found


def write_head(
    folder: Path,
    layout: str = "original",
    weights: HeadWeights | None = None,
    *,
    change: Callable[[dict[str, Tensor]], Any] | None = None,
    drop: tuple[str, ...] = (),
    **config: Any,
) -> Path:
    """config: top-level values over those of the layout. change: of the tensors. drop: keys of the config."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = {key: value for key, value in {**LAYOUTS[layout], **config}.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(merged))
    found = tensors(weights or eagle(), layout)
    if change is not None:
        change(found)
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in found.items()}, folder / "model.safetensors"
    )
    return folder
