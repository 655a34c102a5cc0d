"""Reading a Hugging Face checkpoint folder: JSON files and safetensors."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.errors import ModelError, shown
from paceline.loading.info import GenerationDefaults, ModelInfo, Provenance
from paceline.models.families import (
    Blueprint,
    assemble,
    blueprint,
    checkpoint_name,
    is_norm,
    weight_shapes,
)
from paceline.models.spec import DecoderWeights

_INDEX = "model.safetensors.index.json"
_FLOATS = {"F32", "F16", "BF16"}
_AGAIN = "Download the checkpoint again."

_HARMLESS = re.compile(r".*rotary_emb\.inv_freq")
# Modules that draft for the model (`loading.heads.mtp`) and have no part in its own output.
_DRAFTING = re.compile(r"mtp\..*|model\.mtp_layers\..*")
_DRAFTING_LAYER = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight")
_VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..*")
# The text part of a multimodal checkpoint, in the older and the newer layout.
_TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)


def read_checkpoint(folder: Path, source: str, revision: str | None = None) -> tuple[ModelInfo, Blueprint]:
    """Everything but weights and vocabulary. Raises ModelError for a config that is absent or unsupported."""
    path = folder / "config.json"
    config = read_json(path)
    if config is None:
        raise ModelError(
            f"{folder} holds no config.json: it is not a Hugging Face checkpoint. Check the path."
        )
    try:
        plan = blueprint(config, str(path))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(
            f"cannot understand {path}: {type(error).__name__}: {error}. Download the file again, or correct "
            "the value."
        ) from error
    generation = read_json(folder / "generation_config.json") or {}
    tokens = _special_tokens(folder)
    info = ModelInfo(
        spec=plan.spec,
        provenance=Provenance("checkpoint", source, fingerprint(folder, config), revision),
        eos_token_ids=tuple(
            dict.fromkeys([*_ids(config, "eos_token_id"), *_ids(generation, "eos_token_id")])
        ),
        bos_token_id=next(iter(_ids(config, "bos_token_id") + _ids(generation, "bos_token_id")), None),
        generation=_generation_defaults(generation),
        chat_template=_chat_template(folder),
        special_tokens=tokens,
    )
    return info, plan


def read_weights(folder: Path, plan: Blueprint) -> DecoderWeights:
    """Map the weights of a checkpoint into memory, in their stored types but for folded norms (float32).

    Raises ModelError for pickled, incomplete, damaged, misshapen or surplus weights.
    """
    files = weight_files(folder)
    found = _tensor_files(files)
    shapes = weight_shapes(plan)
    expected = {checkpoint_name(name, plan): name for name in shapes}
    surplus = _match(folder, expected, found)
    weights: dict[str, Tensor] = {}
    for path in files:
        wanted = {key: expected[name] for key, name in found[path].items() if name in expected}
        weights.update(_read(path, wanted, shapes, plan.norm_offset))
    if surplus is not None:
        _check_tied(surplus, weights["embed"])
    return assemble(weights, plan.spec.num_layers)


def read_canonical(path: Path, num_layers: int) -> DecoderWeights:
    """Map the weights of a converted model, stored under their own names."""
    with open_safetensors(path) as file:
        return assemble({key: file.get_tensor(key) for key in file.keys()}, num_layers)  # noqa: SIM118


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None if there is no such file. Raises ModelError if it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"cannot read {path}: {error}. {_AGAIN}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, found {type(value).__name__}. {_AGAIN}")
    return value


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises ModelError if there is none, or one is missing."""
    index = read_json(folder / _INDEX)
    if index is not None:
        names = sorted(set((index.get("weight_map") or {}).values()))
        for name in names:
            if not (folder / name).is_file():
                raise ModelError(
                    f"{folder} lacks {name}, one of {len(names)} files named by {_INDEX}. {_AGAIN}"
                )
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickled:
        raise ModelError(
            f"{folder} holds only pickled weights ({pickled[0].name}), which can run code when loaded. "
            "Convert them with transformers: `AutoModelForCausalLM.from_pretrained(folder)"
            ".save_pretrained(new_folder)` writes safetensors."
        )
    raise ModelError(f"{folder} holds no .safetensors file. {_AGAIN}")


def _tensor_files(files: Iterable[Path]) -> dict[Path, dict[str, str]]:
    """For each file, its tensors' names as stored and as a plain text model would have them."""
    found: dict[Path, dict[str, str]] = {}
    for path in files:
        with open_safetensors(path) as file:
            keys = list(file.keys())
        found[path] = {key: _plain_name(key) for key in keys if not _HARMLESS.fullmatch(key)}
    return found


