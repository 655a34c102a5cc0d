"""Costs as text: a table of passes, what the fit is worth, and the break-even of every drafter."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.sim.costs.break_even import BreakEven, as_rows, break_even_table
from paceline.sim.costs.model import CostModel, to_builtins

if TYPE_CHECKING:
    from paceline.profiling.fit import FitError


@dataclass(frozen=True, slots=True)
class Asked:
    """What the tables are about: requests, tokens of context of each, guesses per request."""

    requests: tuple[int, ...]
    contexts: tuple[int, ...]
    guesses: tuple[int, ...]


def text_of(costs: CostModel, asked: Asked, errors: dict[str, FitError] | None = None) -> str:
    table = _table(costs, asked)
    parts = [_about(costs), _passes(costs, asked), _overhead(costs)]
    if errors:
        parts.append(_fits(errors))
    return "\n\n".join([*parts, _break_even(table, asked)])


def json_of(costs: CostModel, asked: Asked) -> dict[str, Any]:
    return {"costs": to_builtins(costs), "break_even": as_rows(_table(costs, asked))}


def _table(costs: CostModel, asked: Asked) -> list[BreakEven]:
    return break_even_table(costs, requests=asked.requests, contexts=asked.contexts, guesses=asked.guesses)


def _about(costs: CostModel) -> str:
    hidden = ("source", "held_out", "rounds", "version", "made")
    shown = [
        f"{name} {value}"
        for name, value in costs.provenance.items()
        if name not in hidden and not isinstance(value, dict)  # figures of each part are for the file
    ]
    if costs.cores:
        shown.append(f"{costs.cores} cores")
    source = str(costs.provenance.get("source", "costs"))
    return textwrap.fill(f"{source}: {', '.join(shown)}" if shown else source, 100)


def _passes(costs: CostModel, asked: Asked) -> str:
    rows = ["target pass, ms" + _heads((0, *asked.guesses), 15)]
    for context in asked.contexts:
        for requests in asked.requests:
            cells = [
                costs.target.seconds(requests * (1 + guesses), requests * context, requests)
                for guesses in (0, *asked.guesses)
            ]
            rows.append(_row(requests, context, [f"{cell * 1e3:.2f}" for cell in cells]))
    return "\n".join(rows)


def _heads(guesses: Sequence[int], taken: int) -> str:
    return f"{'':{max(22 - taken, 1)}}" + "".join(f"{f'k={count}':>9}" for count in guesses)


def _row(requests: int, context: int, cells: Sequence[str]) -> str:
    label = f"  {requests} x {context} tokens"
    return f"{label:22}" + "".join(f"{cell:>9}" for cell in cells)


def _overhead(costs: CostModel) -> str:
    return (
        f"outside passes and drafters: {costs.step_overhead_s * 1e3:.3f} ms per step, "
        f"{costs.request_overhead_s * 1e6:.1f} us more per request"
    )


def _fits(errors: dict[str, FitError]) -> str:
    rows = [f"{'error on points not fitted':28}{'median':>9}{'p90':>9}{'worst':>9}{'points':>9}{'spread':>9}"]
    for name, error in errors.items():
        shares = "".join(f"{share:>9.1%}" for share in (error.median, error.p90, error.worst))
        rows.append(f"  {name:26}{shares}{error.points:>9}{error.spread:>9.1%}")
    return "\n".join([*rows, "spread: of a point's own repetitions, half the distance of the quartiles"])


def _break_even(table: Sequence[BreakEven], asked: Asked) -> str:
    rows = ["break-even: acceptance of each guess below which k guesses per request lose against none"]
    for drafter in dict.fromkeys(each.drafter for each in table):
        rows.append(drafter + _heads(asked.guesses, len(drafter)))
        rows += _of_drafter([each for each in table if each.drafter == drafter], asked)
    return "\n".join(rows)


def _of_drafter(table: Sequence[BreakEven], asked: Asked) -> Iterator[str]:
    for context in asked.contexts:
        for requests in asked.requests:
            here = [each for each in table if (each.requests, each.context) == (requests, context)]
            yield _row(requests, context, [_shown(each) for each in here])


def _shown(each: BreakEven) -> str:
    if each.acceptance is None:
        return "never"
    return f"{each.acceptance:.2f}"
