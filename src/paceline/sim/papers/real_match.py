"""What an engine would measure, predicted from recorded answers: n-grams are looked up as they are, a step
verifies what there is, and acceptance is read where it belongs.

It answers figure 1 of arXiv 2601.11580: Llama-3.1-8B on one H100, served by vLLM, a batch being one request
many times, the speed-up that of the mean over requests of tokens per second. The costs are those of
`published("llama3.1-8b@h100-calibrated")`, where it is said what they rest on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from paceline.sim.acceptance import RequestTrace
from paceline.sim.costs.model import CostModel
from paceline.sim.guesses import NGRAM, Guesses, ngram_guesses, recorded_guesses
from paceline.sim.papers.study import Setting
from paceline.sim.steps import Answer, PlainSeconds, fixed, seconds

BATCHES = (1, 16, 64, 128)


@dataclass(frozen=True, slots=True)
class Prediction:
    """speedups: by batch size. requests: those that the drafter has a record of; n-gram needs none."""

    speedups: tuple[float, ...]
    requests: int


def predicted(
    traces: Sequence[RequestTrace],
    settings: Iterable[Setting],
    costs: CostModel,
    batches: Sequence[int] = BATCHES,
) -> dict[Setting, Prediction]:
    """Of the settings that any request has a record for."""
    return priced(decoded(traces, settings), costs, batches)


def decoded(traces: Sequence[RequestTrace], settings: Iterable[Setting]) -> dict[Setting, list[Answer]]:
    """The steps of every request that has a record. A head that was recorded on another run's text
    (`RequestTrace.aligned`) decodes as many tokens as that one had, with and without guesses."""
    texts = [ngram_guesses(request) for request in traces]
    found = {}
    for setting in settings:
        pairs = zip(traces, texts, strict=True)
        answers = [each for request, text in pairs if (each := _answer(request, setting, text)) is not None]
        if answers:
            found[setting] = answers
    return found


def priced(
    answers: Mapping[Setting, Sequence[Answer]], costs: CostModel, batches: Sequence[int] = BATCHES
) -> dict[Setting, Prediction]:
    alone = {batch: PlainSeconds(costs, batch) for batch in batches}
    return {
        setting: Prediction(tuple(_speedup(each, costs, batch, alone[batch]) for batch in batches), len(each))
        for setting, each in answers.items()
    }


def _answer(request: RequestTrace, setting: Setting, text: Guesses) -> Answer | None:
    assert setting.guesses is not None
    guesses: Guesses | None = None
    if setting.drafter == NGRAM:
        guesses = text
    elif setting.drafter in request.drafters:
        guesses = recorded_guesses(request, setting.drafter)
    return fixed(len(request.prompt), setting.drafter, guesses, setting.guesses) if guesses else None


def _speedup(answers: Sequence[Answer], costs: CostModel, batch: int, alone: PlainSeconds) -> float:
    rate = sum(answer.total / seconds(answer, costs, batch) for answer in answers)
    return rate / sum(answer.total / alone.of(answer) for answer in answers)
