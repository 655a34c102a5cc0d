"""Devices and models as numbers: what a roofline needs to know of either."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, ModelError, nearest, shown


@dataclass(frozen=True, slots=True)
class GPU:
    """flops: dense bfloat16, per second.  bandwidth, link: bytes per second of memory, and one way to the
    other devices of the host.  memory: bytes."""

    name: str
    flops: float
    bandwidth: float
    memory: float
    link: float


# Data sheets of the maker, without sparsity; the links are half of what they call bidirectional.
_GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        GPU("H100", 989.4e12, 3.35e12, 80e9, 450e9),  # SXM5
        GPU("H800", 989.4e12, 3.35e12, 80e9, 200e9),  # SXM5; the H100 with 8 of its 18 links
        GPU("H200", 989.4e12, 4.8e12, 141e9, 450e9),  # SXM5
        GPU("A100", 312e12, 2.039e12, 80e9, 300e9),  # SXM4, 80 GB
        GPU("L40S", 362.05e12, 0.864e12, 48e9, 32e9),  # PCIe 4.0 x16
    )
}


def gpu_named(name: str) -> GPU:
    """Raises ConfigError with the nearest name and the list."""
    if name.lower() not in _GPUS:
        raise ConfigError(f"no GPU is known as {name!r}: {nearest(name, gpu_names())}")
    return _GPUS[name.lower()]


def gpu_names() -> list[str]:
    return [gpu.name for gpu in _GPUS.values()]


@dataclass(frozen=True, slots=True)
class ShapeSpec:
    """A dense decoder with grouped-query attention and a gated MLP. bias: of query, key and value."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    bias: bool = False

    @property
    def parameters(self) -> int:
        """All of them: embeddings and, where it is not the same matrix, the output matrix too. Norms are
        left out: they are a ten-thousandth."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (query + key) + (query + 2 * key if self.bias else 0)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def kv_bytes_per_token(self) -> int:
        """With keys and values of 16 bits."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2

    @property
    def head_parameters(self) -> int:
        """Of an EAGLE-3 head for it: one layer that reads embedding and state side by side, the fusion of
        three states, and an output matrix of its own over 32,000 tokens, as published heads have."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden * (query + 2 * key) + query * self.hidden
        own = attention + 3 * self.hidden * self.intermediate
        return own + 3 * self.hidden * self.hidden + min(self.vocab, 32_000) * self.hidden


# From the config.json of each model's repository.
_SHAPES = {
    shape.name: shape
    for shape in (
        ShapeSpec("llama-3.1-8b", 4096, 14336, 32, 32, 8, 128, 128_256),
        ShapeSpec("llama-3-70b", 8192, 28672, 80, 64, 8, 128, 128_256),
        ShapeSpec("llama-3.2-1b", 2048, 8192, 16, 32, 8, 64, 128_256, tied=True),
        ShapeSpec("llama-3.2-3b", 3072, 8192, 28, 24, 8, 128, 128_256, tied=True),
        ShapeSpec("qwen2-72b", 8192, 29568, 80, 64, 8, 128, 152_064, bias=True),
        ShapeSpec("qwen2-7b", 3584, 18944, 28, 28, 4, 128, 152_064, bias=True),
        ShapeSpec("qwen2-1.5b", 1536, 8960, 28, 12, 2, 128, 151_936, tied=True, bias=True),
        ShapeSpec("qwen2-0.5b", 896, 4864, 24, 14, 2, 64, 151_936, tied=True, bias=True),
        ShapeSpec("qwen3-8b", 4096, 12288, 36, 32, 8, 128, 151_936),
        ShapeSpec("qwen3-0.6b", 1024, 3072, 28, 16, 8, 128, 151_936, tied=True),
        ShapeSpec("smollm2-135m", 576, 1536, 30, 9, 3, 64, 49_152, tied=True),
    )
}


def shape_of(model: str | ShapeSpec) -> ShapeSpec:
    """model: a known name, or a config.json or the folder of one. Raises ConfigError or ModelError."""
    if isinstance(model, ShapeSpec):
        return model
    if model.lower() in _SHAPES:
        return _SHAPES[model.lower()]
    path = Path(model)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json" or path.exists():
        return _read(path)
    raise ConfigError(
        f"no model shape is known as {model!r}, and it is no config.json: {nearest(model, shape_names())}"
    )


def shape_names() -> list[str]:
    return list(_SHAPES)


def _read(path: Path) -> ShapeSpec:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the model's shape from {path}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}): give a model's config.json.") from None
    content = content.get("text_config", content) if isinstance(content, dict) else None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no table: give a model's config.json.")
    experts = [name for name in content if "expert" in name and content[name]]
    if experts:
        raise ModelError(f"{path}: {experts[0]} is set, and only dense models have a roofline here.")
    heads, hidden = _whole(path, content, "num_attention_heads"), _whole(path, content, "hidden_size")
    return ShapeSpec(
        name=path.parent.resolve().name if path.name == "config.json" else path.stem,
        hidden=hidden,
        intermediate=_whole(path, content, "intermediate_size"),
        layers=_whole(path, content, "num_hidden_layers"),
        heads=heads,
        kv_heads=_whole(path, content, "num_key_value_heads", heads),
        head_dim=_whole(path, content, "head_dim", max(hidden // heads, 1)),
        vocab=_whole(path, content, "vocab_size"),
        tied=bool(content.get("tie_word_embeddings", False)),
        bias=bool(content.get("attention_bias", content.get("model_type") == "qwen2")),
    )


def _whole(path: Path, content: dict[str, Any], name: str, default: int | None = None) -> int:
    value = content.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"{path}: {name} is missing: give the config.json of a decoder.")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise ModelError(f"{path}: {name} is {shown(value)}: it must be a whole number from 1.")
    return value


MOST_BITS = 64.0
"""Of a weight."""


def positive(name: str, value: float, most: float = inf) -> float:
    """Raises ConfigError unless `value` is finite, above 0 and not above `most`."""
    if not (isfinite(value) and 0.0 < value <= most):
        limit = f", {most:g} at most" if most < inf else ""
        raise ConfigError(f"{name} is {shown(value)}: it must be a number above 0{limit}.")
    return value
