"""Reading a GGUF file: metadata, the decoder it describes, and its weights as plain numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import ModelError
from paceline.loading.gguf_reader import metadata_of, open_gguf
from paceline.models.families import Blueprint, blueprint, gguf_name, weight_shapes
from paceline.models.families.rope import divide

# GGUF architecture -> the `model_type` whose arithmetic it has.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}

_ROPE_FACTORS = "rope_freqs.weight"
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "F64": torch.float64}


class GgufFile:
    """One GGUF file, memory-mapped.

    metadata: every key and its value. blueprint: the decoder. Raises ModelError for anything that is
    damaged or cannot be run exactly.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = open_gguf(path)
        self.metadata = metadata_of(reader)
        if self.metadata.get("split.count", 0) > 1:
            raise ModelError(
                f"{path} is one part of a split model. Join the parts with `llama-gguf-split --merge`."
            )
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self.metadata.get("general.architecture"))
        self.blueprint = self._blueprint()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight of the decoder by its own name, dequantised, one at a time, in a fixed order.

        Floating-point tensors keep their type, quantised ones become float32, which is exact.
        Raises ModelError, before the first weight, for a missing, unexpected, misshapen or unreadable tensor.
        """
        shapes = weight_shapes(self.blueprint)
        self._check(shapes)
        for name in shapes:
            yield name, self._restore(name, self._tensor(gguf_name(name)))

    def _blueprint(self) -> Blueprint:
        where = str(self.path)
        config = _Config(self).to_dict()
        plan = blueprint(config, where)
        # The offset of 1 is already in the stored norms (llama.cpp's convert_hf_to_gguf.py).
        plan = replace(plan, norm_offset=0.0)
        if _ROPE_FACTORS in self._tensors:
            rope = divide(plan.spec.ropes[0], self._tensor(_ROPE_FACTORS), f"{where}: {_ROPE_FACTORS}")
            plan = replace(plan, spec=replace(plan.spec, ropes=(rope, *plan.spec.ropes[1:])))
        return plan

    def _check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        expected = {gguf_name(name): shape for name, shape in shapes.items()}
        missing = [name for name in expected if name not in self._tensors]
        if missing:
            raise ModelError(
                f"{self.path} lacks {len(missing)} tensors, the first is {missing[0]}. "
                "Download the file again or convert the model again."
            )
        for name, tensor in self._tensors.items():
            if name == _ROPE_FACTORS:
                continue
            if name not in expected:
                raise ModelError(
                    f"{self.path} holds the tensor {name}, which a {self.architecture} model as its metadata "
                    "describe it does not have: running without it would be wrong. Choose another file."
                )
            shape = tuple(int(size) for size in reversed(tensor.shape))
            if shape != expected[name]:
                raise ModelError(
                    f"{self.path}: tensor {name} has shape {list(shape)}, the metadata ask for "
                    f"{list(expected[name])}. Download the file again or convert the model again."
                )

    def _tensor(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        kind = tensor.tensor_type.name
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if kind in _PLAIN:
            return torch.from_numpy(np.array(tensor.data)).to(_PLAIN[kind]).reshape(shape)
        if kind == "BF16":
            return torch.from_numpy(np.array(tensor.data)).view(torch.bfloat16).reshape(shape)
        try:
            values: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} has the quantisation {kind}, which cannot be read. "
                "Use a file with another quantisation, for example Q8_0, Q4_K_M or F16."
            ) from error
        return torch.from_numpy(np.ascontiguousarray(values)).reshape(shape)

    def _restore(self, name: str, tensor: Tensor) -> Tensor:
        part = name.rpartition(".")[2].removesuffix("_bias")
        if self.architecture != "llama" or part not in ("q", "k"):
            return tensor
        # llama.cpp interleaves the two halves of each rotary head of this architecture; here they are split.
        spec = self.blueprint.spec
        heads = spec.num_heads if part == "q" else spec.num_kv_heads
        paired = tensor.reshape(heads, spec.head_dim // 2, 2, *tensor.shape[1:])
        return paired.transpose(1, 2).reshape(tensor.shape).contiguous()

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def embedding_rows(self) -> int:
        tensor = self._tensors.get("token_embd.weight")
        if tensor is None:
            raise ModelError(f"{self.path} lacks the tensor token_embd.weight: it is not a whole model.")
        return int(tensor.shape[-1])


class _Config:
    """GGUF metadata in the words of a `config.json`."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._where = str(file.path)

    def to_dict(self) -> dict[str, Any]:
        architecture = self._file.architecture
        if architecture not in ARCHITECTURES:
            raise ModelError(
                f"{self._where} has the architecture {architecture!r}, which is not supported. "
                f"Supported: {', '.join(ARCHITECTURES)}. Choose another model."
            )
        if self._get("expert_count"):
            raise ModelError(
                f"{self._where} is a mixture of experts, which is not supported: use a dense model."
            )
        heads = self._need("attention.head_count")
        head_dim = self._get("attention.key_length") or self._need("embedding_length") // heads
        self._refuse_odd_heads(head_dim)
        config = {
            "model_type": ARCHITECTURES[architecture],
            "vocab_size": self._file.embedding_rows(),
            "hidden_size": self._need("embedding_length"),
            "intermediate_size": self._uniform("feed_forward_length"),
            "num_hidden_layers": self._need("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._uniform("attention.head_count_kv"),
            "head_dim": head_dim,
            "max_position_embeddings": self._need("context_length"),
            "rms_norm_eps": self._need("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": not self._file.has_tensor("output.weight"),
            "rope_scaling": self._scaling(),
            "attention_bias": self._file.has_tensor("blk.0.attn_q.bias"),
            "mlp_bias": self._file.has_tensor("blk.0.ffn_gate.bias"),
            "final_logit_softcapping": self._get("final_logit_softcapping"),
        }
        if self._get("rope.freq_base"):
            config["rope_theta"] = self._get("rope.freq_base")
        if architecture == "gemma3":
            config.update(self._gemma(head_dim))
        if architecture == "llama" and self._get("attention.sliding_window"):
            config.update(model_type="mistral", sliding_window=self._get("attention.sliding_window"))
        return config

    def _gemma(self, head_dim: int) -> dict[str, Any]:
        layers, heads = self._need("block_count"), self._need("attention.head_count")
        # The 27B model (62 layers) scales by the width of a hidden slice, the others by the head's
        # (llama.cpp, src/models/gemma3.cpp).
        scalar = self._need("embedding_length") // heads if layers == 62 else head_dim
        return {
            "query_pre_attn_scalar": scalar,
            "sliding_window": self._need("attention.sliding_window"),
            "sliding_window_pattern": self._get("attention.sliding_window_pattern") or 6,
            "rope_local_base_freq": self._get("rope.freq_base_swa") or 10_000.0,
        }

    def _scaling(self) -> dict[str, Any] | None:
        kind = self._get("rope.scaling.type")
        factor = self._get("rope.scaling.factor") or self._get("rope.scale_linear")
        if kind in (None, "none") and factor in (None, 0.0, 1.0):
            return None
        if kind == "none":
            return None
        if kind == "yarn":
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": self._get("rope.scaling.original_context_length"),
                "beta_fast": self._get("rope.scaling.yarn_beta_fast"),
                "beta_slow": self._get("rope.scaling.yarn_beta_slow"),
            } | self._yarn_scale(factor)
        return {"rope_type": kind or "linear", "factor": factor}

    def _yarn_scale(self, factor: Any) -> dict[str, Any]:
        extra = self._get("rope.scaling.attn_factor")
        if extra in (None, 1.0) or not factor:
            return {}
        return {"attention_factor": extra * (1.0 + 0.1 * float(np.log(factor)))}

    def _refuse_odd_heads(self, head_dim: int) -> None:
        value_length = self._get("attention.value_length")
        if value_length not in (None, head_dim):
            raise ModelError(
                f"{self._where}: keys are {head_dim} wide but values {value_length}, which is not supported. "
                "Choose another model."
            )
        rotated = self._get("rope.dimension_count")
        if rotated not in (None, head_dim):
            raise ModelError(
                f"{self._where} rotates {rotated} of {head_dim} dimensions per head, which is not supported: "
                "use a model with full rotary heads."
            )

    def _get(self, key: str) -> Any:
        return self._file.metadata.get(f"{self._file.architecture}.{key}")

    def _need(self, key: str) -> Any:
        value = self._get(key)
        if value is None:
            raise ModelError(
                f"{self._where} lacks the metadata key {self._file.architecture}.{key}. "
                "Convert the model again."
            )
        return value

    def _uniform(self, key: str) -> int:
        value = self._need(key)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(
                    f"{self._where}: {self._file.architecture}.{key} differs between layers, "
                    f"{sorted(set(value))}, which is not supported. Choose another model."
                )
            value = value[0]
        return int(value)
