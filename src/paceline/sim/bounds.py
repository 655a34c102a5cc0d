"""What no policy does better than, and what is easily done, for recorded answers and the costs of a machine.

Every bound decodes the same answers (`sim/steps.py`), so that their rates compare. From what is easy to what
is out of reach:

    autoregressive          one token per pass
    fixed: D, k=K           drafter D asked for K guesses at every step
    no miss: D, k=K         the same, and the guesses are there when the target asks: drafting takes no time
    oracle length: D        what is right is drafted and verified, no more; D is not asked where nothing is
    oracle combination      the better drafter at every place, with its right guesses. Paid for are
      , as published          the cheapest drafter, whoever wins (arXiv 2601.11580, figure 12)
      , winner charged        the drafter that wins
      , all drafters run      every drafter at every step, which is what it takes to know who wins
    free drafting           the same, and no drafter costs anything
    target alone            the rest of every answer in one pass

The combinations need records of one text: requests of which a drafter's is of another are left out there. Of
how many requests a bound is, it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.errors import ConfigError, shown
from paceline.sim.acceptance import RequestTrace
from paceline.sim.costs.model import CostModel
from paceline.sim.guesses import NGRAM, Guesses, ngram_guesses, recorded_guesses
from paceline.sim.steps import Answer, PlainSeconds, Question, Step, fixed, plain, seconds, walk

LENGTHS = (1, 3, 5)


@dataclass(frozen=True, slots=True)
class Bound:
    """tokens_per_s: of the whole batch, all tokens over all seconds.  speedup: over plain decoding of the
    same requests.  requests: so many of the traces.  charged: whose drafting is paid for."""

    name: str
    tokens_per_s: float
    speedup: float
    requests: int
    charged: str

    def reached(self, tokens_per_s: float) -> float:
        """What fraction of the bound a run with this rate has come to. Above 1 the run did something that the
        bound does not allow for, or is of other requests."""
        return tokens_per_s / self.tokens_per_s


class _Recorded(NamedTuple):
    prompt: int
    output: int
    guesses: Mapping[str, Guesses]


def bounds(
    traces: Iterable[RequestTrace],
    costs: CostModel,
    batch: int = 1,
    *,
    drafters: Sequence[str] | None = None,
    lengths: Sequence[int] = LENGTHS,
    prefill: bool = True,
) -> list[Bound]:
    """Of a batch of `batch` like requests at a time. drafters: None = n-gram lookup and all that are
    recorded, as far as the costs know them. lengths: of `fixed` and `no miss`. prefill: whether the passes
    over the prompts count, which bring the first tokens.

    Raises ConfigError for drafters that the costs or all traces lack, and where there is nothing to decode.
    """
    requests = [request for request in traces if len(request.output) > (not prefill)]
    if not requests:
        raise ConfigError("there is no token to decode in these traces: give some with longer answers.")
    if batch < 1 or min(lengths, default=1) < 1:
        raise ConfigError(f"batch {batch}, lengths {shown(tuple(lengths))}: give whole numbers from 1.")
    names = _names(requests, costs, drafters)
    recorded = [_Recorded(len(each.prompt), len(each.output), _guesses(each, names)) for each in requests]
    measure = _Measure(costs, batch, prefill)
    found = [
        measure.bound("autoregressive", [plain(r.prompt, r.output) for r in recorded], "nothing drafted")
    ]
    for name in names:
        found += _of_drafter(name, recorded, lengths, measure)
    if names:
        found += _combined(names, recorded, measure)
    found.append(measure.bound("target alone", [_at_once(r) for r in recorded], "nothing"))
    return found


def _names(requests: Sequence[RequestTrace], costs: CostModel, drafters: Sequence[str] | None) -> list[str]:
    there = dict.fromkeys((NGRAM, *(name for request in requests for name in request.drafters)))
    if drafters is None:
        return [name for name in there if name in costs.drafts]
    for name in drafters:
        if name not in there:
            raise ConfigError(f"no request has a record of drafter {name!r}: there are {', '.join(there)}.")
        costs.draft(name)
    return list(drafters)


def _guesses(request: RequestTrace, names: Iterable[str]) -> dict[str, Guesses]:
    found = {}
    for name in names:
        if name == NGRAM:
            found[name] = ngram_guesses(request)
        elif request.drafters.get(name) and request.drafters[name].accepted:
            found[name] = recorded_guesses(request, name)
    return found


class _Measure:
    def __init__(self, costs: CostModel, batch: int, prefill: bool) -> None:
        self.costs = costs
        self._batch = batch
        self._prefill = prefill
        self._alone = PlainSeconds(costs, batch, prefill=prefill)

    def bound(self, name: str, answers: Sequence[Answer], charged: str) -> Bound:
        # The first token counts where its pass does.
        tokens = self._batch * sum(answer.total - (not self._prefill) for answer in answers)
        took, alone = sum(map(self._seconds, answers)), sum(map(self._alone.of, answers))
        rate = tokens / took if took > 0.0 else float("inf")
        return Bound(name, rate, alone / took if took > 0.0 else 1.0, len(answers), charged)

    def _seconds(self, answer: Answer) -> float:
        return seconds(answer, self.costs, self._batch, prefill=self._prefill)


# ---------------------------------------------------------------- one drafter


def _of_drafter(
    name: str, recorded: Sequence[_Recorded], lengths: Sequence[int], measure: _Measure
) -> Iterator[Bound]:
    known = [(each.prompt, each.guesses[name]) for each in recorded if name in each.guesses]
    if not known:
        return
    for length in lengths:
        answers = [fixed(prompt, name, guesses, length) for prompt, guesses in known]
        yield measure.bound(f"fixed: {name}, k={length}", answers, "the drafter, at every step")
    for length in lengths:
        answers = [fixed(prompt, name, guesses, length, charged=False) for prompt, guesses in known]
        yield measure.bound(f"no miss: {name}, k={length}", answers, "nothing: it is done in time")
    answers = [_oracle_length(prompt, name, guesses) for prompt, guesses in known]
    yield measure.bound(f"oracle length: {name}", answers, "the drafter, where it is right")


def _oracle_length(prompt: int, name: str, guesses: Guesses) -> Answer:
    def rule(at: int) -> tuple[int, int, tuple[Question, ...]]:
        right = min(guesses.right[at], len(guesses) - at - 1)
        return right, right, (Question(name, right, right),) if right else ()

    return walk(prompt, len(guesses), rule)


# ---------------------------------------------------------------- all of them

_Charge = Callable[[Mapping[str, int], str], tuple[Question, ...]]
"""By how many guesses of each drafter are right and who wins, the questions that are paid for."""


def _combined(names: Sequence[str], recorded: Sequence[_Recorded], measure: _Measure) -> Iterator[Bound]:
    alike = [
        each for each in recorded if all(len(each.guesses.get(name, ())) == each.output for name in names)
    ]
    if not alike:
        return
    cheapest = min(names, key=lambda name: measure.costs.draft(name).seconds(1, 1, 1, 1, 1))

    def published(right: Mapping[str, int], winner: str) -> tuple[Question, ...]:
        return (Question(cheapest, right[winner], right[winner]),)

    def winner_charged(right: Mapping[str, int], winner: str) -> tuple[Question, ...]:
        return (Question(winner, right[winner], right[winner]),) if right[winner] else ()

    def always(right: Mapping[str, int], winner: str) -> tuple[Question, ...]:  # noqa: ARG001
        # One level at least: a drafter reads what was committed, which is a pass of it.
        return tuple(Question(name, max(count, 1), max(count, 1)) for name, count in right.items())

    kinds: list[tuple[str, _Charge, str]] = [
        ("oracle combination, as published", published, f"{cheapest}, whoever wins"),
        ("oracle combination, winner charged", winner_charged, "the drafter that wins"),
        ("oracle combination, all drafters run", always, "every drafter, at every step"),
        ("free drafting", lambda right, winner: (), "nothing"),  # noqa: ARG005
    ]
    for name, charge, charged in kinds:
        yield measure.bound(name, [_oracle_choice(each, names, charge) for each in alike], charged)


def _oracle_choice(recorded: _Recorded, names: Sequence[str], charge: _Charge) -> Answer:
    def rule(at: int) -> tuple[int, int, tuple[Question, ...]]:
        left = recorded.output - at - 1
        right = {name: min(recorded.guesses[name].right[at], left) for name in names}
        winner = max(right, key=lambda name: right[name])  # the first of equals
        return right[winner], right[winner], charge(right, winner)

    return walk(recorded.prompt, recorded.output, rule)


def _at_once(recorded: _Recorded) -> Answer:
    """What the target's own arithmetic and memory allow: all that is left in one pass."""
    left = recorded.output - 1
    return Answer(recorded.prompt, recorded.output, [Step(1, left - 1, left)] if left else [])
