"""Captured sequences packed into training batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.train.start import Sample
from paceline.train.store import FeatureStore, StoredSequence
from paceline.train.unroll import Context


@dataclass(frozen=True, slots=True)
class Batch:
    """rows: `[R]` int64, the places of the context where a draft may begin: the answer's first token is known
    there. last: `[T]` int64, the last place of each place's sequence.
    target_of: `[T]` int64, for every place the row among the finals that predicts the token after it, or -1.
    finals, lse, best: as in the store.
    """

    context: Context
    rows: Tensor
    last: Tensor
    target_of: Tensor
    finals: Tensor
    lse: Tensor
    best: Tensor
    sequences: tuple[StoredSequence, ...]

    def ahead(self, rows: Tensor, step: int) -> Tensor:
        """Token t + 1 + step of the places `rows`."""
        return self.context.next_tokens[rows + step]

    def goes_on(self, rows: Tensor, step: int) -> Tensor:
        """`[R]` bool: whether the answer has a token that step `step` of the places `rows` is to guess."""
        return rows + 1 + step <= self.last[rows]

    def to(self, device: torch.device) -> Batch:
        """The batch on another device."""
        context = self.context
        names = ("rows", "last", "target_of", "finals", "lse", "best")
        moved = {name: getattr(self, name).to(device) for name in names}
        places = {
            name: getattr(context, name).to(device) for name in ("features", "next_tokens", "positions")
        }
        return replace(self, context=replace(context, **places), **moved)


def split(
    store: FeatureStore, held_out: float, longest: int
) -> tuple[list[StoredSequence], list[StoredSequence]]:
    """Training and held-out sequences, by a hash of the prompt, so that samples of one prompt stay together
    and new data moves none. Answers too short to draft in, and sequences over `longest`, are left out."""
    training: list[StoredSequence] = []
    held: list[StoredSequence] = []
    for sequence in store.sequences:
        if sequence.answer_length < 3 or sequence.length > longest:
            continue
        prompt = store.tokens[sequence.start : sequence.start + sequence.prompt_length].numpy().tobytes()
        share = int.from_bytes(hashlib.sha256(prompt).digest()[:4], "big") / 2**32
        (held if share < held_out else training).append(sequence)
    return training, held


def packed(store: FeatureStore, sequences: Sequence[StoredSequence]) -> Batch:
    """The sequences one after the other, each without its last position, whose next token is not known."""
    pieces: dict[str, list[Tensor]] = {name: [] for name in ("features", "next", "positions", "rows", "last")}
    finals, bounds, targets = [], [], []
    place = final = 0
    for one in sequences:
        count, prompt = one.length - 1, one.prompt_length
        here = slice(one.start, one.start + count)
        pieces["features"].append(store.features[here])
        pieces["next"].append(store.tokens[one.start + 1 : one.start + one.length].long())
        pieces["positions"].append(torch.arange(count))
        target = torch.full((count,), -1)
        target[prompt - 1 :] = torch.arange(final, final + one.answer_length)
        targets.append(target)
        # The row at place t predicts the token at t + 2, whose target row is that of place t + 1.
        pieces["rows"].append(torch.arange(place + prompt - 1, place + count - 1))
        pieces["last"].append(torch.full((count,), place + count - 1))
        finals.append(slice(one.answer_start, one.answer_start + one.answer_length))
        bounds.append((place, place + count))
        place, final = place + count, final + one.answer_length
    joined = {name: torch.cat(parts) for name, parts in pieces.items()}
    return Batch(
        context=Context(joined["features"], joined["next"], joined["positions"], tuple(bounds)),
        rows=joined["rows"],
        last=joined["last"],
        target_of=torch.cat(targets),
        finals=torch.cat([store.finals[part] for part in finals]),
        lse=torch.cat([store.lse[part] for part in finals]),
        best=torch.cat([store.best[part] for part in finals]),
        sequences=tuple(sequences),
    )


def sample_pairs(store: FeatureStore, sequences: Sequence[StoredSequence], most: int, seed: int) -> Sample:
    """About `most` neighbouring positions from whole answers, drawn by the seed."""
    features, finals, tokens, following = [], [], [], []
    for one in next(epoch(sequences, most, seed)):
        first, count = one.start + one.prompt_length - 1, one.answer_length - 1
        features.append(store.features[first : first + count])
        tokens.append(store.tokens[first + 1 : first + 1 + count].long())
        finals.append(store.finals[one.answer_start : one.answer_start + count])
        following.append(store.finals[one.answer_start + 1 : one.answer_start + 1 + count])
    return Sample(torch.cat(features), torch.cat(finals), torch.cat(tokens), torch.cat(following))


def epoch(sequences: Sequence[StoredSequence], tokens: int, seed: int) -> Iterator[list[StoredSequence]]:
    """All sequences in an order that the seed decides, in groups of about `tokens` answer tokens."""
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed)).tolist()
    group: list[StoredSequence] = []
    size = 0
    for index in order:
        group.append(sequences[index])
        size += sequences[index].answer_length
        if size >= tokens:
            yield group
            group, size = [], 0
    if group:
        yield group
