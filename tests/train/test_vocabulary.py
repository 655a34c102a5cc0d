"""d2t and t2d."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.train.batches import split
from paceline.train.capture import capture
from paceline.train.store import FeatureStore
from paceline.train.vocabulary import draft_vocabulary

from .support import setup_of, tiny_target, write_answers


def test_the_most_frequent_tokens_of_the_answers(tmp_path: Path) -> None:
    model = tiny_target(tmp_path)
    answers = write_answers(tmp_path / "answers.jsonl", 20, model.vocab_size)
    capture(setup_of(model), answers, tmp_path / "store", (2, 4, 5))
    store = FeatureStore(tmp_path / "store")
    training, held_out = split(store, 0.3, 100)
    assert training
    assert held_out
    counts = [0] * model.spec.vocab_size
    for one in training:
        for token in store.answer(one).tolist():
            counts[token] += 1
    vocabulary = draft_vocabulary(store, training, model.spec.vocab_size, 30)
    ids = vocabulary.ids.tolist()
    assert ids == sorted(ids)
    assert len(ids) == 30
    assert min(counts[i] for i in ids) >= max(counts[i] for i in range(len(counts)) if i not in ids)
    assert torch.equal(torch.arange(30) + vocabulary.offsets, vocabulary.ids)
    assert torch.equal(vocabulary.members.nonzero().flatten(), vocabulary.ids)
    assert torch.equal(vocabulary.index[vocabulary.ids], torch.arange(30))
    assert vocabulary.covered == sum(counts[i] for i in ids) / sum(counts)


def test_a_small_vocabulary_is_taken_whole(tmp_path: Path) -> None:
    model = tiny_target(tmp_path)
    answers = write_answers(tmp_path / "answers.jsonl", 5, model.vocab_size)
    capture(setup_of(model), answers, tmp_path / "store", (2, 4, 5))
    store = FeatureStore(tmp_path / "store")
    vocabulary = draft_vocabulary(store, store.sequences, model.spec.vocab_size, 10**6)
    assert torch.equal(vocabulary.ids, torch.arange(model.spec.vocab_size))
    assert not vocabulary.offsets.any()
