"""A recorded answer, decoded step by step by a rule that may know the future, and the seconds of it.

A batch is the same request many times, as in the measurements of arXiv 2601.11580: all of it takes the same
steps. For costs that are linear in tokens it stands for any batch with such contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.sim.costs.model import CostModel
from paceline.sim.guesses import Guesses


class Question(NamedTuple):
    """To a drafter, for one request. levels: 0 = it only reads."""

    drafter: str
    levels: int
    guesses: int


class Step(NamedTuple):
    """at: tokens generated before.  verified: guesses.  emitted: tokens, at least 1."""

    at: int
    verified: int
    emitted: int
    asked: tuple[Question, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's prompt, how many tokens it generates, and the steps that do so after the first token,
    which comes with the prompt."""

    prompt: int
    total: int
    steps: Sequence[Step]


def walk(prompt: int, total: int, rule: Callable[[int], tuple[int, int, tuple[Question, ...]]]) -> Answer:
    """rule: by tokens generated, how many guesses are verified, how many of them are right, and what was
    asked for them. The last step emits what is left."""
    at, steps = 1, []
    while at < total:
        verified, right, asked = rule(at)
        emitted = min(right + 1, total - at)
        steps.append(Step(at, verified, emitted, asked))
        at += emitted
    return Answer(prompt, total, steps)


def plain(prompt: int, total: int) -> Answer:
    return walk(prompt, total, lambda _: (0, 0, ()))


def fixed(prompt: int, drafter: str, guesses: Guesses, length: int, *, charged: bool = True) -> Answer:
    """The drafter is asked for `length` guesses at every step, and what it has is verified."""
    asked = (Question(drafter, length, length),) if charged else ()

    def rule(at: int) -> tuple[int, int, tuple[Question, ...]]:
        offered = min(length, guesses.offered[at])
        return offered, min(guesses.right[at], offered), asked

    return walk(prompt, len(guesses), rule)


def seconds(answer: Answer, costs: CostModel, batch: int, *, prefill: bool = True) -> float:
    """Of the whole batch: the prompts at once, then step after step."""
    target, overhead = costs.target, costs.overhead_s(batch)
    total = target.seconds(batch * answer.prompt, 0, batch) + overhead if prefill else 0.0
    unread = 1
    for at, verified, emitted, asked in answer.steps:
        context = batch * (answer.prompt + at)
        for drafter, levels, guesses in asked:
            total += costs.draft(drafter).seconds(batch, levels, batch * guesses, batch * unread, context)
        total += target.seconds(batch * (1 + verified), context, batch) + overhead
        unread = emitted
    return total


class PlainSeconds:
    """Of decoding without guesses, worked out once for each length of prompt and answer."""

    def __init__(self, costs: CostModel, batch: int, *, prefill: bool = True) -> None:
        self._costs, self._batch, self._prefill = costs, batch, prefill
        self._known: dict[tuple[int, int], float] = {}

    def of(self, answer: Answer) -> float:
        """In place of the answer's own steps."""
        key = answer.prompt, answer.total
        if key not in self._known:
            self._known[key] = seconds(plain(*key), self._costs, self._batch, prefill=self._prefill)
        return self._known[key]
