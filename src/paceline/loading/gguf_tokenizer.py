"""A tokenizer from the metadata of a GGUF file.

The pre-tokenisers are those of the original Hugging Face tokenizers; llama.cpp's names for them are in
its `llama-vocab.cpp`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from paceline.errors import ModelError

Metadata = Mapping[str, Any]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _TAIL
_QWEN2 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _TAIL
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
# Each text is cut by the patterns one after the other.
_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "starcoder": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "gpt2": "gpt-2"}
_WHOLE_WORDS = {"llama-bpe", "tekken"}  # a word that is itself a token is not built from merges
_BOS_BY_DEFAULT = {"llama-bpe", "tekken"}
_COMPOSED = {"qwen2", "deepseek-r1-qwen"}  # text is brought to Unicode NFC first

# llama.cpp ends a generation at these control tokens even if the metadata does not name them.
_END_OF_GENERATION = frozenset(
    ["<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>"]
)


def build_tokenizer(metadata: Metadata, where: str) -> Tokenizer:
    """Build the tokenizer that a GGUF file describes. Raises ModelError, naming it, for an unknown kind."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{where} holds no vocabulary (tokenizer.ggml.tokens). Convert the model again.")
    types = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if kind == "gpt2":
        tokenizer = _byte_level(metadata, tokens, where)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata, tokens, types, where)
    else:
        raise ModelError(
            f"{where} has a tokenizer of kind {kind!r}, which is not supported. Supported: gpt2 (byte-level "
            "BPE), llama (sentencepiece). Use the model's Hugging Face checkpoint instead."
        )
    _add_tokens(tokenizer, tokens, types)
    _add_bos_eos(tokenizer, metadata, tokens)
    return tokenizer


def eos_ids(metadata: Metadata) -> tuple[int, ...]:
    """Every token that ends a generation: the declared ones and well-known control tokens, in that order."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    ids = [int(token_id) for token_id in found if token_id is not None]
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    types = metadata.get("tokenizer.ggml.token_type") or []
    ids += [
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == CONTROL and token in _END_OF_GENERATION
    ]
    return tuple(dict.fromkeys(ids))


def special_tokens(metadata: Metadata) -> dict[str, str]:
    """The tokens that chat templates refer to by name."""
    keys = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    ids = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in keys.items()}
    return {name: tokens[index] for name, index in ids.items() if index is not None and index < len(tokens)}


def byte_level_tokenizer(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], pre: str, where: str
) -> Tokenizer:
    """A byte-level BPE tokenizer. pre: llama.cpp's name of the pre-tokeniser; ModelError if it is unknown."""
    pre = _ALIASES.get(pre, pre)
    if pre not in _PATTERNS:
        raise ModelError(
            f"{where} uses the pre-tokenizer {pre!r}, which is not supported: text would be cut wrongly. "
            f"Supported: {', '.join(_PATTERNS)}. Use the model's Hugging Face checkpoint instead."
        )
    tokenizer = _bpe(where, vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _byte_level(metadata: Metadata, tokens: Sequence[str], where: str) -> Tokenizer:
    merges = metadata.get("tokenizer.ggml.merges")
    if not merges:
        raise ModelError(f"{where} holds no merges (tokenizer.ggml.merges). Convert the model again.")
    cuts = [merge.index(" ", 1) for merge in merges]
    pairs = [(merge[:cut], merge[cut + 1 :]) for merge, cut in zip(merges, cuts, strict=True)]
    pre = str(metadata.get("tokenizer.ggml.pre") or "default")
    return byte_level_tokenizer({token: index for index, token in enumerate(tokens)}, pairs, pre, where)


def _sentencepiece(metadata: Metadata, tokens: Sequence[str], types: Sequence[int], where: str) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelError(
            f"{where} holds no score per token (tokenizer.ggml.scores). Convert the model again."
        )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pieces = {
        token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == NORMAL
    }
    unknown = tokens[int(metadata.get("tokenizer.ggml.unknown_token_id") or 0)]
    merges = _merges(pieces, vocabulary)
    tokenizer = _bpe(where, vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    spaced = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    underline = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), underline]) if spaced else underline
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if spaced else steps)
    return tokenizer


def _bpe(where: str, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocabulary, merges, **options))
    except Exception as error:  # the Rust side raises plain Exception
        raise ModelError(
            f"the vocabulary of {where} is damaged: {error}. Download the file again."
        ) from error


def _merges(pieces: Mapping[str, float], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Sentencepiece joins the neighbours whose union scores best.

    As BPE merges, that is every split of every piece into two pieces, the best score first.
    """
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, score in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-score, vocabulary[left], vocabulary[right], left, right))
    ranked.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    added = [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])


def _add_bos_eos(tokenizer: Tokenizer, metadata: Metadata, tokens: Sequence[str]) -> None:
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre") or "default"
    by_default = kind == "llama" or _ALIASES.get(pre, pre) in _BOS_BY_DEFAULT
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    head = [bos] if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", by_default) else []
    tail = [eos] if eos is not None and metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if head or tail:
        names = [tokens[index] for index in head], [tokens[index] for index in tail]
        template = [*names[0], "$A", *names[1]]
        special = [(tokens[index], int(index)) for index in {*head, *tail}]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=template, pair=[*template, *names[0], "$B", *names[1]], special_tokens=special
        )
