"""The tokenizer of a Hugging Face checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from paceline.errors import ModelError
from paceline.loading.checkpoint import read_json
from paceline.loading.gguf_tokenizer import byte_level_tokenizer
from paceline.loading.tokenizer import Tokenizer

# Classes whose vocab.json and merges.txt can be read without tokenizer.json, and how they cut text.
_PRE_TOKENIZERS = {
    "Qwen2Tokenizer": "qwen2",
    "Qwen2TokenizerFast": "qwen2",
    "GPT2Tokenizer": "gpt-2",
    "GPT2TokenizerFast": "gpt-2",
}


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read `tokenizer.json`, or `vocab.json` + `merges.txt` of a known class. Raises ModelError otherwise."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return Tokenizer.from_file(path)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _from_merges(folder)
    found = (
        "only a sentencepiece tokenizer.model" if (folder / "tokenizer.model").is_file() else "no tokenizer"
    )
    raise ModelError(
        f"{folder} holds {found}; tokenizer.json is needed. Write it with transformers: "
        "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`."
    )


def _from_merges(folder: Path) -> Tokenizer:
    config = read_json(folder / "tokenizer_config.json") or {}
    kind = config.get("tokenizer_class")
    if kind not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{folder} has no tokenizer.json and its tokenizer_class is {kind!r}; without the former only "
            f"{', '.join(_PRE_TOKENIZERS)} can be read. Write it with transformers: "
            "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`."
        )
    vocabulary: dict[str, int] = read_json(folder / "vocab.json") or {}
    lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    pairs = [line.partition(" ") for line in lines if line and not line.startswith("#version")]
    merges = [(left, right) for left, _, right in pairs]
    backend = byte_level_tokenizer(vocabulary, merges, _PRE_TOKENIZERS[kind], str(folder))
    for token in _added_tokens(folder, config):
        backend.add_tokens([token])
    return Tokenizer(backend)


def _added_tokens(folder: Path, config: dict[str, Any]) -> list[AddedToken]:
    """Tokens outside the merges, in the order of their ids, so that each gets the id it must have."""
    declared = config.get("added_tokens_decoder") or {}
    if declared:
        entries = sorted((int(index), entry) for index, entry in declared.items())
        return [
            AddedToken(entry["content"], special=bool(entry.get("special")), normalized=False)
            for _, entry in entries
        ]
    extra = read_json(folder / "added_tokens.json") or {}
    return [
        AddedToken(token, special=True, normalized=False)
        for token, _ in sorted(extra.items(), key=lambda item: int(json.dumps(item[1])))
    ]
