"""GGUF files: logits against transformers for every architecture and quantisation, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from paceline.errors import ModelError
from paceline.loading import load
from paceline.loading.gguf_reader import metadata_of, open_gguf
from tests.loading.support import logits
from tests.tiny_checkpoints import (
    CASES,
    quantise_matrices,
    reference_logits,
    tiny_ids,
    tiny_model,
    write_gguf,
)

# llama.cpp has no window for these, or says it in another way; see the tests of their own.
PLAIN = [case for case in CASES if case not in ("llama3-rope", "mistral-window", "qwen2-window")]
HEAD_SCALE = {"query_pre_attn_scalar": 32}


def assert_same_logits(path: Path, model: Any, length: int = 60) -> None:
    loaded = load(str(path))
    expected = reference_logits(model, tiny_ids(length))
    actual = logits(loaded.spec, loaded.weights, tiny_ids(length))
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", PLAIN)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model = tiny_model(case, **(HEAD_SCALE if case.startswith("gemma3") else {}))
    assert_same_logits(write_gguf(model, tmp_path / "m.gguf"), model)


@pytest.mark.parametrize("quantisation", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("case", ["llama", "qwen2"])
def test_quantised_matrices_load_to_exactly_their_values(
    case: str, quantisation: str, tmp_path: Path
) -> None:
    model = tiny_model(case)
    quantise_matrices(model, quantisation)
    path = write_gguf(model, tmp_path / "m.gguf", quantisation)
    weights = load(str(path)).weights
    state = model.state_dict()
    assert torch.equal(weights.embed.float(), state["model.embed_tokens.weight"])
    assert torch.equal(weights.layers[2].q.float(), state["model.layers.2.self_attn.q_proj.weight"])
    assert torch.equal(weights.layers[1].down.float(), state["model.layers.1.mlp.down_proj.weight"])
    assert_same_logits(path, model)


def test_half_precision_stays_half_precision(tmp_path: Path) -> None:
    model = tiny_model("llama")
    for quantisation, dtype in {"F16": torch.float16, "BF16": torch.bfloat16, "Q8_0": torch.float32}.items():
        quantise_matrices(model, quantisation)
        weights = load(str(write_gguf(model, tmp_path / f"{quantisation}.gguf", quantisation))).weights
        assert weights.layers[0].q.dtype == dtype
        assert weights.layers[0].attn_norm.dtype == torch.float32


def test_llama3_frequency_factors(tmp_path: Path) -> None:
    model = tiny_model("llama3-rope")
    plain = 1.0 / (10000.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16))
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    path = write_gguf(model, tmp_path / "m.gguf", extra={"rope_freqs.weight": factors})
    assert_same_logits(path, model)


def test_a_declared_window_is_honoured(tmp_path: Path) -> None:
    model = tiny_model("mistral-window")
    assert_same_logits(write_gguf(model, tmp_path / "m.gguf", ARCH__attention__sliding_window=8), model)


def test_numbers_are_the_decimals_that_were_meant(tmp_path: Path) -> None:
    spec = load(str(write_gguf(tiny_model("llama"), tmp_path / "m.gguf"))).spec
    assert spec.norm_eps == 1e-6


def test_facts_beside_the_weights(tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", tokenizer__ggml__eot_token_id=7)
    loaded = load(str(path))
    assert loaded.eos_token_ids == (2, 7)
    assert loaded.info.bos_token_id == 1
    assert loaded.apply_chat_template([{"role": "user", "content": "x"}]) == "<s>x</s>"
    assert loaded.tokenizer.vocab_size == 320
    assert loaded.provenance.kind == "gguf"
    assert loaded.provenance.source == str(path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:700])


def replace_magic(path: Path) -> None:
    path.write_bytes(b"ABCD" + path.read_bytes()[4:])


def unknown_type(path: Path) -> None:
    data = bytearray(path.read_bytes())
    name = b"blk.0.ffn_down.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert data[at] == 0
    data[at] = 99
    path.write_bytes(bytes(data))


BROKEN: list[tuple[dict[str, Any], Callable[[Path], None] | None, list[str]]] = [
    ({}, truncate, ["m.gguf", "truncated", "tensor ", "Download"]),
    ({}, cut_header, ["m.gguf", "damaged", "Download"]),
    ({}, replace_magic, ["m.gguf", "magic", "Download"]),
    ({}, unknown_type, ["m.gguf", "blk.0.ffn_down.weight", "type 99", "Q8_0"]),
    ({"arch": "mamba"}, None, ["m.gguf", "'mamba'", "qwen2", "Choose"]),
    ({"drop": "blk.1.attn_k.weight"}, None, ["m.gguf", "lacks 1", "blk.1.attn_k.weight", "Download"]),
    ({"drop": "token_embd.weight"}, None, ["m.gguf", "token_embd.weight", "not a whole model"]),
    ({"extra": {"blk.0.moe.weight": np.ones(3, np.float32)}}, None, ["blk.0.moe.weight", "Choose another"]),
    (
        {"drop": "output_norm.weight", "extra": {"output_norm.weight ": np.ones(3, np.float32)}},
        None,
        ["output_norm.weight", "lacks"],
    ),
    (
        {"extra": {"blk.0.attn_norm.weight": np.ones(63, np.float32)}},
        None,
        ["blk.0.attn_norm.weight", "[63]", "[64]"],
    ),
    ({"extra": {"rope_freqs.weight": np.ones(5, np.float32)}}, None, ["rope_freqs.weight", "[5]", "[8]"]),
    (
        {"extra": {"blk.0.ffn_up.weight": np.ones((96, 64), np.int8)}},
        None,
        ["blk.0.ffn_up.weight", "I8", "Q8_0"],
    ),
    ({"ARCH__expert_count": 8}, None, ["mixture of experts", "dense"]),
    ({"ARCH__rope__dimension_count": 8}, None, ["rotates 8 of 16", "full rotary"]),
    ({"ARCH__rope__scaling__type": "longrope"}, None, ["longrope", "yarn"]),
    ({"split__count": 3}, None, ["split", "llama-gguf-split --merge"]),
    ({"ARCH__final_logit_softcapping": 30.0}, None, ["final_logit_softcapping", "30.0"]),
]


@pytest.mark.parametrize(("options", "damage", "words"), BROKEN)
def test_a_broken_file_is_refused_with_cause_and_remedy(
    options: dict[str, Any],
    damage: Callable[[Path], None] | None,
    words: list[str],
    tmp_path: Path,
    private_cache: Path,
) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", **options)
    if damage is not None:
        damage(path)
    with pytest.raises(ModelError) as caught:
        load(str(path))
    for word in words:
        assert word in str(caught.value)
    assert not list((private_cache / "models").iterdir())


def test_metadata_equal_the_packages_own_reading(tmp_path: Path) -> None:
    arrays = {
        "a__strings": ["", "é", "x" * 300],
        "a__floats": [0.5, -1e-3],
        "a__ints": [3, -4],
        "a__bools": [True, False],
    }
    path = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", **arrays)
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    assert metadata_of(ours) == metadata_of(theirs)
    assert metadata_of(ours)["a.strings"] == arrays["a__strings"]
    assert metadata_of(ours)["a.bools"] == [True, False]
    assert [tensor.name for tensor in ours.tensors] == [tensor.name for tensor in theirs.tensors]
    for a, b in zip(ours.tensors, theirs.tensors, strict=True):
        assert np.array_equal(a.data, b.data)
