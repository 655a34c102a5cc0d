"""How much of a head's greedy chain the target accepts, on held-out answers, without running the target."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.train.batches import Batch
from paceline.train.unroll import Continue, HeadPass, Step


@dataclass(frozen=True, slots=True)
class Accepted:
    """One sequence. first: the chain's leading matches, `[rows, depth]` bool, true up to the first miss."""

    category: str
    first: Tensor


@torch.inference_mode()
def greedy_chains(head: HeadPass, batch: Batch, ids: Tensor, depth: int) -> list[Accepted]:
    """The head's chain from every row of the batch, each step fed its own likeliest token, against the
    answer. ids: `[draft vocabulary]` target ids. A chain goes on after a miss; nothing is counted there."""
    matches = torch.zeros(len(batch.rows), depth, dtype=torch.bool)
    guessed = torch.empty(0, dtype=torch.int64)

    def note(step: int, done: Step) -> None:
        nonlocal guessed
        best = [part.argmax(-1) for part in _logits(head, done.normed)]
        guessed = ids[torch.cat(best)]
        where = torch.searchsorted(batch.rows, done.rows)
        matches[where.cpu(), step] = (guessed == batch.ahead(done.rows, step + 1)).cpu()

    def go_on(step: int, done: Step) -> Continue:
        note(step - 1, done)
        kept = batch.goes_on(done.rows, step).nonzero().flatten()
        return Continue(kept, guessed[kept])

    steps = head.unroll(batch.context, batch.rows, depth, go_on)
    note(len(steps) - 1, steps[-1])
    first = matches.cumprod(dim=1).bool()
    found, at = [], 0
    for sequence in batch.sequences:
        count = sequence.answer_length - 1
        found.append(Accepted(sequence.category, first[at : at + count]))
        at += count
    return found


def _logits(head: HeadPass, normed: Tensor) -> Iterable[Tensor]:
    return (part @ head.p["lm_head.weight"].t() for part in torch.split(normed, 512))


def acceptance_length(accepted: Sequence[Accepted], depth: int) -> float:
    """Mean tokens per target pass, bonus token included, of decoding the answers with chains of `depth`.

    A pass starts where the last one ended: after the answer's first token, then behind the bonus token.
    """
    tokens = passes = 0
    for one in accepted:
        lengths = one.first[:, :depth].sum(1).tolist()
        at = 0
        while at < len(lengths):
            ahead = min(lengths[at] + 1, len(lengths) - at)
            tokens, passes, at = tokens + ahead, passes + 1, at + ahead
    return tokens / max(1, passes)


def summary(accepted: Sequence[Accepted], depths: Sequence[int]) -> dict[str, dict[str, float]]:
    """Per category and for all: acceptance length by depth (`k3`), and the odds of each step given the ones
    before it (`step1`, ...)."""
    groups: dict[str, list[Accepted]] = defaultdict(list)
    for one in accepted:
        groups[one.category].append(one)
    if len(groups) > 1 or not groups:
        groups = {"all": list(accepted), **dict(sorted(groups.items()))}
    else:
        groups = {"all": list(accepted)}
    return {name: _numbers(each, depths) for name, each in groups.items()}


def _numbers(accepted: Sequence[Accepted], depths: Sequence[int]) -> dict[str, float]:
    numbers = {f"k{depth}": round(acceptance_length(accepted, depth), 4) for depth in depths}
    first = torch.cat([one.first for one in accepted]) if accepted else torch.zeros(0, max(depths))
    reached = len(first)
    for step in range(max(depths)):
        right = int(first[:, step].sum())
        numbers[f"step{step + 1}"] = round(right / max(1, reached), 4)
        reached = right
    return numbers
