"""Write a draft model for the embedded one: its own weights with some layers left out.

    python benchmarks/pruned_draft.py --drop 14 20 --out DIR

Untrained, so it pays for nothing; it is there to exercise a real draft / target pair whose guesses are partly
right.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors.torch import save_file

from paceline.loading import load
from paceline.models.spec import LayerWeights

NAMES = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def write_pruned(out: Path, dropped: Collection[int]) -> Path:
    """A Hugging Face folder of the embedded model without the layers `dropped`, in bfloat16."""
    model = load("embedded")
    kept: list[LayerWeights] = [
        layer for index, layer in enumerate(model.weights.layers) if index not in dropped
    ]
    tensors = {
        "model.embed_tokens.weight": model.weights.embed,
        "model.norm.weight": model.weights.final_norm,
    }
    for index, layer in enumerate(kept):
        for part, name in NAMES.items():
            tensors[f"model.layers.{index}.{name}.weight"] = getattr(layer, part)
    out.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()},
        str(out / "model.safetensors"),
        metadata={"format": "pt"},
    )
    spec = model.spec
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": len(kept),
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": model.eos_token_ids[0],
    }
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model.tokenizer.save(out / "tokenizer.json")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--drop", type=int, nargs="+", default=[14])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    print(write_pruned(args.out, args.drop))


if __name__ == "__main__":
    main()
