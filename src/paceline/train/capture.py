"""The capture stage: the target reads its own answers once, and what it computes on the way is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from paceline.core.scheduler import Limits
from paceline.engine.model_setup import ModelSetup
from paceline.errors import ModelError
from paceline.execution.forward_batch import Segment, build_batch
from paceline.execution.model_runner import ModelRunner
from paceline.train.answers import Answer, NumberedAnswer, read_answers
from paceline.train.store import CapturedSequence, StoreMeta, StoreWriter, stored_sequences

_ROWS_PER_SUM = 64
"""Rows whose logits are summed at a time: the exponentials of 64 rows stay in the cache."""


def capture(
    setup: ModelSetup,
    answers: Path,
    folder: Path,
    places: tuple[int, ...],
    *,
    tokens_per_pass: int = 1024,
    longest: int = 2048,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> int:
    """Captures what of the answers' file is not in the store `folder` yet; gives how many sequences it has.

    places: capture indices. longest: answers with more tokens, prompt included, are cut there. progress:
    called with tokens and lines done, the earlier ones included.
    Raises ModelError for answers that the target cannot have given, or a folder of something else.
    """
    spec = setup.model.spec
    longest = min(longest, spec.context_length)
    meta = StoreMeta(
        target=setup.model.name,
        fingerprint=setup.model.provenance.fingerprint,
        capture=places,
        hidden_size=spec.hidden_size,
        dtype=setup.precision,
        answers=answers.name,
    )
    writer = StoreWriter(folder, meta)
    try:
        done = writer.sequences[-1].source + 1 if writer.sequences else 0
        usable = _usable(read_answers(answers, done), answers, spec.vocab_size, longest)
        groups = _groups(usable, tokens_per_pass)
        first = next(groups, None)
        if first is not None:
            _capture(setup, writer, chain([first], groups), max(tokens_per_pass, longest), longest, progress)
    finally:
        writer.close()
    return len(writer.sequences)


def _capture(
    setup: ModelSetup,
    writer: StoreWriter,
    groups: Iterable[list[NumberedAnswer]],
    most: int,
    longest: int,
    progress: Callable[[int, int], None],
) -> None:
    limits = Limits(longest, most, max_num_seqs=most // 4, max_batch_tokens=most)
    runner = setup.runner(limits, longest, capture=(*writer.meta.capture, setup.model.spec.num_layers))
    tokens = sum(one.length for one in writer.sequences)
    try:
        for group in groups:
            writer.add(_pass(runner, group))
            tokens += sum(_length(one.answer) for one in group)
            progress(tokens, group[-1].line + 1)
    finally:
        runner.close()


def _length(answer: Answer) -> int:
    return len(answer.prompt_token_ids) + len(answer.token_ids)


def _usable(
    answers: Iterator[NumberedAnswer], path: Path, vocab_size: int, longest: int
) -> Iterator[NumberedAnswer]:
    for one in answers:
        answer = one.answer
        ids = (*answer.prompt_token_ids, *answer.token_ids)
        if not all(0 <= token < vocab_size for token in ids):
            raise ModelError(
                f"{path}, line {one.line + 1} has token ids that the target lacks: these answers are another "
                "model's. Generate them with this target."
            )
        room = longest - len(answer.prompt_token_ids)
        cut = _cut(answer, room)
        if answer.prompt_token_ids and cut.token_ids:
            yield replace(one, answer=cut)


def _cut(answer: Answer, room: int) -> Answer:
    """The answer with `room` tokens at most."""
    return msgspec.structs.replace(answer, token_ids=answer.token_ids[: max(0, room)])


def _groups(answers: Iterator[NumberedAnswer], tokens: int) -> Iterator[list[NumberedAnswer]]:
    """One after the other, so that what is done is a prefix of the file."""
    group: list[NumberedAnswer] = []
    size = 0
    for one in answers:
        length = _length(one.answer)
        if group and size + length > tokens:
            yield group
            group, size = [], 0
        group.append(one)
        size += length
    if group:
        yield group


def _pass(runner: ModelRunner, group: Sequence[NumberedAnswer]) -> list[CapturedSequence]:
    """One forward pass over whole sequences, each in slots of its own."""
    segments, wanted, at = [], [], 0
    for row, one in enumerate(group):
        ids = [*one.answer.prompt_token_ids, *one.answer.token_ids]
        runner.tables.write(row, 0, range(at, at + len(ids)))
        segments.append(Segment(row=row, start=0, tokens=ids, wanted=False))
        first = at + len(one.answer.prompt_token_ids) - 1
        wanted.append(np.arange(first, first + len(one.answer.token_ids), dtype=np.int32))
        at += len(ids)
    batch = replace(build_batch(segments, runner.tables), logit_rows=np.concatenate(wanted))
    logits = runner.decoder.forward(batch, runner.kv)
    lse, best = _summed(logits)
    assert runner.kv.features is not None
    features = runner.kv.features[:at].to("cpu", torch.bfloat16, copy=True)
    found, token, row_at = [], 0, 0
    for one, rows in zip(group, wanted, strict=True):
        answer, count = one.answer, len(rows)
        tokens = slice(token, token + _length(answer))
        answers = slice(row_at, row_at + count)
        found.append(
            CapturedSequence(
                tokens=[*answer.prompt_token_ids, *answer.token_ids],
                prompt_length=len(answer.prompt_token_ids),
                category=answer.category,
                temperature=answer.temperature,
                source=one.line,
                features=features[tokens, :-1],
                finals=features[torch.from_numpy(rows).long(), -1],
                lse=lse[answers],
                best=best[answers],
            )
        )
        token, row_at = tokens.stop, answers.stop
    return found


def _summed(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and the likeliest token of each row."""
    parts = torch.split(logits, _ROWS_PER_SUM)
    lse = torch.cat([part.logsumexp(-1) for part in parts])
    return lse.cpu(), torch.cat([part.argmax(-1) for part in parts]).cpu()


def bytes_to_come(answers: Path, folder: Path, hidden_size: int, places: int, longest: int) -> int:
    """Disk space that the features of answers which are not captured yet will take."""
    done = stored_sequences(folder)
    first = done[-1].source + 1 if done else 0
    size = 0
    for one in read_answers(answers, first):
        length = min(_length(one.answer), longest)
        kept = min(len(one.answer.token_ids), longest)
        size += length * (2 * places * hidden_size + 4) + kept * (2 * hidden_size + 8)
    return size
