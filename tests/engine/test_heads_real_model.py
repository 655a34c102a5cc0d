"""Heads on the real model: whatever they guess, the tokens are plain decoding's."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from safetensors.torch import save_file

from paceline import LLM, SamplingParams
from paceline.loading import load
from tests.loading.heads import ORIGINAL, tensors
from tests.models.heads import make_head_spec, make_head_weights

pytestmark = pytest.mark.model

TEXTS = ["Name three rivers.", "What is a prime number?", "Write a haiku about rain.", "Count to five."]
HIDDEN = 576


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """At random."""
    folder, spec = tmp_path_factory.mktemp("head"), load("embedded").spec
    shape = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "intermediate_size": 512}
    sizes = {"hidden_size": HIDDEN, "vocab_size": spec.vocab_size, "draft_vocab_size": 4096}
    weights = make_head_weights(
        make_head_spec(capture=(2, 15, 27), target_hidden_size=HIDDEN, **sizes, **shape)
    )
    stored = {name: part.clone() for name, part in tensors(weights, "original", spec.vocab_size).items()}
    save_file(stored, folder / "model.safetensors")
    names = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 512}
    (folder / "config.json").write_text(msgspec.json.encode({**ORIGINAL, **sizes, **names}).decode())
    return folder


def ask(llm: LLM, temperature: float) -> list[list[int]]:
    prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in TEXTS]
    params = [SamplingParams(max_tokens=20, temperature=temperature, seed=at) for at in range(len(TEXTS))]
    return [output.token_ids for output in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def plain() -> dict[float, list[list[int]]]:
    with LLM(draft="none", dtype="float32", max_num_seqs=1, context_length=256) as llm:
        return {temperature: ask(llm, temperature) for temperature in (0.0, 0.8)}


@pytest.mark.parametrize("draft_dtype", ["float32", "int8"])
@pytest.mark.parametrize("mode", ["serial-chain", "serial-tree", "overlapped", "swiftspec"])
@pytest.mark.parametrize("batch", [1, 4])
def test_plain_decodings_tokens(
    plain: dict[float, list[list[int]]], head: Path, mode: str, batch: int, draft_dtype: str
) -> None:
    options = {"max_num_seqs": batch, "context_length": 256, "num_speculative_tokens": 5}
    with LLM(draft=head, mode=mode, dtype="float32", draft_dtype=draft_dtype, **options) as llm:
        for temperature, expected in plain.items():
            assert ask(llm, temperature) == expected
        assert llm.speculation.num_drafted_nodes > 0
        assert llm.speculation.num_failed_drafts == 0
        assert not llm.lanes.drafter_losses
