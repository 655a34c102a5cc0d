"""Tiny modules for multi-token prediction, named as each family names them, and targets that hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, edit_config, write_random

LAYERS = 3
OWN = {
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "qwen3-next": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}


def place(layout: str, module: int) -> tuple[str, str]:
    """Prefixes of a module's own weights and of its block."""
    if layout == "deepseek":
        return (f"model.layers.{LAYERS + module}.",) * 2
    if layout == "mimo":
        return (f"model.mtp_layers.{module}.",) * 2
    return "mtp.", f"mtp.layers.{module}."


def module_tensors(layout: str, module: int = 0, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed + 10 * module)
    own, block = place(layout, module)
    inner, q, kv = 2 * HIDDEN, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    embed_norm, hidden_norm, join, norm = (f"{own}{name}.weight" for name in OWN[layout])
    shapes = {
        **dict.fromkeys((embed_norm, hidden_norm, norm), (HIDDEN,)),
        join: (HIDDEN, 2 * HIDDEN),
        f"{block}input_layernorm.weight": (HIDDEN,),
        f"{block}post_attention_layernorm.weight": (HIDDEN,),
        f"{block}self_attn.q_proj.weight": (q, HIDDEN),
        f"{block}self_attn.k_proj.weight": (kv, HIDDEN),
        f"{block}self_attn.v_proj.weight": (kv, HIDDEN),
        f"{block}self_attn.o_proj.weight": (HIDDEN, q),
        f"{block}mlp.gate_proj.weight": (inner, HIDDEN),
        f"{block}mlp.up_proj.weight": (inner, HIDDEN),
        f"{block}mlp.down_proj.weight": (HIDDEN, inner),
    }
    middle = 0.0 if layout == "qwen3-next" else 1.0
    return {
        name: (
            middle + 0.1 * torch.randn(shape, generator=generator)
            if len(shape) == 1
            else torch.randn(shape, generator=generator) * shape[1] ** -0.5
        )
        for name, shape in shapes.items()
    }


def modules(layout: str, count: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for module in range(count):
        found |= {
            name: tensor for name, tensor in module_tensors(layout, module).items() if name not in found
        }
    return found


def write_target(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """A target whose checkpoint holds these tensors too."""
    write_random(folder, layers=LAYERS)
    path = folder / "model.safetensors"
    save_file({**load_file(path), **{name: t.clone() for name, t in tensors.items()}}, path)
    edit_config(folder, **config)
    return folder
