"""Captured features on disk: against the target's own pass, and after crashes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.core.scheduler import Limits
from paceline.errors import ModelError
from paceline.execution.forward_batch import Segment
from paceline.train.capture import capture
from paceline.train.store import FeatureStore, StoreMeta, StoreWriter

from .support import LAYERS, setup_of, tiny_target, write_answers

PLACES = (2, 4, 5)


def test_what_is_kept_is_what_the_target_computes(tmp_path: Path) -> None:
    model = tiny_target(tmp_path)
    answers = write_answers(tmp_path / "answers.jsonl", 6, model.vocab_size)
    setup = setup_of(model)
    assert capture(setup, answers, tmp_path / "store", PLACES, tokens_per_pass=60) == 6
    store = FeatureStore(tmp_path / "store")
    limits = Limits(64, 64, max_num_seqs=1, max_batch_tokens=64)
    for one in store.sequences:
        runner = setup.runner(limits, 64, capture=(*PLACES, LAYERS))
        runner.tables.write(0, 0, range(one.length))
        ids = store.tokens[one.start : one.start + one.length].tolist()
        assert runner.kv.features is not None
        for at, token in enumerate(ids):
            logits = runner.forward([Segment(0, at, [token], wanted=True)])
            features = runner.kv.features[at].bfloat16()
            assert torch.equal(store.features[one.start + at], features[:-1])
            row = at - (one.prompt_length - 1)
            if 0 <= row < one.answer_length:
                assert torch.equal(store.finals[one.answer_start + row], features[-1])
                torch.testing.assert_close(store.lse[one.answer_start + row], logits[0].logsumexp(-1))
                assert int(store.best[one.answer_start + row]) == int(logits[0].argmax())


def test_more_answers_are_captured_where_it_stopped(tmp_path: Path) -> None:
    model = tiny_target(tmp_path)
    whole = write_answers(tmp_path / "answers.jsonl", 9, model.vocab_size)
    lines = whole.read_bytes().splitlines(keepends=True)
    setup = setup_of(model)
    capture(setup, whole, tmp_path / "once", PLACES)
    whole.write_bytes(b"".join(lines[:5]) + lines[5][:20])
    assert capture(setup, whole, tmp_path / "twice", PLACES, tokens_per_pass=40) == 5
    # Killed while it was writing: what the index does not list is overwritten.
    for name in ("tokens", "features", "finals", "lse", "best"):
        with (tmp_path / "twice" / f"{name}.bin").open("ab") as file:
            file.write(b"rest of a pass")
    with (tmp_path / "twice" / "sequences.jsonl").open("a") as file:
        file.write('{"start": 1')
    whole.write_bytes(b"".join(lines))
    assert capture(setup, whole, tmp_path / "twice", PLACES, tokens_per_pass=40) == 9
    once, twice = FeatureStore(tmp_path / "once"), FeatureStore(tmp_path / "twice")
    assert once.sequences == twice.sequences
    for name in ("tokens", "features", "finals", "lse", "best"):
        assert torch.equal(getattr(once, name), getattr(twice, name)), name


def test_another_target_or_another_capture_is_refused(tmp_path: Path) -> None:
    meta = StoreMeta("one", "f1", (1, 2), 4, "float32", "answers.jsonl")
    StoreWriter(tmp_path, meta).close()
    with pytest.raises(ModelError, match=r"capture \(1, 2\) instead of \(1, 3\)"):
        StoreWriter(tmp_path, StoreMeta("one", "f1", (1, 3), 4, "float32", "answers.jsonl"))


def test_a_store_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    model = tiny_target(tmp_path)
    answers = write_answers(tmp_path / "answers.jsonl", 3, model.vocab_size)
    capture(setup_of(model), answers, tmp_path / "store", PLACES)
    features = tmp_path / "store" / "features.bin"
    features.write_bytes(features.read_bytes()[:-2])
    with pytest.raises(ModelError, match="shorter than its index"):
        FeatureStore(tmp_path / "store")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 2 is not an answer"),
        ('{"prompt_token_ids": [1, 2]}', "line 2 is not an answer .*token_ids"),
        ('{"prompt_token_ids": [1], "token_ids": [99999]}', "line 2 has token ids that the target lacks"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    model = tiny_target(tmp_path)
    answers = write_answers(tmp_path / "answers.jsonl", 3, model.vocab_size)
    lines = answers.read_text().splitlines()
    lines[1] = line
    answers.write_text("\n".join(lines) + "\n")
    with pytest.raises(ModelError, match=message):
        capture(setup_of(model), answers, tmp_path / "store", PLACES)
