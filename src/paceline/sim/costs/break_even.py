"""From which acceptance on speculation pays.

With acceptance a of each further guess a chain of k brings `E = (1 - a^(k+1)) / (1 - a)` tokens per step. It
pays where E tokens come sooner than by E plain steps: where `E > (draft + verify + overhead) / plain step`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from paceline.sim.costs.model import CostModel

_ROUNDS = 50


@dataclass(frozen=True, slots=True)
class BreakEven:
    """acceptance: of each guess, given that those before it were accepted, below which `guesses` per request
    lose against plain decoding; None = they lose even if all are accepted.  context: tokens of each request.
    """

    drafter: str
    requests: int
    context: int
    guesses: int
    acceptance: float | None


def expected_tokens(acceptance: float, guesses: int) -> float:
    """Per step and request, the bonus token included (arXiv 2211.17192, equation 1)."""
    return sum(acceptance**level for level in range(guesses + 1))


def plain_step_s(costs: CostModel, requests: int, context: int) -> float:
    return costs.target.seconds(requests, requests * context, requests) + costs.overhead_s(requests)


def speculative_step_s(
    costs: CostModel, drafter: str, requests: int, context: int, guesses: int, tokens: float
) -> float:
    """tokens: that a step brings per request, which the drafter has to read before the next."""
    everything = requests * guesses
    kv = requests * context
    unread = ceil(requests * tokens - 1e-9)
    asked = costs.draft(drafter).seconds(requests, guesses, everything, unread, kv)
    return asked + costs.target.seconds(requests + everything, kv, requests) + costs.overhead_s(requests)


def speed_up(
    costs: CostModel, drafter: str, requests: int, context: int, guesses: int, acceptance: float
) -> float:
    """Over plain decoding."""
    tokens = expected_tokens(acceptance, guesses)
    step = speculative_step_s(costs, drafter, requests, context, guesses, tokens)
    return tokens * plain_step_s(costs, requests, context) / step


def break_even(costs: CostModel, drafter: str, requests: int, context: int, guesses: int) -> BreakEven:
    """Raises ConfigError for a drafter whose costs are not known."""

    def pays(acceptance: float) -> bool:
        return speed_up(costs, drafter, requests, context, guesses, acceptance) >= 1.0

    low, high = 0.0, 1.0
    found: float | None = None
    if pays(low):
        found = low
    elif pays(high):
        for _ in range(_ROUNDS):
            middle = (low + high) / 2
            low, high = (low, middle) if pays(middle) else (middle, high)
        found = high
    return BreakEven(drafter, requests, context, guesses, found)


def break_even_table(
    costs: CostModel, *, requests: Iterable[int], contexts: Iterable[int], guesses: Iterable[int]
) -> list[BreakEven]:
    """Of every drafter, each of these with each other; of those that cost the same only the first."""
    drafters: list[str] = []
    for name, draft in costs.drafts.items():
        if all(draft != costs.drafts[other] for other in drafters):
            drafters.append(name)
    return [
        break_even(costs, drafter, batch, context, length)
        for drafter in drafters
        for context in contexts
        for batch in requests
        for length in guesses
    ]


def as_rows(table: Iterable[BreakEven]) -> list[dict[str, Any]]:
    return [asdict(each) for each in table]
