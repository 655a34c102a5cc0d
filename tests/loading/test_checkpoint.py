"""Checkpoint folders: logits against transformers, and every way a folder can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import ModelError
from paceline.loading import load
from tests.loading.support import logits
from tests.tiny_checkpoints import (
    CASES,
    edit_config,
    reference_logits,
    save_checkpoint,
    tiny_ids,
    tiny_model,
)

# save_pretrained's own progress bars and file handling, not ours.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(tiny_model("llama"), tmp_path / "model")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = tiny_model(case)
    loaded = load(str(save_checkpoint(model, tmp_path)))
    ids = tiny_ids(120)
    expected = reference_logits(model, ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(loaded.spec, loaded.weights, ids), expected, atol=1e-4, rtol=0)


def test_a_window_matters_in_the_comparison_above() -> None:
    ids = tiny_ids(40)
    inside = reference_logits(tiny_model("mistral-window"), ids)
    everything = reference_logits(tiny_model("mistral-window", sliding_window=None), ids)
    assert (inside[:8] - everything[:8]).abs().max() < 1e-4
    assert (inside[20:] - everything[20:]).abs().max() > 0.01


def test_shards(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    folder = save_checkpoint(model, tmp_path, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    loaded = load(str(folder))
    expected = reference_logits(model, tiny_ids())
    torch.testing.assert_close(logits(loaded.spec, loaded.weights, tiny_ids()), expected, atol=1e-4, rtol=0)


def test_weights_keep_their_stored_type_and_folded_norms_are_float32(tmp_path: Path) -> None:
    loaded = load(str(save_checkpoint(tiny_model("gemma3").bfloat16(), tmp_path)))
    assert loaded.weights.layers[0].q.dtype == torch.bfloat16
    assert loaded.weights.final_norm.dtype == torch.float32


@pytest.mark.parametrize("newer", [False, True])
def test_multimodal_gemma_loads_its_text_part(newer: bool, tmp_path: Path) -> None:
    model = tiny_model("gemma3")
    folder = save_checkpoint(model, tmp_path)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        text = {key: tensors.pop(key) for key in list(tensors)}
        for key, tensor in text.items():
            new = f"model.language_model.{key.removeprefix('model.')}" if newer else f"language_model.{key}"
            tensors[new] = tensor
        tensors["model.vision_tower.x" if newer else "vision_tower.x"] = torch.ones(2)
        tensors["multi_modal_projector.y"] = torch.ones(2)

    rewrite(folder, rename)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    loaded = load(str(folder))
    assert loaded.eos_token_ids == (2,)
    expected = reference_logits(model, tiny_ids())
    torch.testing.assert_close(logits(loaded.spec, loaded.weights, tiny_ids()), expected, atol=1e-4, rtol=0)


def test_rotary_buffers_of_old_checkpoints_are_ignored(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert load(str(folder)).weights.lm_head is not None


def test_a_stored_copy_of_a_tied_matrix_is_accepted_only_if_it_is_one(tmp_path: Path) -> None:
    folder = save_checkpoint(tiny_model("llama-tied"), tmp_path)
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load(str(folder)).weights.lm_head is None
    rewrite(folder, lambda t: t["lm_head.weight"].add_(1))
    with pytest.raises(ModelError, match=r"lm_head.weight that differs.*tie_word_embeddings to false"):
        load(str(folder))


def test_facts_beside_the_weights(folder: Path) -> None:
    edit_config(folder, eos_token_id=2, bos_token_id=1)
    (folder / "generation_config.json").write_text(
        json.dumps(
            {"eos_token_id": [2, 7], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True}
        )
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"chat_template": "{{ bos_token }}{{ messages[0].content }}", "bos_token": {"content": "<s>"}}
        )
    )
    loaded = load(str(folder))
    assert loaded.eos_token_ids == (2, 7)
    assert loaded.info.bos_token_id == 1
    assert (loaded.generation.temperature, loaded.generation.top_k, loaded.generation.top_p) == (
        0.6,
        20,
        0.95,
    )
    assert loaded.generation.repetition_penalty is None
    assert loaded.context_length == 256
    assert loaded.provenance.kind == "checkpoint"
    assert len(loaded.provenance.fingerprint) == 64
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}]) == "<s>hi"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the moon")) == "the moon"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "T"),
        ("chat_template.json", json.dumps({"chat_template": "T"})),
        (
            "tokenizer_config.json",
            json.dumps(
                {"chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "T"}]}
            ),
        ),
    ],
)
def test_places_of_a_chat_template(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    assert load(str(folder)).apply_chat_template([]) == "T"


def test_vocabulary_from_vocab_and_merges(tmp_path: Path) -> None:
    import transformers

    folder = save_checkpoint(tiny_model("qwen2"), tmp_path)
    saved = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").unlink()
    vocabulary = {token: index for token, index in saved["model"]["vocab"].items() if index > 2}
    (folder / "vocab.json").write_text(json.dumps(saved["model"]["vocab"]))
    (folder / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(m) for m in saved["model"]["merges"])
    )
    added = {
        "320": {"content": "<|im_end|>", "special": True},
        "321": {"content": "<tool>", "special": False},
    }
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(str(folder)).tokenizer
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    for text in ["the quick fox", "don't 1234 <|im_end|> <tool>\n\n  x", "Ångström e\u0301"]:
        assert tokenizer.encode(text) == reference(text).input_ids
    assert tokenizer.token_id("<|im_end|>") == 320
    assert tokenizer.decode([320, 321]) == "<tool>"
    assert len(vocabulary) == 317


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def missing_shard(folder: Path) -> None:
    names = {"model.norm.weight": "model-00001-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def tokenizer_model_only(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")


def unknown_class(folder: Path) -> None:
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (folder / name).write_text("{}")
    (folder / "tokenizer.json").unlink()


BROKEN: list[tuple[Callable[[Path], Any], list[str]]] = [
    (lambda f: (f / "config.json").unlink(), ["config.json", "Check the path"]),
    (break_config, ["config.json", "Download"]),
    (lambda f: (f / "config.json").write_text("[]"), ["config.json", "object", "Download"]),
    (truncate, ["model.safetensors", "truncated", "Download"]),
    (pickle_only, ["pytorch_model.bin", "run code", "save_pretrained"]),
    (lambda f: (f / "model.safetensors").unlink(), ["no .safetensors", "Download"]),
    (missing_shard, ["model-00001-of-00002.safetensors", "index.json", "Download"]),
    (
        lambda f: rewrite(f, lambda t: t.pop("model.norm.weight")),
        ["lacks 1 of", "model.norm.weight", "Download"],
    ),
    (
        lambda f: rewrite(f, lambda t: t.update({"model.layers.0.extra.weight": torch.ones(3)})),
        ["model.safetensors", "model.layers.0.extra.weight", "Choose another"],
    ),
    (
        lambda f: rewrite(f, lambda t: t.update({"model.norm.weight": torch.ones(63)})),
        ["model.safetensors", "model.norm.weight", "[63]", "[64]", "Download"],
    ),
    (
        lambda f: rewrite(f, lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)})),
        ["model.norm.weight", "I8", "F32", "unquantised"],
    ),
    (lambda f: edit_config(f, num_hidden_layers=4), ["model.layers.3.", "config.json"]),
    (lambda f: edit_config(f, tie_word_embeddings=True), ["lm_head.weight", "differs"]),
    (lambda f: (f / "tokenizer.json").unlink(), ["no tokenizer", "save_pretrained"]),
    (tokenizer_model_only, ["tokenizer.model", "tokenizer.json", "save_pretrained"]),
    (lambda f: (f / "tokenizer.json").write_text("{}"), ["tokenizer.json", "Download"]),
    (unknown_class, ["tokenizer_class", "Qwen2Tokenizer", "save_pretrained"]),
]


@pytest.mark.parametrize(("damage", "words"), BROKEN)
def test_a_broken_folder_is_refused_with_cause_and_remedy(
    folder: Path, damage: Callable[[Path], Any], words: list[str]
) -> None:
    damage(folder)
    with pytest.raises(ModelError) as caught:
        load(str(folder))
    for word in words:
        assert word in str(caught.value)
