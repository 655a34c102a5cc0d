"""EAGLE-3 and EAGLE 3.1 heads in the layout of the original (SpecForge, SGLang, AngelSlim), which has all at
the top level of config.json and calls the block `midlayer`, and in that of speculators, which nests the
block's sizes in `transformer_layer_config` and calls it `layers.0`. Weights and flags are the same."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.errors import ModelError, shown
from paceline.loading.heads.layers import capture_layers
from paceline.loading.heads.stored import StoredTensors, listed
from paceline.loading.heads.vocabulary import target_ids
from paceline.models.families import ACTIVATIONS, layer_name, rope_parameters, rope_spec, whole_number
from paceline.models.head_spec import HeadSpec, HeadWeights, ModuleWeights, module_shapes, shared_shapes
from paceline.models.spec import DecoderSpec, DecoderWeights, LayerWeights

logger = logging.getLogger(__name__)

Config = Mapping[str, Any]

_SHARED = {
    "embed": "embed_tokens.weight",
    "lm_head": "lm_head.weight",
    "fc": "fc.weight",
    "input_norm": "input_norm.weight",
}
_MODULE = {
    "norm": "norm.weight",
    "embed_norm": "layers.0.input_layernorm.weight",
    "layer.attn_norm": "layers.0.hidden_norm.weight",
}
_BIASED = ("q", "k", "v", "o", "gate", "up", "down")
_NOT_WEIGHTS = re.compile(r"d2t|t2d|verifier_\w+\..*|.*rotary_emb\..*")
# A rope of these kinds holds at any position; the others were made for so many positions.
_ENDLESS_ROPES = ("default", "linear", "llama3")
_REFUSED = {
    "parallel_drafting": "a head that drafts in parallel (P-EAGLE): use one that drafts token by token",
    "quantization_config": "a quantised head: use the unquantised one",
    "kv_lora_rank": "multi-head latent attention: use a head with ordinary attention",
    "num_experts": "a mixture of experts: use a dense head",
    "num_local_experts": "a mixture of experts: use a dense head",
    "n_routed_experts": "a mixture of experts: use a dense head",
}


@dataclass(frozen=True)
class _Files:
    """A head's folder, its config (block: where the block's sizes are), and its tensors' names as speculators
    has them, each with the name it is stored under."""

    where: str
    outer: Config
    block: Config
    stored: StoredTensors
    names: Mapping[str, str]


def load_eagle(
    folder: Path, config: Config, stored: StoredTensors, target: DecoderSpec, weights: DecoderWeights
) -> tuple[HeadSpec, HeadWeights]:
    """The head of a folder for a target of that spec and weights, whose embedding and output matrix it uses
    where it has none of its own. Raises ModelError naming what does not fit."""
    block = config.get("transformer_layer_config", config)
    if not isinstance(block, Mapping):
        raise ModelError(f"{folder}/config.json: transformer_layer_config must be an object. Correct it.")
    names = {_plain_name(name): name for name in stored.names}
    files = _Files(str(folder / "config.json"), config, block, stored, names)
    _refuse(files)
    spec = _spec(files, target)
    expected, shapes = _expected(files, spec)
    _check_surplus(files, expected)
    ids = target_ids(stored, spec.draft_vocab_size, spec.vocab_size)
    found = stored.weights(expected, shapes)
    return spec, _assembled(files, spec, found, ids, weights)


def _plain_name(name: str) -> str:
    name = name.removeprefix("model.")
    return re.sub(r"^midlayer\.", "layers.0.", name)


def _refuse(files: _Files) -> None:
    outer, block, where = files.outer, files.block, files.where
    for key, meaning in _REFUSED.items():
        if outer.get(key) or block.get(key):
            raise ModelError(f"{where} has {key}, which is not supported: {meaning}.")
    if "mask_hidden" in files.names:
        raise ModelError(f"{where}: {_REFUSED['parallel_drafting']} is not supported here.")
    layers = block.get("num_hidden_layers", 1)
    if layers != 1:
        raise ModelError(
            f"{where}: num_hidden_layers is {shown(layers)}; supported are heads of one. Choose another."
        )
    if "sliding_attention" in (block.get("layer_types") or ()):
        raise ModelError(f"{where}: the head's attention has a sliding window, which is not supported.")
    if files.outer.get("logit_scale") not in (None, 1, 1.0):
        raise ModelError(f"{where}: logit_scale is not supported: fold it into lm_head.weight.")
    nested = outer.get("eagle_config")
    uses_features = nested.get("use_aux_hidden_state", True) if isinstance(nested, Mapping) else True
    if not uses_features or "layers.0.hidden_norm.weight" not in files.names:
        raise ModelError(
            f"{files.stored.folder} is no EAGLE-3 head (it has no hidden_norm and reads no layers of the "
            "target): EAGLE-1 and -2 and Medusa heads are not supported. Choose an EAGLE-3 head."
        )


# ---------------------------------------------------------------- the spec


def _spec(files: _Files, target: DecoderSpec) -> HeadSpec:
    block, where = files.block, files.where
    _check_target(files, target)
    vocab = target.vocab_size
    hidden = whole_number(block, "hidden_size", where)
    heads = whole_number(block, "num_attention_heads", where)
    kv_heads = (
        whole_number(block, "num_key_value_heads", where) if block.get("num_key_value_heads") else heads
    )
    # A head's sizes need not multiply to its width.
    head_dim = whole_number(block, "head_dim", where) if block.get("head_dim") else hidden // heads
    if heads % kv_heads:
        raise ModelError(f"{where}: {heads} heads cannot share {kv_heads} key-value heads. Correct the file.")
    rope = rope_parameters(block)
    positions = _whole_or(block, "max_position_embeddings", 2048, where)
    endless = rope["rope_type"] in _ENDLESS_ROPES
    activation = block.get("hidden_act") or "silu"
    if activation not in ACTIVATIONS:
        raise ModelError(f"{where}: activation {shown(activation)} is not supported. Choose another head.")
    return HeadSpec(
        capture=capture_layers(files.outer, target.num_layers, where),
        target_hidden_size=target.hidden_size,
        vocab_size=vocab,
        draft_vocab_size=_whole_or({**block, **files.outer}, "draft_vocab_size", vocab, where),
        hidden_size=hidden,
        intermediate_size=whole_number(block, "intermediate_size", where),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=max(positions, target.context_length) if endless else positions,
        rope=rope_spec(rope, head_dim, positions, where),
        norm_eps=_norm_eps(block, where),
        attn_scale=head_dim**-0.5,
        activation=ACTIVATIONS[activation],
        norm_before_fc=_flag(files, "norm_before_fc", implied="input_norm.weight" in files.names),
        fc_norm=_flag(files, "fc_norm", implied=any(name.startswith("fc_norm.") for name in files.names)),
        norm_before_residual=_norm_before_residual(files),
        norm_output=_flag(files, "norm_output", implied=False),
        qk_norm="layers.0.self_attn.q_norm.weight" in files.names,
    )


def _whole_or(config: Config, key: str, default: int, where: str) -> int:
    return default if config.get(key) is None else whole_number(config, key, where)


def _norm_eps(block: Config, where: str) -> float:
    """Features of any other would not be numbers, and the head would guess nothing without a word."""
    value = float(block.get("rms_norm_eps") or 1e-6)
    if not 0 < value < math.inf:
        raise ModelError(f"{where}: rms_norm_eps must be above 0, found {value}. Correct it.")
    return value


def _check_target(files: _Files, target: DecoderSpec) -> None:
    width = files.outer.get("target_hidden_size")
    if width is not None and width != target.hidden_size:
        raise ModelError(
            f"{files.where}: the head reads a target of hidden size {shown(width)}, this one has "
            f"{target.hidden_size}. Choose a head made for this target."
        )
    vocab = files.block.get("vocab_size", files.outer.get("vocab_size", target.vocab_size))
    if vocab != target.vocab_size:
        raise ModelError(
            f"{files.where}: the head's target has {shown(vocab)} tokens, this one {target.vocab_size}. "
            "Choose a head made for this target."
        )


def _flag(files: _Files, key: str, *, implied: bool) -> bool:
    """implied: whether the file holds weights that only a head with the flag has."""
    value = files.outer.get(key)
    if value is None:
        if implied:
            logger.warning(
                "%s does not say %s, but the file has its weights: taken as true.", files.where, key
            )
        return implied
    if not isinstance(value, bool):
        raise ModelError(f"{files.where}: {key} must be true or false, found {shown(value)}. Correct it.")
    return value


def _norm_before_residual(files: _Files) -> bool:
    """The wrong one costs most of the accepted guesses and no error. Where nothing is said: false for the
    original layout, whose code knows no other; true for speculators, as vLLM reads such a file."""
    key = "norm_before_residual"
    if files.outer.get(key) is not None:
        return _flag(files, key, implied=False)
    nested = files.block is not files.outer
    logger.log(
        logging.WARNING if nested else logging.INFO,
        "%s does not say %s: taken as %s. If few guesses are accepted, set it to %s.",
        *(files.where, key, str(nested).lower(), str(not nested).lower()),
    )
    return nested


# ---------------------------------------------------------------- the weights


def _expected(files: _Files, spec: HeadSpec) -> tuple[dict[str, str], dict[str, tuple[int, ...]]]:
    """Of every weight to read the name it is stored under (the one it should have, if it is missing) and its
    shape, both by its own name."""
    shapes = {**shared_shapes(spec), **module_shapes(spec)}
    names: dict[str, str] = {}
    for name in shapes:
        part = name.removeprefix("layer.")
        if name.startswith("fc_norms."):
            names[name] = f"fc_norm.{name.removeprefix('fc_norms.')}.weight"
        else:
            names[name] = _SHARED.get(name) or _MODULE.get(name) or f"layers.0.{layer_name(part)}"
    for part in _BIASED:
        bias = f"layers.0.{layer_name(f'{part}_bias')}"
        if bias in files.names:
            names[f"layer.{part}_bias"] = bias
            shapes[f"layer.{part}_bias"] = shapes[f"layer.{part}"][:1]
    for shared in ("embed", "lm_head"):
        if names[shared] not in files.names:
            del names[shared], shapes[shared]
    return {name: files.names.get(plain, plain) for name, plain in names.items()}, shapes


def _check_surplus(files: _Files, expected: Mapping[str, str]) -> None:
    known = set(expected.values())
    surplus = sorted(
        name for plain, name in files.names.items() if name not in known and not _NOT_WEIGHTS.fullmatch(plain)
    )
    if surplus:
        raise ModelError(
            f"{files.stored.folder} holds {len(surplus)} tensors that a head as config.json has it does not: "
            f"{listed(surplus)}. Running without them would be wrong: correct config.json or choose another "
            "head."
        )


def _assembled(
    files: _Files,
    spec: HeadSpec,
    found: dict[str, Tensor],
    ids: Tensor | None,
    target: DecoderWeights,
) -> HeadWeights:
    layer = {name[6:]: found.pop(name) for name in list(found) if name.startswith("layer.")}
    module = ModuleWeights(
        embed_norm=found.pop("embed_norm"), norm=found.pop("norm"), layer=LayerWeights(**layer)
    )
    embed, lm_head = _vocabulary_matrices(files, spec, found, ids, target)
    if ids is not None and lm_head is not None and not bool((ids.diff() > 0).all()):
        # Candidates of equal value go to the earlier row, and must go to the lower token.
        ids, order = ids.sort()
        lm_head = lm_head[order]
    return HeadWeights(
        embed=embed,
        modules=[module],
        lm_head=lm_head,
        target_ids=ids,
        fc=found["fc"],
        input_norm=found.get("input_norm"),
        fc_norms=[found[f"fc_norms.{i}"] for i in range(len(spec.capture))] if spec.fc_norm else [],
    )


def _vocabulary_matrices(
    files: _Files, spec: HeadSpec, found: Mapping[str, Tensor], ids: Tensor | None, target: DecoderWeights
) -> tuple[Tensor, Tensor | None]:
    """Embedding and output matrix, the target's where the head has none."""
    own_embed, own_head = found.get("embed"), found.get("lm_head")
    lacking = [name for name in ("embed", "lm_head") if name not in found]
    tied = own_embed is not None and bool(files.block.get("tie_word_embeddings")) and ids is None
    if tied and own_head is None and own_embed is not None:
        return own_embed, None
    if lacking and spec.hidden_size != spec.target_hidden_size:
        raise ModelError(
            f"{files.stored.folder} has no {_SHARED[lacking[0]]}, and the target's is "
            f"{spec.target_hidden_size} wide where the head has {spec.hidden_size}. Choose a head made for "
            "this target."
        )
    embed = target.embed if own_embed is None else own_embed
    if own_head is not None:
        return embed, own_head
    whole = target.embed if target.lm_head is None else target.lm_head
    if ids is not None:
        return embed, whole[ids]
    return embed, None if whole is embed else whole
