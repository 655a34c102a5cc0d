"""Text to token ids and back, one token at a time if need be."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from paceline.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# llama.cpp's converter fills a vocabulary up to the embedding's rows with these.
_PADDING_TOKEN = re.compile(r"\[PAD\d*\]")


class Tokenizer:
    """A vocabulary with its encoder and decoder.

    Raises ModelError if the decoder is neither byte-level nor sentencepiece: then no token has bytes of its
    own, and neither streaming nor grammar masks would be exact.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._decoder = _Decoder(backend)

    @classmethod
    def from_file(cls, path: Path) -> Tokenizer:
        """Read a `tokenizer.json`. Raises ModelError if it is missing, damaged or of an unknown kind."""
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises plain Exception
            raise ModelError(
                f"cannot read the tokenizer {path}: {error}. Download the file again."
            ) from error
        return cls(backend)

    def save(self, path: Path) -> None:
        path.write_text(self._backend.to_str(), encoding="utf-8")

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id, added tokens included. Logits may be wider (padding)."""
        return max(self.vocabulary().values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out by default: control tokens such as the end of a turn."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def vocabulary(self) -> dict[str, int]:
        """Every token's text, as stored, and its id."""
        return self._backend.get_vocab(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` prepends or appends what the model expects (bos, eos)."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What one token contributes to the text, special or not; empty for an id outside the vocabulary."""
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._decoder.to_bytes(token)

    def stream(self, skip_special_tokens: bool = True, continues: bool = True) -> TextStream:
        """Start decoding token by token.

        continues: the tokens continue a prompt, so that the space in front of a first word is kept.
        False makes the pieces add up to `decode(ids)`, which drops it for sentencepiece models.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return TextStream(self, skipped, strip=self._decoder.strips_first_space and not continues)


class TextStream:
    """Incremental decoding. A character whose bytes are spread over several tokens is emitted once, whole.

    Only bytes that can never become valid UTF-8 turn into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int], strip: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._strip = strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often empty."""
        if token_id in self._skipped:
            return ""
        return self._emit(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def push_all(self, ids: Iterable[int]) -> str:
        return "".join([self.push(token_id) for token_id in ids])

    def flush(self) -> str:
        """End the stream: what is left of an unfinished character, as U+FFFD."""
        return self._emit(self._utf8.decode(b"", final=True))

    def copy(self) -> TextStream:
        """An independent stream in the same state, to look ahead with."""
        twin = TextStream(self._tokenizer, self._skipped, self._strip)
        twin._utf8.setstate(self._utf8.getstate())
        return twin

    def _emit(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _Decoder:
    """The bytes of each token, from the kind of decoder that a tokenizer declares."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        steps = _decoder_steps(backend)
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        if not self._byte_level and not kinds & {"ByteFallback", "Metaspace"}:
            raise ModelError(
                f"the tokenizer's decoder {sorted(kinds) or None} is not supported. Supported: byte-level "
                "BPE (ByteLevel) and sentencepiece BPE (ByteFallback, Metaspace). Choose another model."
            )
        self.strips_first_space = any(
            (step["type"] == "Strip" and step.get("start", 0) > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )

    def to_bytes(self, token: str) -> bytes:
        if self._byte_level:
            try:
                return bytes([BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token, stored as plain text
                return token.encode()
        match = _BYTE_TOKEN.fullmatch(token)
        if match:
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise ModelError unless every token id means the same in both. Padding at the end may differ."""
    ours = {index: token for token, index in target.vocabulary().items()}
    theirs = {index: token for token, index in draft.vocabulary().items()}
    for index in sorted(ours.keys() | theirs.keys()):
        mine, other = ours.get(index), theirs.get(index)
        if mine == other or (_is_padding(mine) and _is_padding(other)):
            continue
        raise ModelError(
            f"target and draft have different vocabularies: id {index} is {mine!r} for the target and "
            f"{other!r} for the draft. Choose a draft model of the target's own family, or a drafter that "
            "needs no model (n-gram, suffix)."
        )


def _is_padding(token: str | None) -> bool:
    return token is None or _PADDING_TOKEN.fullmatch(token) is not None


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def _byte_of_char() -> dict[str, int]:
    """GPT-2's reversible map from printable characters to bytes (openai/gpt-2, encoder.py)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


BYTE_OF_CHAR = _byte_of_char()
