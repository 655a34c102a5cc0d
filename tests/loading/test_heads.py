"""EAGLE-3 heads from folders: both layouts, what goes unsaid, and every way a folder can be wrong."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import ModelError
from paceline.loading import LoadedModel, load
from paceline.loading.heads import is_head, load_head
from paceline.models.head_spec import HeadWeights
from paceline.models.torch_head import TorchHead
from tests.models.heads import HeadWorld, recompute
from tests.models.worlds import Chunk
from tests.tiny import HIDDEN, write_random
from tests.tiny_checkpoints import VOCAB

from .heads import BLOCK, DRAFT_VOCAB, LAYERS, LAYOUTS, eagle, target, write_head


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return target(tmp_path_factory.mktemp("models"))


def same(one: HeadWeights, other: HeadWeights) -> None:
    assert (one.target_ids is None) == (other.target_ids is None)
    if one.target_ids is not None and other.target_ids is not None:
        assert one.target_ids.tolist() == other.target_ids.tolist()
    pairs = [(one.lm_head, other.lm_head), (one.fc, other.fc), (one.input_norm, other.input_norm)]
    pairs += zip(one.fc_norms, other.fc_norms, strict=True)
    mine, theirs = one.modules[0], other.modules[0]
    pairs += [(mine.norm, theirs.norm), (mine.embed_norm, theirs.embed_norm)]
    pairs += [(getattr(mine.layer, f.name), getattr(theirs.layer, f.name)) for f in fields(mine.layer)]
    for left, right in pairs:
        assert (left is None) == (right is None)
        if left is not None and right is not None:
            torch.testing.assert_close(left, right, rtol=0, atol=0)


# ---------------------------------------------------------------- what is right


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_flags_and_sizes(layout: str, model: LoadedModel, tmp_path: Path) -> None:
    weights = eagle()
    head = load_head(write_head(tmp_path, layout, weights), model)
    same(head.weights, weights)
    spec = head.spec
    assert head.weights.embed is model.weights.embed
    assert spec.capture == (2, LAYERS // 2, LAYERS - 3)
    assert (spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (HIDDEN, 3, 1, 20)
    assert (spec.vocab_size, spec.draft_vocab_size) == (VOCAB, DRAFT_VOCAB)
    assert (spec.norm_before_residual, spec.norm_before_fc, spec.fc_norm, spec.norm_output) == (False,) * 4
    assert spec.norm_eps == 1e-5
    assert spec.rope.inv_freq[1] == pytest.approx(30_000.0 ** (-2 / 20))
    # 64 in the file: the head's rope serves as far as the target goes.
    assert spec.context_length == model.context_length
    assert head.provenance.source == str(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_loaded_runs(layout: str, model: LoadedModel, tmp_path: Path) -> None:
    flags = {"fc_norm": True, "norm_output": True, "norm_before_fc": True, "norm_before_residual": True}
    weights = eagle(**flags)
    head = load_head(write_head(tmp_path, layout, weights, **flags), model)
    same(head.weights, weights)
    decoder = TorchHead(head.spec, head.weights)
    features = torch.randn(6, 3, HIDDEN, generator=torch.manual_seed(0))
    hidden = decoder.fuse(features)
    ((logits, out),) = HeadWorld(decoder).step((Chunk(0, [5, 6, 7, 8, 9, 10]), hidden))
    want, want_out = recompute(head.spec, head.weights, [5, 6, 7, 8, 9, 10], hidden)
    torch.testing.assert_close(logits.double(), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.double(), want_out, atol=1e-4, rtol=1e-4)


def test_own_embedding_biases_and_query_norms(model: LoadedModel, tmp_path: Path) -> None:
    weights = eagle(qk_norm=True)
    layer = weights.modules[0].layer
    layer.q_bias, layer.k_bias, layer.v_bias = torch.randn(60), torch.randn(20), torch.randn(20)
    own = torch.randn(VOCAB, HIDDEN)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = own
        tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.zeros(10)

    head = load_head(write_head(tmp_path, weights=weights, change=add), model)
    same(head.weights, weights)
    assert head.spec.qk_norm
    torch.testing.assert_close(head.weights.embed, own)


def test_a_head_narrower_than_its_target(model: LoadedModel, tmp_path: Path) -> None:
    weights = eagle(hidden_size=32)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["embed_tokens.weight"] = weights.embed

    head = load_head(write_head(tmp_path, weights=weights, change=add, hidden_size=32), model)
    assert (head.spec.hidden_size, head.spec.target_hidden_size) == (32, HIDDEN)
    same(head.weights, weights)


@pytest.mark.parametrize("part", ["whole", "part"])
def test_without_an_output_matrix_it_is_the_targets(part: str, model: LoadedModel, tmp_path: Path) -> None:
    size = VOCAB if part == "whole" else DRAFT_VOCAB
    weights = eagle(draft_vocab_size=size)
    folder = write_head(
        tmp_path, weights=weights, change=lambda found: found.pop("lm_head.weight"), draft_vocab_size=size
    )
    head = load_head(folder, model)
    if part == "whole":
        assert head.weights.lm_head is model.weights.lm_head
        assert head.weights.target_ids is None
        return
    assert head.weights.target_ids is not None
    assert head.weights.lm_head is not None
    assert model.weights.lm_head is not None
    for row, token in enumerate(head.weights.target_ids.tolist()):
        assert torch.equal(head.weights.lm_head[row], model.weights.lm_head[token])


def test_ids_that_do_not_rise_are_put_in_order(model: LoadedModel, tmp_path: Path) -> None:
    weights = eagle()
    assert weights.target_ids is not None
    assert weights.lm_head is not None
    order = torch.randperm(DRAFT_VOCAB, generator=torch.manual_seed(1))
    shuffled = HeadWeights(
        **{**vars(weights), "target_ids": weights.target_ids[order], "lm_head": weights.lm_head[order]}
    )
    same(load_head(write_head(tmp_path, weights=shuffled), model).weights, weights)


def test_a_table_of_zeros_stands_for_the_whole_vocabulary(model: LoadedModel, tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["d2t"] = torch.zeros(VOCAB, dtype=torch.int64)

    weights = eagle(draft_vocab_size=VOCAB)
    head = load_head(write_head(tmp_path, weights=weights, change=add, draft_vocab_size=VOCAB), model)
    assert head.weights.target_ids is None


# ---------------------------------------------------------------- layer ids


@pytest.mark.parametrize(
    ("config", "capture", "warns"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, (2, 4, 5), False),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, (2, 4, 5), False),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": None}}, (2, 4, 5), False),
        ({"target_layer_ids": [1, 3, 4]}, (2, 4, 5), False),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (1, 3, 4), True),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 3, 7]}}, (0, 4, 8), True),
        ({"eagle_aux_hidden_state_layer_ids": [0, 8, 8]}, (0, 8, 8), True),
    ],
)
def test_both_ways_to_count_layers(
    config: dict[str, Any],
    capture: tuple[int, ...],
    warns: bool,
    model: LoadedModel,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = load_head(write_head(tmp_path, **config), model)
    assert head.spec.capture == capture
    assert ("not the usual" in caplog.text) == warns


@pytest.mark.parametrize("ids", [[2, 4, 9], [-1, 2, 3], ["2", 3, 4], [], 7, [True, 2, 3], [2.0, 3, 4]])
def test_layers_that_the_target_does_not_have(ids: Any, model: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="must list layers of the target, which has 8"):
        load_head(write_head(tmp_path, eagle_aux_hidden_state_layer_ids=ids), model)


# ---------------------------------------------------------------- what goes unsaid


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [True, False])
def test_norm_before_residual_is_read(layout: str, value: bool, model: LoadedModel, tmp_path: Path) -> None:
    head = load_head(write_head(tmp_path, layout, norm_before_residual=value), model)
    assert head.spec.norm_before_residual is value


@pytest.mark.parametrize(("layout", "value"), [("original", False), ("speculators", True)])
def test_norm_before_residual_unsaid(
    layout: str, value: bool, model: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    head = load_head(write_head(tmp_path, layout, drop=("norm_before_residual",)), model)
    assert head.spec.norm_before_residual is value
    (record,) = [each for each in caplog.records if "norm_before_residual" in each.message]
    assert record.levelno == (logging.WARNING if layout == "speculators" else logging.INFO)


def test_norms_of_features_are_recognised_by_their_weights(
    model: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = eagle(fc_norm=True, norm_before_fc=True)
    head = load_head(write_head(tmp_path, weights=weights), model)
    assert head.spec.fc_norm
    assert head.spec.norm_before_fc
    same(head.weights, weights)
    assert "taken as true" in caplog.text


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, 256),
        ({"type": "linear", "factor": 2.0}, 256),
        ({"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
    ],
)
def test_only_ropes_without_end_are_extended(
    rope: dict[str, Any], length: int, model: LoadedModel, tmp_path: Path
) -> None:
    assert load_head(write_head(tmp_path, rope_scaling=rope), model).spec.context_length == length


def test_another_verifier_is_worth_a_warning(
    model: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load_head(write_head(tmp_path / "one", "speculators"), model)
    assert "was made for" not in caplog.text
    other = {"verifier": {"name_or_path": "other/model-8B"}}
    load_head(write_head(tmp_path / "two", "speculators", speculators_config=other), model)
    assert "was made for other/model-8B" in caplog.text


# ---------------------------------------------------------------- what is wrong


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda found: found.update({name: tensor})


def broken(value: float) -> Callable[[dict[str, Tensor]], Any]:
    def change(found: dict[str, Tensor]) -> None:
        found["midlayer.mlp.up_proj.weight"][3, 4] = value

    return change


OFFSETS = torch.zeros(DRAFT_VOCAB, dtype=torch.int64)
MISSING = ("midlayer.self_attn.q_proj.weight", "fc.weight", "norm.weight", "midlayer.input_layernorm.weight")
WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    **{
        f"no {name}": (lambda found, name=name: found.pop(name), {}, f"lacks 1 of .*{name.split('.')[-2]}")
        for name in MISSING
    },
    "unknown key": (
        put("midlayer.gadget.weight", torch.zeros(3)),
        {},
        "midlayer.gadget.weight.*would be wrong",
    ),
    "two layers": (put("layers.1.norm", torch.zeros(3)), {"num_hidden_layers": 2}, "num_hidden_layers is 2"),
    "nan": (broken(float("nan")), {}, "up_proj.*not finite"),
    "infinity": (broken(float("inf")), {}, "up_proj.*not finite"),
    "another target's width": (
        put("fc.weight", torch.zeros(HIDDEN, 3 * 64)),
        {},
        r"fc.weight has shape \[48, 192\].*\[48, 144\].*another model",
    ),
    "two features": (
        put("fc.weight", torch.zeros(HIDDEN, 2 * HIDDEN)),
        {},
        r"fc.weight has shape \[48, 96\]",
    ),
    "target_hidden_size": (None, {"target_hidden_size": 4096}, "target of hidden size 4096, this one has 48"),
    "vocabulary": (None, {"vocab_size": 151_936}, "has 151936 tokens, this one 320"),
    "draft_vocab_size": (None, {"draft_vocab_size": 40}, "d2t is int64.*expected int64 .40."),
    "no d2t": (lambda found: found.pop("d2t"), {}, "d2t is missing"),
    "d2t outside": (put("d2t", OFFSETS + 300), {}, "30 of them outside.*320"),
    "d2t below": (put("d2t", OFFSETS - 1), {}, "1 of them outside"),
    "d2t of ids": (put("d2t", torch.arange(DRAFT_VOCAB).flip(0)), {}, "some of them twice.*subtract the row"),
    "d2t of floats": (put("d2t", OFFSETS.float()), {}, "d2t is float32"),
    "d2t and t2d": (put("d2t", OFFSETS), {}, "t2d and d2t name different tokens"),
    "t2d of another vocabulary": (put("t2d", torch.ones(9, dtype=torch.bool)), {}, "t2d is about .9."),
    "quantised": (
        put("fc.weight", torch.zeros(HIDDEN, 144, dtype=torch.int8)),
        {},
        "fc.weight is stored as int8.*unquantised",
    ),
    "quantisation": (None, {"quantization_config": {"quant_method": "fp8"}}, "quantised head"),
    "parallel": (None, {"parallel_drafting": True}, "P-EAGLE"),
    "mask_hidden": (put("mask_hidden", torch.zeros(1, 144)), {}, "P-EAGLE"),
    "experts": (None, {"num_experts": 8}, "mixture of experts"),
    "latent attention": (None, {"kv_lora_rank": 512}, "latent attention"),
    "eagle 1": (lambda found: found.pop("midlayer.hidden_norm.weight"), {}, "no EAGLE-3 head"),
    "no features": (None, {"eagle_config": {"use_aux_hidden_state": False}}, "no EAGLE-3 head"),
    "window": (None, {"layer_types": ["sliding_attention"]}, "sliding window"),
    "scale": (None, {"logit_scale": 0.5}, "logit_scale"),
    "activation": (None, {"hidden_act": "relu2"}, "activation 'relu2'"),
    "flag": (None, {"norm_before_residual": "yes"}, "must be true or false, found 'yes'"),
    "flag without weights": (None, {"fc_norm": True}, "lacks 3 of .*fc_norm.0.weight"),
    "weights without flag": (
        put("input_norm.weight", torch.ones(144)),
        {"norm_before_fc": False},
        "input_norm.weight.*would be wrong",
    ),
    "heads": (None, {"num_attention_heads": 3, "num_key_value_heads": 2}, "3 heads cannot share 2"),
    "size": (None, {"hidden_size": "48"}, "hidden_size must be a positive whole number"),
    "huge": (None, {"intermediate_size": 10**30}, "has shape .* ask for"),
    "rope": (None, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
    "nested": (None, {"transformer_layer_config": 3}, "transformer_layer_config must be an object"),
    "eps": (None, {"rms_norm_eps": "small"}, "cannot understand"),
    "huge eps": (None, {"rms_norm_eps": 10**400}, "cannot understand"),
    "negative eps": (None, {"rms_norm_eps": -1}, "rms_norm_eps must be above 0, found -1"),
    "eps that is no number": (None, {"rms_norm_eps": float("nan")}, "rms_norm_eps must be above 0"),
    "kind": (None, {"speculators_model_type": "medusa"}, "speculator of kind 'medusa'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_heads_are_refused_with_cause(case: str, model: LoadedModel, tmp_path: Path) -> None:
    change, config, message = WRONG[case]
    folder = write_head(tmp_path, change=change, **config)
    with pytest.raises(ModelError, match=f"(?s){message}"):
        load_head(folder, model)


def test_narrower_head_without_an_embedding(model: LoadedModel, tmp_path: Path) -> None:
    folder = write_head(tmp_path, weights=eagle(hidden_size=32), hidden_size=32)
    with pytest.raises(ModelError, match=r"no embed_tokens.weight, and the target's is 48 wide"):
        load_head(folder, model)


def test_target_too_shallow_for_the_usual_layers(tmp_path: Path) -> None:
    shallow = load(str(write_random(tmp_path / "model", layers=2)))
    with pytest.raises(ModelError, match="has not the usual ones"):
        load_head(write_head(tmp_path / "head"), shallow)
    head = load_head(write_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 1, 2]), shallow)
    assert head.spec.capture == (0, 1, 2)


@pytest.mark.parametrize("size", [0, 7, 200, 4000])
def test_truncated_weights(size: int, model: LoadedModel, tmp_path: Path) -> None:
    folder = write_head(tmp_path)
    os.truncate(folder / "model.safetensors", size)
    with pytest.raises(ModelError, match="truncated or damaged"):
        load_head(folder, model)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"config"', "\xff"])
def test_damaged_config(text: str, model: LoadedModel, tmp_path: Path) -> None:
    folder = write_head(tmp_path)
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        load_head(folder, model)


def test_what_is_only_told_of_a_head_may_be_nonsense(model: LoadedModel, tmp_path: Path) -> None:
    told = {"architectures": 5, "speculators_config": {"proposal_methods": 5}}
    folder = write_head(tmp_path, **told)
    assert is_head(folder)
    load_head(folder, model)


def test_folders_without_a_head(model: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_head(tmp_path, model)
    with pytest.raises(ModelError, match="no model"):
        load_head(tmp_path / "nowhere" / "at" / "all", model)
    folder = write_head(tmp_path / "head")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \.safetensors file"):
        load_head(folder, model)
    (folder / "config.json").write_text(json.dumps(BLOCK))
    with pytest.raises(ModelError, match="describes no draft head"):
        load_head(folder, model)
    with pytest.raises(ModelError, match="folder"):
        load_head(folder / "config.json", model)


# ---------------------------------------------------------------- pickles


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def pickled(folder: Path, **more: Any) -> Path:
    folder = write_head(folder)
    found = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**found, **more}, folder / "pytorch_model.bin")
    return folder


def test_pickles_are_read_only_on_demand(model: LoadedModel, tmp_path: Path) -> None:
    folder = pickled(tmp_path / "head")
    with pytest.raises(ModelError, match=r"\(pytorch_model.bin\).*can run code.*unpickle_head = true"):
        load_head(folder, model)
    same(load_head(folder, model, unpickle=True).weights, eagle())


def test_pickles_of_a_hub_are_fetched_only_on_demand(
    model: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = pickled(tmp_path / "snapshots" / "abc"), []

    def snapshot(_: str, *, allow_patterns: list[str], **__: Any) -> str:
        asked.append("*.bin" in allow_patterns)
        return str(folder if asked[-1] else without)

    without = tmp_path / "snapshots" / "def"
    without.mkdir()
    (without / "config.json").write_bytes((folder / "config.json").read_bytes())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelError, match=r"may be on the hub.*--unpickle-head"):
        load_head("org/head", model)
    same(load_head("org/head", model, unpickle=True).weights, eagle())
    assert asked == [False, True]


def test_pickles_that_hold_more_than_tensors_run_nothing(model: LoadedModel, tmp_path: Path) -> None:
    folder = pickled(tmp_path / "head", extra=Evil(tmp_path / "ran"))
    with pytest.raises(ModelError, match="holds more than tensors"):
        load_head(folder, model, unpickle=True)
    assert not (tmp_path / "ran").exists()
    os.truncate(folder / "pytorch_model.bin", 100)
    with pytest.raises(ModelError, match="damaged"):
        load_head(folder, model, unpickle=True)


@pytest.mark.parametrize(
    "odd",
    [{7: torch.zeros(2)}, {"n": 3}, {"s": torch.eye(2).to_sparse()}, {"m": torch.zeros(2, device="meta")}],
    ids=["a number as name", "a number", "sparse", "without values"],
)
def test_pickles_of_anything_but_named_tensors(
    model: LoadedModel, tmp_path: Path, odd: dict[Any, Any]
) -> None:
    folder = pickled(tmp_path / "head")
    torch.save(odd, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="does not hold named tensors"):
        load_head(folder, model, unpickle=True)


@pytest.mark.parametrize("zipped", [True, False])
def test_damaged_pickles(model: LoadedModel, tmp_path: Path, *, zipped: bool) -> None:
    """A byte that is wrong may ask the reader for any object and any operation."""
    folder = pickled(tmp_path / "head")
    path = folder / "pytorch_model.bin"
    torch.save({"fc.weight": torch.zeros(2)}, path, _use_new_zipfile_serialization=zipped)
    whole, chance = path.read_bytes(), random.Random(0)
    for _ in range(100):
        damaged = bytearray(whole)
        for _ in range(4):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        path.write_bytes(damaged)
        with pytest.raises(ModelError):  # a head of which the rest is missing, at best
            load_head(folder, model, unpickle=True)


def test_safetensors_go_before_pickles(model: LoadedModel, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head")
    torch.save({"extra": Evil(tmp_path / "ran")}, folder / "pytorch_model.bin")
    same(load_head(folder, model, unpickle=True).weights, eagle())
    assert not (tmp_path / "ran").exists()


# ---------------------------------------------------------------- is_head


def test_is_head(model: LoadedModel, tmp_path: Path) -> None:
    assert is_head(write_head(tmp_path / "one"))
    assert is_head(write_head(tmp_path / "two", "speculators"))
    plain = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFT_VOCAB}
    assert is_head(write_head(tmp_path / "three", **plain))
    assert not is_head(model.provenance.source)
    with pytest.raises(ModelError, match="no model"):
        is_head(tmp_path / "nowhere" / "at" / "all")
