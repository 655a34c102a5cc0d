"""Multi-token prediction (MTP) modules, which a model's authors trained with it: extra blocks in its own
checkpoint, or in a folder of their own.

Their shape is that of the target's layers. What differs between families is in `LAYOUTS`; it follows vLLM's
`deepseek_mtp.py`, `glm4_moe_mtp.py`, `qwen3_next_mtp.py` and `mimo_mtp.py` and the models beside them. A
module is fed the target's last hidden state after the final norm (before it: MiMo, whose `mimo.py` norms in
`compute_logits` only), and then its own output, before its final norm (after it: Qwen3-Next and MiMo).
DeepSeek-V3's report (arXiv 2412.19437, section 2.2) leaves both open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import ModelError, shown
from paceline.loading.heads.stored import StoredTensors, listed
from paceline.models.families import layer_name
from paceline.models.head_spec import HeadSpec, HeadWeights, ModuleWeights, module_shapes
from paceline.models.spec import DecoderSpec, DecoderWeights, LayerWeights

_BIASED = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True)
class _Layout:
    """How a family stores its modules, and what it does differently.

    block: the prefix of module i's block, found by `mark` within it. own: the module's own weights (`{block}`
    stands for that prefix). hidden_first: the projection reads the hidden state before the embedding.
    norm_offset: what is added to stored norm weights.
    """

    title: str
    block: str
    mark: str
    own: Mapping[str, str]
    normed_input: bool
    norm_output: bool
    zero_first: bool
    hidden_first: bool = False
    norm_offset: float = 0.0

    def prefixes(self, names: set[str]) -> list[str]:
        """Of each module in order."""
        pattern = re.compile(re.escape(self.block).replace(r"\{i\}", r"(\d+)") + re.escape(self.mark))
        found = [match for match in map(pattern.fullmatch, names) if match]
        return [self.block.replace("{i}", match[1]) for match in sorted(found, key=lambda m: int(m[1]))]


LAYOUTS = (
    _Layout(
        "DeepSeek-V3 and GLM-4.5",
        "model.layers.{i}.",
        "eh_proj.weight",
        {
            "embed_norm": "{block}enorm.weight",
            "hidden_norm": "{block}hnorm.weight",
            "join": "{block}eh_proj.weight",
            "norm": "{block}shared_head.norm.weight",
        },
        normed_input=True,
        norm_output=False,
        zero_first=True,
    ),
    _Layout(
        "Qwen3-Next",
        "mtp.layers.{i}.",
        "input_layernorm.weight",
        {
            "embed_norm": "mtp.pre_fc_norm_embedding.weight",
            "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
            "join": "mtp.fc.weight",
            "norm": "mtp.norm.weight",
        },
        normed_input=True,
        norm_output=True,
        zero_first=False,
        norm_offset=1.0,
    ),
    _Layout(
        "MiMo",
        "model.mtp_layers.{i}.",
        "input_proj.weight",
        {
            "embed_norm": "{block}token_layernorm.weight",
            "hidden_norm": "{block}hidden_layernorm.weight",
            "join": "{block}input_proj.weight",
            "norm": "{block}final_layernorm.weight",
        },
        normed_input=False,
        norm_output=True,
        zero_first=True,
        hidden_first=True,
    ),
)

_REFUSED = {
    r"mlp\.(experts|gate|shared_experts?|shared_expert_gate)\..*": "a mixture of experts",
    r"self_attn\.(q_a|kv_a|q_b|kv_b)\w*\..*": "multi-head latent attention",
    r"linear_attn\..*": "linear attention",
}
_EMBED, _HEAD = "embed_tokens.weight", "shared_head.head.weight"
_SHARED = {"model.embed_tokens.weight", "lm_head.weight", "embed_tokens.weight"}


def holds_mtp(names: set[str]) -> bool:
    """Whether a folder with tensors of these names has MTP modules."""
    return any(layout.prefixes(names) for layout in LAYOUTS)


def load_modules(
    stored: StoredTensors,
    config: Mapping[str, Any],
    target: DecoderSpec,
    weights: DecoderWeights,
    *,
    inside: bool,
) -> tuple[HeadSpec, HeadWeights]:
    """The modules in a folder, for a target of that spec and weights. inside: the folder is the target's own,
    whose other tensors are not looked at. Raises ModelError naming what is missing or not supported."""
    layout = next(each for each in LAYOUTS if each.prefixes(stored.names))
    blocks = layout.prefixes(stored.names)
    promised = config.get("num_nextn_predict_layers")
    if promised is not None and promised != len(blocks):
        raise ModelError(
            f"{stored.folder}: config.json says num_nextn_predict_layers={shown(promised)}, the file holds "
            f"{len(blocks)} modules. Download it again."
        )
    _check_target(stored, target)
    spec = _spec(layout, target, len(blocks))
    names = [_names(layout, stored, block) for block in blocks]
    known = {key for both in names for each in both for key in each.values()}
    _check_surplus(stored, layout, blocks, known, inside)
    modules = [_module(stored, layout, spec, *both) for both in names]
    embed, lm_head = _vocabulary_matrices(stored, spec, blocks, weights)
    return spec, HeadWeights(
        embed=embed,
        modules=modules,
        lm_head=lm_head,
        input_norm=weights.final_norm if layout.normed_input else None,
    )


def _check_target(stored: StoredTensors, target: DecoderSpec) -> None:
    if any(layer.window for layer in target.layers) or target.post_norms or target.embed_scale != 1.0:
        raise ModelError(
            f"{stored.folder}: MTP modules for a target ({target.family}) with sliding windows, norms "
            "on both sides or a scaled embedding are not supported. Choose another drafter."
        )


def _spec(layout: _Layout, target: DecoderSpec, modules: int) -> HeadSpec:
    return HeadSpec(
        capture=(target.num_layers,),
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        context_length=target.context_length,
        rope=target.ropes[0],
        norm_eps=target.norm_eps,
        attn_scale=target.attn_scale,
        activation=target.activation,
        fused=False,
        norm_before_fc=layout.normed_input,
        joined=True,
        norm_output=layout.norm_output,
        qk_norm=target.qk_norm,
        zero_first=layout.zero_first,
        num_modules=modules,
    )


def _names(layout: _Layout, stored: StoredTensors, block: str) -> tuple[dict[str, str], dict[str, str]]:
    """What a module's weights are called, by their own names, and likewise those biases that are there."""
    names = {name: key.replace("{block}", block) for name, key in layout.own.items()}
    parts = ("attn_norm", "mlp_norm", "q", "k", "v", "o", "gate", "up", "down", "q_norm", "k_norm")
    names |= {f"layer.{part}": block + layer_name(part) for part in parts}
    biases = {f"layer.{part}_bias": block + layer_name(f"{part}_bias") for part in _BIASED}
    return names, {name: key for name, key in biases.items() if key in stored.names}