def _plain_name(key: str) -> str:
    for prefix, plain in _TEXT_PREFIXES:
        if key.startswith(prefix):
            return plain + key.removeprefix(prefix)
    return key


def _match(
    folder: Path, expected: Mapping[str, str], found: Mapping[Path, Mapping[str, str]]
) -> tuple[Path, str] | None:
    """Check names. Returns where a stored copy of a tied output matrix is, if there is one."""
    present = {name for names in found.values() for name in names.values()}
    missing = [name for name in expected if name not in present]
    if missing:
        raise ModelError(
            f"{folder} lacks {len(missing)} of {len(expected)} tensors, the first is {missing[0]}. "
            f"The checkpoint does not fit its config.json, or is incomplete. {_AGAIN}"
        )
    modules = tuple(match[1] for match in map(_DRAFTING_LAYER.fullmatch, present) if match)
    tied_copy = None
    for path, names in found.items():
        for key, name in names.items():
            if name == "lm_head.weight" and name not in expected:
                tied_copy = (path, key)
            elif name in expected or _VISION.fullmatch(key) or _DRAFTING.fullmatch(name):
                continue
            elif not name.startswith(modules):
                raise ModelError(
                    f"{path} holds the tensor {key}, which a model as config.json has it does not: "
                    "running without it would be wrong. Choose another checkpoint, or correct config.json."
                )
    return tied_copy


def _read(
    path: Path, wanted: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], norm_offset: float
) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    with open_safetensors(path) as file:
        for key, name in wanted.items():
            view = file.get_slice(key)
            if view.get_dtype() not in _FLOATS:
                raise ModelError(
                    f"{path}: tensor {key} is stored as {view.get_dtype()}. Supported: F32, F16, BF16. "
                    "Use an unquantised checkpoint, or a GGUF file."
                )
            if tuple(view.get_shape()) != shapes[name]:
                raise ModelError(
                    f"{path}: tensor {key} has shape {view.get_shape()}, config.json asks for "
                    f"{list(shapes[name])}. {_AGAIN}"
                )
            tensor: Tensor = file.get_tensor(key)
            weights[name] = tensor.float() + norm_offset if norm_offset and is_norm(name) else tensor
    return weights


def _check_tied(place: tuple[Path, str], embed: Tensor) -> None:
    path, key = place
    with open_safetensors(path) as file:
        if not torch.equal(file.get_tensor(key), embed):
            raise ModelError(
                f"{path} holds a {key} that differs from the embedding, but config.json ties the two. "
                "Set tie_word_embeddings to false in config.json, or remove the tensor."
            )


def open_safetensors(path: Path) -> Any:
    """The file, to be used as a context. Raises ModelError if it is damaged."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"cannot read {path}: {error}. The file is truncated or damaged. {_AGAIN}"
        ) from error


def fingerprint(folder: Path, config: Mapping[str, Any]) -> str:
    """See `Provenance`."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}|{path.stat().st_size}".encode())
    return digest.hexdigest()


def _ids(config: Mapping[str, Any], key: str) -> list[int]:
    value = config.get(key)
    if value is None:
        value = (config.get("text_config") or {}).get(key)
    if value is None:
        return []
    values = value if isinstance(value, list) else [value]
    if not all(type(item) is int for item in values):
        raise ModelError(
            f"{key} is {shown(value)}: it must be a token id or a list of them. Correct the file."
        )
    return [item for item in values if item >= 0]  # -1 stands for "none" in some files


def _generation_defaults(config: Mapping[str, Any]) -> GenerationDefaults:
    if config.get("do_sample") is False:
        return GenerationDefaults()
    return GenerationDefaults(**{key: config.get(key) for key in GenerationDefaults.__dataclass_fields__})


def _special_tokens(folder: Path) -> dict[str, str]:
    config = read_json(folder / "tokenizer_config.json") or {}
    config = {**(read_json(folder / "special_tokens_map.json") or {}), **config}
    tokens: dict[str, str] = {}
    for key, value in config.items():
        if key.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[key] = content
    return tokens


def _chat_template(folder: Path) -> str | None:
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    for name in ("chat_template.json", "tokenizer_config.json"):
        template = (read_json(folder / name) or {}).get("chat_template")
        if isinstance(template, list):
            named = {entry.get("name"): entry.get("template") for entry in template}
            template = named.get("default") or next(iter(named.values()), None)
        if isinstance(template, str):
            return template
    return None
