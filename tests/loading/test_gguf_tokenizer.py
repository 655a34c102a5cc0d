"""Tokenizers from GGUF metadata, against independent references."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from paceline.errors import ModelError
from paceline.loading.gguf_tokenizer import build_tokenizer, eos_ids, special_tokens
from paceline.loading.tokenizer import Tokenizer
from tests.tiny_checkpoints import VOCAB, tiny_tokenizer

WORDS = ["▁the", "▁th", "▁t", "he", "the", "er", "▁other", "oth", "▁o", "in", "ing", "▁▁", "th", "ot", "her"]


def byte_level(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    saved = json.loads(tiny_tokenizer().to_str())["model"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(saved["vocab"], key=saved["vocab"].get),
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (VOCAB - 3)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in saved["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}


def sentencepiece(**changes: Any) -> dict[str, Any]:
    letters = sorted(set("".join(WORDS)))
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *WORDS, *letters, "<tool>"]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(WORDS) + len(letters))] + [0.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(WORDS) + len(letters)), 4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in changes.items()}}


def best_first(text: str, metadata: dict[str, Any]) -> list[int]:
    """Sentencepiece's own algorithm: join the neighbours whose union scores best, the leftmost of equals."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: index for index, token in enumerate(tokens)}
    scores = {
        token: score
        for token, score, kind in zip(
            tokens, metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"], strict=True
        )
        if kind == 1
    }
    pieces = list(text.replace(" ", "▁"))
    while True:
        joins = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not joins:
            break
        at = -max(joins)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    out: list[int] = []
    for piece in pieces:
        out += [ids[piece]] if piece in scores else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return out


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="theroing ▁é☃", max_size=30))
def test_sentencepiece_joins_best_first(text: str) -> None:
    metadata = sentencepiece(add_space_prefix=False, add_bos_token=False)
    assert Tokenizer(build_tokenizer(metadata, "m")).encode(text) == best_first(text, metadata)


def test_sentencepiece_prefix_bos_and_round_trip() -> None:
    tokenizer = Tokenizer(build_tokenizer(sentencepiece(), "m"))
    ids = tokenizer.encode("the other é thing")
    assert ids[:2] == [1, tokenizer.token_id("▁the")]
    assert tokenizer.decode(ids) == "the other é thing"
    assert tokenizer.encode("the", add_special_tokens=False) == ids[1:2]
    assert tokenizer.encode("<tool>", add_special_tokens=False) == [tokenizer.vocab_size - 1]
    assert tokenizer.decode([1, tokenizer.vocab_size - 1, 2]) == "<tool>"
    assert tokenizer.token_bytes(3 + 0xE9) == b"\xe9"


def test_gemma_style_sentencepiece_has_no_prefix() -> None:
    tokenizer = Tokenizer(build_tokenizer(sentencepiece(add_space_prefix=False), "m"))
    ids = tokenizer.encode("the  other")
    assert ids[:2] == [1, tokenizer.token_id("the")]
    assert tokenizer.decode(ids) == "the  other"


def test_byte_level_equals_the_tokenizer_it_came_from() -> None:
    original = tiny_tokenizer()
    ours = Tokenizer(build_tokenizer(byte_level(), "m"))
    for text in ["the quick brown fox", "don't  stop\n\n\t2024", "naïve ☃ 日本語", "<s>the</s>"]:
        assert ours.encode(text) == original.encode(text).ids
    assert ours.vocabulary() == original.get_vocab(with_added_tokens=True)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 2024  now", ["it", "'s", " 2024", " ", " now"]),
        ("smollm", "it's 2024  now", ["it", "'s", " ", "2", "0", "2", "4", " ", " now"]),
        ("llama-bpe", "IT'S 12345\n\n x", ["IT", "'S", " ", "123", "45", "\n\n", " x"]),
        ("qwen2", "IT'S 123\n\n x", ["IT", "'S", " ", "1", "2", "3", "\n\n", " x"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", " ", "1", "2"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
    ],
)
def test_pre_tokenizers_cut_where_they_should(pre: str, text: str, pieces: list[str]) -> None:
    backend = build_tokenizer(byte_level(pre), "m")
    alphabet = {**Tokenizer(backend).vocabulary()}
    found = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    readable = ["".join({"Ġ": " ", "Ċ": "\n"}.get(c, c) for c in piece) for piece in found]
    assert readable == pieces
    assert alphabet


def test_patterns_work_one_after_the_other() -> None:
    cuts = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(p), "isolated") for p in (r"\p{N}", r" ?\p{L}+")]
    )
    assert [piece for piece, _ in cuts.pre_tokenize_str("ab1 cd")] == ["ab", "1", " cd"]


def test_llama3_words_that_are_tokens_need_no_merges() -> None:
    metadata = byte_level("llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.tokens"].append("zqx")
    metadata["tokenizer.ggml.token_type"].append(1)
    tokenizer = Tokenizer(build_tokenizer(metadata, "m"))
    assert tokenizer.encode("zqx") == [VOCAB]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert len(Tokenizer(build_tokenizer(metadata, "m")).encode("zqx")) == 3


def test_qwen2_composes_characters() -> None:
    tokenizer = Tokenizer(build_tokenizer(byte_level("qwen2"), "m"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


@pytest.mark.parametrize(
    ("pre", "changes", "head", "tail"),
    [
        ("gpt-2", {}, [], []),
        ("llama-bpe", {}, [1], []),
        ("llama3", {}, [1], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_bos_and_eos(pre: str, changes: dict[str, Any], head: list[int], tail: list[int]) -> None:
    tokenizer = Tokenizer(build_tokenizer(byte_level(pre, **changes), "m"))
    plain = tokenizer.encode("the fox", add_special_tokens=False)
    assert tokenizer.encode("the fox") == [*head, *plain, *tail]


def test_ends_of_generation() -> None:
    metadata = byte_level(eot_token_id=9)
    metadata["tokenizer.ggml.tokens"][5] = "<|im_end|>"
    metadata["tokenizer.ggml.tokens"][6] = "<|eot_id|>"
    metadata["tokenizer.ggml.token_type"][5] = 3
    assert eos_ids(metadata) == (2, 9, 5)  # <|eot_id|> is an ordinary token here
    assert special_tokens(metadata) == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({}, ["m.gguf", "no vocabulary", "Convert"]),
        (byte_level("klingon"), ["m.gguf", "'klingon'", "smollm", "checkpoint"]),
        (byte_level(merges=None), ["m.gguf", "merges", "Convert"]),
        (byte_level(merges=["Ġ zz"]), ["m.gguf", "Token `zz`", "Download"]),
        (byte_level(model="t5"), ["m.gguf", "'t5'", "gpt2", "checkpoint"]),
        (sentencepiece(scores=None), ["m.gguf", "score", "Convert"]),
    ],
)
def test_what_is_unknown_is_refused(metadata: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        build_tokenizer(metadata, "m.gguf")
    for word in words:
        assert word in str(caught.value)