def _check_surplus(
    stored: StoredTensors, layout: _Layout, blocks: list[str], known: set[str], inside: bool
) -> None:
    own = {name for name in stored.names if name.startswith((*blocks, "mtp."))}
    for block in blocks:
        for name in sorted(each for each in own if each.startswith(block)):
            for pattern, meaning in _REFUSED.items():
                if re.fullmatch(pattern, name.removeprefix(block)):
                    raise ModelError(
                        f"{stored.folder}: the MTP module holds {name}: {meaning} is not supported. Choose "
                        "another drafter."
                    )
    copies = {block + name for block in blocks for name in (_EMBED, _HEAD)}
    surplus = sorted((own if inside else stored.names - _SHARED) - known - copies)
    surplus = [name for name in surplus if "rotary_emb" not in name]
    if surplus:
        raise ModelError(
            f"{stored.folder} holds {len(surplus)} tensors that an MTP module of {layout.title} has not: "
            f"{listed(surplus)}. Running without them would be wrong: choose another drafter."
        )


def _module(
    stored: StoredTensors,
    layout: _Layout,
    spec: HeadSpec,
    names: Mapping[str, str],
    biases: Mapping[str, str],
) -> ModuleWeights:
    shapes = module_shapes(spec)
    doubled = (2 * shapes["layer.q"][0], shapes["layer.q"][1])
    if names["layer.q"] in stored.names and tuple(stored.read(names["layer.q"]).shape) == doubled:
        raise ModelError(
            f"{stored.folder}: the MTP module's queries come with a gate on the attention's output, which is "
            "not supported. Choose another drafter."
        )
    found = stored.weights(names, shapes)
    found |= {
        name: stored.weight(key, shapes[name.removesuffix("_bias")][:1]) for name, key in biases.items()
    }
    if layout.norm_offset:
        found |= {name: t.float() + layout.norm_offset for name, t in found.items() if name.endswith("norm")}
    if layout.hidden_first:
        found["join"] = found["join"].roll(spec.hidden_size, dims=1)
    layer = {name[6:]: found.pop(name) for name in list(found) if name.startswith("layer.")}
    return ModuleWeights(layer=LayerWeights(**layer), **found)


def _vocabulary_matrices(
    stored: StoredTensors, spec: HeadSpec, blocks: list[str], target: DecoderWeights
) -> tuple[Tensor, Tensor | None]:
    """Embedding and output matrix: the modules' own copies where they differ from the target's."""
    head = target.embed if target.lm_head is None else target.lm_head
    embed = _copy(stored, spec, [block + _EMBED for block in blocks], target.embed)
    head = _copy(stored, spec, [block + _HEAD for block in blocks], head)
    return embed, None if head is embed else head


def _copy(stored: StoredTensors, spec: HeadSpec, names: list[str], shared: Tensor) -> Tensor:
    copies = [
        stored.weight(name, (spec.vocab_size, spec.hidden_size)) for name in names if name in stored.names
    ]
    used = copies[0] if copies and not _same(copies[0], shared) else shared
    if not all(_same(copy, used) for copy in copies):
        raise ModelError(
            f"{stored.folder}: the modules' copies of {names[0].split('.', 3)[-1]} differ, but all share "
            "one. Choose another drafter."
        )
    return used


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)
