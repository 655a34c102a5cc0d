"""Streaming, bytes and vocabularies."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ModelError
from paceline.loading import Tokenizer, check_same_vocabulary
from paceline.loading.gguf_tokenizer import build_tokenizer
from tests.loading.test_gguf_tokenizer import byte_level, sentencepiece
from tests.tiny_checkpoints import tiny_tokenizer

BYTES = Tokenizer(build_tokenizer(byte_level(), "m"))
PIECES = Tokenizer(build_tokenizer(sentencepiece(), "m"))
BOTH = pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "sentencepiece"])


def stream(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    decoder = tokenizer.stream(**options)
    return [*[decoder.push(token_id) for token_id in ids], decoder.flush()]


@BOTH
@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=30))
def test_a_stream_adds_up_to_the_text_and_never_breaks_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids, skip_special_tokens=False, continues=False)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 319), max_size=30))
def test_a_byte_level_stream_of_any_tokens_equals_decode(ids: list[int]) -> None:
    assert "".join(stream(BYTES, ids)) == BYTES.decode(ids)
    every = stream(BYTES, ids, skip_special_tokens=False)
    assert "".join(every) == BYTES.decode(ids, skip_special_tokens=False)


@BOTH
def test_a_character_comes_whole_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("☃", add_special_tokens=False)
    assert len(ids) >= 3
    pieces = stream(tokenizer, ids, continues=False)
    assert [piece for piece in pieces if piece] == ["☃"]
    assert pieces[-2] == "☃"


def test_bytes_that_are_no_character_become_the_replacement_only_when_that_is_certain() -> None:
    first = BYTES.encode("☃")[0]
    letter = BYTES.encode("x")[0]
    decoder = BYTES.stream()
    assert decoder.push(first) == ""
    assert decoder.push(letter) == "\ufffdx"
    assert decoder.push(first) == ""
    assert decoder.flush() == "\ufffd"


def test_a_copy_looks_ahead_without_a_trace() -> None:
    ids = BYTES.encode("a☃b")
    decoder = BYTES.stream()
    assert decoder.push_all(ids[:3]) == "a"
    twin = decoder.copy()
    assert twin.push_all(ids[3:]) == "☃b"
    assert decoder.push_all(ids[3:]) == "☃b"


def test_a_first_space_is_kept_after_a_prompt_and_dropped_in_a_text_of_its_own() -> None:
    ids = PIECES.encode("the other", add_special_tokens=False)
    assert "".join(stream(PIECES, ids)) == " the other"
    assert "".join(stream(PIECES, ids, continues=False)) == "the other" == PIECES.decode(ids)
    twin = PIECES.stream(continues=False)
    twin.push(ids[0])
    assert twin.copy().push(ids[1]) == " o"


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    ids = BYTES.encode("<s>the</s>")
    assert BYTES.decode(ids) == "the" == "".join(stream(BYTES, ids))
    assert "".join(stream(BYTES, ids, skip_special_tokens=False)) == "<s>the</s>"
    assert BYTES.special_ids == {0, 1, 2}


@BOTH
def test_bytes_of_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the ☃ 12", add_special_tokens=False)
    text = b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode()
    assert text.removeprefix(" ") == "the ☃ 12"
    assert tokenizer.token_bytes(2) == b"</s>"
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.id_token(2) == "</s>"
    assert tokenizer.id_token(10**6) is None


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path: Path) -> None:
    backend = tiny_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_file(tmp_path / "tokenizer.json").encode("xyzxyz")) == 6


def test_a_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    PIECES.save(tmp_path / "t.json")
    again = Tokenizer.from_file(tmp_path / "t.json")
    assert again.encode("the other <tool> é") == PIECES.encode("the other <tool> é")
    check_same_vocabulary(PIECES, again)


def test_metaspace_decoders() -> None:
    backend = build_tokenizer(sentencepiece(), "m")
    backend.decoder = tokenizers.decoders.Metaspace()
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("the other", add_special_tokens=False)
    assert "".join(stream(tokenizer, ids, continues=False)) == tokenizer.decode(ids) == "the other"


def test_an_unknown_decoder_is_refused() -> None:
    backend = tiny_tokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    with pytest.raises(ModelError, match=r"WordPiece.*ByteLevel.*Choose another"):
        Tokenizer(backend)


def test_vocabularies_that_differ_only_by_padding_are_the_same() -> None:
    padded = byte_level()
    padded["tokenizer.ggml.tokens"] += ["[PAD320]", "[PAD321]"]
    padded["tokenizer.ggml.token_type"] += [5, 5]
    wider = Tokenizer(build_tokenizer(padded, "m"))
    assert wider.vocab_size == 322
    check_same_vocabulary(wider, BYTES)
    check_same_vocabulary(BYTES, wider)


def test_the_first_id_that_differs_is_named() -> None:
    other = byte_level()
    other["tokenizer.ggml.tokens"][310:312] = reversed(other["tokenizer.ggml.tokens"][310:312])
    with pytest.raises(ModelError, match=r"id 310 is .* for the target and .* for the draft.*n-gram"):
        check_same_vocabulary(BYTES, Tokenizer(build_tokenizer(other, "m")))
    with pytest.raises(ModelError, match=r"id 3 is"):
        check_same_vocabulary(BYTES, PIECES)


def test_an_added_token_that_only_one_has_is_a_difference() -> None:
    backend = tiny_tokenizer()
    backend.add_tokens(["<think>"])
    with pytest.raises(ModelError, match=r"id 320 is '<think>' for the target and None for the draft"):
        check_same_vocabulary(Tokenizer(backend), BYTES)
