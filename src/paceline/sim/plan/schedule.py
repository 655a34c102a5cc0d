"""The best number of guesses for every batch size, by the costs and what the drafter's guesses are worth.

How many tokens a step brings does not depend on who shares it, what it takes does: so one short simulation
for each number of guesses is enough, and the rest is arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.errors import ConfigError
from paceline.sim.costs.break_even import plain_step_s
from paceline.sim.costs.model import CostModel
from paceline.sim.plan.candidates import Candidate
from paceline.sim.plan.world import World
from paceline.sim.run.requests import arriving, sampled
from paceline.sim.run.setup import composed
from paceline.sim.run.simulator import simulate
from paceline.workload import AtOnce

LENGTHS = (1, 2, 3, 4, 5, 7, 10)
_TIE = 0.01
"""Less than that is not worth a longer draft: the rule of vLLM's own tuner."""
_NEAR = 0.03


@dataclass(frozen=True, slots=True)
class Row:
    """Batches of `low` to `high` requests are best served with `length` guesses. near: lengths that lose 3 %
    at most, ascending.  speed_up: over plain decoding, at `low`."""

    low: int
    high: int
    length: int
    near: tuple[int, ...]
    speed_up: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """rows: from batch size 1 on without a gap.  rising: whether more guesses are better in a larger batch
    somewhere, which costs with steps can bring about."""

    drafter: str
    rows: tuple[Row, ...]
    rising: bool = False

    @property
    def longest(self) -> int:
        return max(each.length for each in self.rows)


def schedule(
    world: World, candidate: Candidate, most: int, lengths: Sequence[int] = LENGTHS, requests: int = 16
) -> Schedule:
    """For one drafter that takes turns with the target where `candidate` runs, up to a batch of `most`.

    Raises ConfigError for a candidate with none, or with several.
    """
    if len(candidate.drafters) != 1:
        raise ConfigError(f"{candidate} has not one drafter: a table of lengths is of one.")
    worth = {length: _worth(world, candidate, length, requests) for length in lengths}
    return of_worth(world, candidate, most, worth)


@dataclass(frozen=True, slots=True)
class Worth:
    """Per request and step: tokens, and guesses that were verified.  context: tokens, on average."""

    tokens: float
    guesses: float
    context: float


def _worth(world: World, candidate: Candidate, length: int, requests: int) -> Worth:
    one = replace(
        candidate,
        mode="serial-chain",
        length=length,
        width=0,
        passes=0,
        placed=replace(candidate.placed, apart=False, shares=None),
    )
    costs = world.machine.costs(one)
    setup = composed(one.config(1), costs)
    traces = sampled(world.traces, requests, world.workload.seed)
    result = simulate(setup.core, arriving(traces, AtOnce()), costs, setup.drafters, lanes=setup.lanes)
    stats = result.speculation
    steps = max(result.target_passes - len(result.requests), 1)
    written = sum(len(each.output) - 1 for each in traces)
    middle = sum(len(each.output) * (len(each.prompt) + len(each.output) / 2) for each in traces)
    return Worth(
        written / steps, stats.num_draft_tokens / steps, middle / sum(len(each.output) for each in traces)
    )


def _step_s(costs: CostModel, drafter: str, batch: int, levels: int, worth: Worth) -> float:
    guesses, kv = round(batch * worth.guesses), round(batch * worth.context)
    asked = costs.draft(drafter).seconds(batch, levels, guesses, round(batch * worth.tokens), kv)
    return asked + costs.target.seconds(batch + guesses, kv, batch) + costs.overhead_s(batch)


def of_worth(world: World, candidate: Candidate, most: int, worth: Mapping[int, Worth]) -> Schedule:
    costs = world.machine.costs(candidate)
    drafter = candidate.drafters[0]

    def rate(length: int, batch: int) -> float:
        """Tokens per second and request."""
        if length == 0:
            context = max(round(each.context) for each in worth.values())
            return 1.0 / plain_step_s(costs, batch, context)
        return worth[length].tokens / _step_s(costs, drafter, batch, length, worth[length])

    rows: list[Row] = []
    rising = False
    for batch in range(1, most + 1):
        rates = {length: rate(length, batch) for length in (0, *sorted(worth))}
        best = max(rates.values())
        chosen = min(length for length, found in rates.items() if found >= best * (1 - _TIE))
        if rows and chosen > rows[-1].length:
            if rates[rows[-1].length] >= best * (1 - _NEAR):
                chosen = rows[-1].length
            else:
                rising = True
        near = tuple(length for length, found in rates.items() if found >= best * (1 - _NEAR))
        near = tuple(sorted({*near, chosen}))
        if rows and rows[-1].length == chosen:
            rows[-1] = replace(rows[-1], high=batch, near=tuple(sorted({*rows[-1].near, *near})))
        else:
            rows.append(Row(batch, batch, chosen, near, rates[chosen] / rates[0]))
    return Schedule(drafter, tuple(rows), rising)
