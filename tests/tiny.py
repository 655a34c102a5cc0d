"""Tiny models written as Hugging Face folders, for tests that go through the public faces.

`write_random` makes a two-layer Llama whose every next token depends on the whole prefix. `write_markov`
makes a model whose next-token logits are a given row per current token, so that a test can prescribe its
output.
"""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.tiny_checkpoints import VOCAB, tiny_tokenizer

Array = NDArray[np.float32]

ENGINE: Mapping[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1}
"""Options every test engine runs with: exact arithmetic on one thread of the native kernels."""
DRAFTED: Mapping[str, Any] = {**ENGINE, "draft_dtype": "float32"}
"""With a draft model."""

HIDDEN = 48
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 12


def letters_tokenizer(letters: str) -> tokenizers.Tokenizer:
    """One token per letter, ids in the order given."""
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def write_random(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 2,
    context: int = 256,
    window: int = 0,
    eos: Sequence[int] = (),
    tied_rows: Sequence[tuple[int, int]] = (),
    head_noise: float = 0.0,
    broken_token: int | None = None,
    tokenizer: tokenizers.Tokenizer | None = None,
) -> Path:
    """window: sliding attention window of every layer. tied_rows: pairs of tokens of equal logits.
    head_noise: share of noise in the head, for a draft model that is often but not always right.
    broken_token: a token whose embedding is infinite, as after an overflow.
    """
    rng = np.random.default_rng(seed)
    tensors = _body(layers, HIDDEN, HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, rng)
    head = _normal(rng, VOCAB, HIDDEN) * np.float32(3.0)
    head += head_noise * 3.0 * _normal(np.random.default_rng(99), VOCAB, HIDDEN)
    for one, other in tied_rows:
        head[other] = head[one]
    tensors["model.embed_tokens.weight"] = _normal(rng, VOCAB, HIDDEN) * np.float32(HIDDEN**0.5)
    if broken_token is not None:
        tensors["model.embed_tokens.weight"][broken_token] = np.inf
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    tensors["lm_head.weight"] = head
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    config = _config(VOCAB, HIDDEN, layers, context, window, eos, shape)
    return _write(folder, config, tensors, tokenizer or tiny_tokenizer())


def write_markov(
    folder: Path,
    logits: NDArray[np.floating[Any]],
    *,
    context: int = 256,
    eos: Sequence[int] = (),
    tokenizer: tokenizers.Tokenizer | None = None,
) -> Path:
    """logits: `[vocab, vocab]`, row i = the logits of the token after token i."""
    size = len(logits)
    hidden = size + size % 2
    tensors = _body(1, hidden, 8, 8, None)
    embed = np.zeros((size, hidden), np.float32)
    embed[np.arange(size), np.arange(size)] = 1.0
    head = np.zeros((size, hidden), np.float32)
    head[:, :size] = logits.T
    tensors["model.embed_tokens.weight"] = embed
    # The final norm maps a unit vector to sqrt(hidden) times itself.
    tensors["model.norm.weight"] = np.full(hidden, hidden**-0.5, np.float32)
    tensors["lm_head.weight"] = head
    config = _config(size, hidden, 1, context, 0, eos, {"heads": 1, "kv_heads": 1, "head_dim": 8})
    return _write(folder, config, tensors, tokenizer or letters_tokenizer(string.ascii_letters[:size]))


def successor_logits(size: int, successors: Mapping[int, int], default: int, margin: float = 20.0) -> Array:
    """Markov logits under which `successors[i]` (else `default`) follows i, the others far behind, apart."""
    logits = np.tile(np.linspace(0.0, -1.0, size, dtype=np.float32), (size, 1))
    for token in range(size):
        logits[token, successors.get(token, default)] += margin
    return logits


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _body(
    layers: int, hidden: int, q_size: int, kv_size: int, rng: np.random.Generator | None
) -> dict[str, Array]:
    """Layers of random weights, or (without rng) layers that leave the residual stream alone."""
    inner = 2 * hidden
    shapes = {
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors: dict[str, Array] = {}
    for layer in range(layers):
        for name, shape in shapes.items():
            weight = np.zeros(shape, np.float32) if rng is None else _normal(rng, *shape) * np.float32(1.7)
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(hidden, np.float32)
    return tensors


def _normal(rng: np.random.Generator, rows: int, columns: int) -> Array:
    return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)


def _config(
    vocab: int,
    hidden: int,
    layers: int,
    context: int,
    window: int,
    eos: Sequence[int],
    shape: Mapping[str, int],
) -> dict[str, Any]:
    return {
        "model_type": "mistral" if window else "llama",
        "architectures": ["MistralForCausalLM" if window else "LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"],
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-12,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": list(eos) or None,
        **({"sliding_window": window} if window else {}),
    }


def _write(
    folder: Path, config: dict[str, Any], tensors: dict[str, Array], tokenizer: tokenizers.Tokenizer
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
