"""The packaged model against transformers' own reading of the same GGUF file."""

from __future__ import annotations

import random
import time
import warnings
from typing import Any

import pytest
import tokenizers
import torch

from paceline.loading import LoadedModel, load, resolve
from tests.loading.support import logits

pytestmark = pytest.mark.model

PROMPTS = [
    "Janet\u2019s ducks lay 16 eggs per day. She eats three for breakfast and sells the rest for $2.",
    "def has_close_elements(numbers: List[float], threshold: float) -> bool:\n    for i in x:\n\tpass",
    "Écrivez un essai:  40 percent,\u00a02024\u201101\u201102 — naïve café ☃ 日本語テキスト\r\n\n   end   ",
    "it's WE'LL they've 3.14159 1,000,000 \t\t x_y__z <|im_end|> <repo_name>owner/repo",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE_DIR", str(tmp_path_factory.mktemp("embedded")))
        load("embedded")
        start = time.perf_counter()
        loaded = load("embedded")
        assert time.perf_counter() - start < 5.0  # 0.1 s on an idle machine
        return loaded


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    import transformers

    path = resolve("embedded").path
    assert path is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers passes over the file's pre-tokenizer; this is the one of the original tokenizer.json.
    cuts = [
        tokenizers.pre_tokenizers.Digits(True),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
    reference.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(cuts)
    return reference


def texts() -> list[str]:
    """The prompts above, and mixtures of their pieces."""
    generator = random.Random(0)
    pieces = [piece for prompt in PROMPTS for piece in prompt.split(" ")]
    mixed = [
        generator.choice([" ", "  ", "\n", ""]).join(generator.choices(pieces, k=12)) for _ in range(500)
    ]
    return PROMPTS + mixed


def test_token_ids_equal_the_reference(model: LoadedModel, tokenizer: Any) -> None:
    for text in texts():
        ids = model.tokenizer.encode(text)
        assert ids == tokenizer(text).input_ids
        assert model.tokenizer.decode(ids, skip_special_tokens=False) == text
        stream = model.tokenizer.stream(skip_special_tokens=False)
        assert stream.push_all(ids) + stream.flush() == text
    assert len(model.tokenizer.encode("12345")) == 5


def test_chat_template_equals_the_reference(model: LoadedModel, tokenizer: Any) -> None:
    messages = [
        {"role": "user", "content": "Add 12345 and 67"},
        {"role": "assistant", "content": "12412"},
        {"role": "user", "content": "é ☃ "},
    ]
    ours = model.apply_chat_template(messages)
    assert ours == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = model.tokenizer.encode(ours, add_special_tokens=False)
    assert ids == tokenizer(ours, add_special_tokens=False).input_ids
    assert ids.count(1) == 5
    assert model.tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_facts(model: LoadedModel) -> None:
    assert model.eos_token_ids == (2, 0)
    assert model.context_length == 8192
    assert (model.spec.num_layers, model.spec.num_heads, model.spec.num_kv_heads) == (30, 9, 3)
    assert model.spec.norm_eps == 1e-5
    assert model.weights.lm_head is None


@pytest.mark.slow
def test_weights_and_logits_equal_transformers(model: LoadedModel) -> None:
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = str(resolve("embedded").path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.LlamaConfig(**load_gguf_checkpoint(path)["config"])
        reference = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
        state = load_gguf_checkpoint(path, return_tensors=True, model_to_load=reference)["tensors"]
    missing, surplus = reference.load_state_dict(state, strict=False)
    assert (missing, surplus) == (["lm_head.weight"], [])
    assert torch.equal(model.weights.embed, state["model.embed_tokens.weight"])
    for index, layer in enumerate(model.weights.layers):
        prefix = f"model.layers.{index}."
        assert torch.equal(layer.q, state[prefix + "self_attn.q_proj.weight"])
        assert torch.equal(layer.k, state[prefix + "self_attn.k_proj.weight"])
        assert torch.equal(layer.down, state[prefix + "mlp.down_proj.weight"])
        assert torch.equal(layer.attn_norm, state[prefix + "input_layernorm.weight"])
    for prompt in PROMPTS:
        ids = model.tokenizer.encode(prompt)
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0]
        actual = logits(model.spec, model.weights, ids)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
