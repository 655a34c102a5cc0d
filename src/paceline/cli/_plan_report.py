"""A plan in words, and as an object."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline.sim.plan.search import Lead, Scored, lead

if TYPE_CHECKING:
    from paceline.cli._plan_exports import Exports
    from paceline.cli._plan_inputs import Asked
    from paceline.sim.plan.candidates import Candidate
    from paceline.sim.plan.search import Found
    from paceline.sim.plan.sensitivity import Flip, Sensitivity
    from paceline.sim.plan.world import Objective

_WIDTH = 100
_LEVEL = 1.005
_AXES = {
    "acceptance": "acceptance",
    "verify": "cost of verifying",
    "draft": "cost of drafting",
    "load": "load",
}


def text_of(wanted: Asked, found: Found, sensitive: Sensitivity | None, exports: Exports) -> str:
    goal = wanted.world.objective
    parts = [
        *_section("recommended", _recommended(found, goal)),
        *_section("runner-up", _runner_up(found, goal)),
        *_section("tried", _tried(wanted, found)),
        "",
        "what would change it",
        *_changes(found, sensitive),
        "",
        *_section("to paste", [f"paceline generate {exports.line}"]),
    ]
    for path, table in exports.schedules:
        sizes = ", ".join(f"{row.low}-{row.high}: {row.length}" for row in table.rows)
        parts += _section("written", [f"{path}, guesses of {table.drafter} by batch size: {sizes}"])
    for note in exports.notes:
        parts += _section("note", [note])
    return "\n".join(parts)


def _section(title: str, paragraphs: list[str]) -> list[str]:
    lines: list[str] = []
    for paragraph in paragraphs:
        lead_in = f"{title:<14}" if not lines else " " * 14
        lines += textwrap.wrap(
            paragraph,
            _WIDTH,
            initial_indent=lead_in,
            subsequent_indent=" " * 14,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


# ---------------------------------------------------------------- the choice


def _recommended(found: Found, goal: Objective) -> list[str]:
    best, plain = found.best, found.plain
    said = [str(best.candidate), _value(best, goal)]
    if best.candidate.plain:
        said.append(
            "Nothing that guesses is better than plain decoding here: leave speculation off."
            if len(found.ranked) > 1
            else "Nothing else was simulated at length."
        )
        return said
    ahead = lead(best, plain)
    said.append(
        f"{ahead.ratio:.2f} times as good as plain decoding on the same hardware at its best "
        f"({_value(plain, goal)}: {plain.candidate}){_spread(ahead)}."
    )
    if ahead.within_noise and len(best.values) > 1:
        said.append("That may be chance: raise --budget-seconds before you rely on it.")
    return said


def _runner_up(found: Found, goal: Objective) -> list[str]:
    second = found.runner_up
    if second is None:
        return ["none was simulated at length"]
    ahead = lead(found.best, second)
    behind = f"{(1 - 1 / ahead.ratio) * 100:.1f} % behind" if ahead.ratio >= 1 else "level"
    noise = (
        "; of one sample, so that nobody can say how much of it is chance: raise --budget-seconds"
        if len(second.values) < 2
        else f"; that is within the noise of {len(second.values)} samples: take whichever is simpler to run"
        if ahead.within_noise
        else f", more than the noise of {len(second.values)} samples"
    )
    return [str(second.candidate), f"{_value(second, goal)}: {behind}{noise}."]


def _spread(ahead: Lead) -> str:
    return f"; between {ahead.low:.2f} and {ahead.high:.2f} with 95 % confidence" if ahead.low > 0.0 else ""


def _value(scored: Scored, goal: Objective) -> str:
    value = scored.value
    number = f"{value:,.1f}" if value >= 100 else f"{value:.4g}"
    return f"{number} {goal.unit}"


def _tried(wanted: Asked, found: Found) -> list[str]:
    said = [
        f"{found.tried} of {found.of} ways in {found.simulations} simulations and {found.seconds:.0f} s, "
        f"seed {wanted.seed}, {len(wanted.world.workload.traces)} recorded requests"
    ]
    if found.cut_short:
        said.append(
            f"The time ran out in round {found.rounds + 1}: the ranking is of shorter simulations, and may "
            "differ from run to run; raise --budget-seconds."
        )
    if wanted.left_out:
        said.append(f"Not tried, since nothing says what they take: {', '.join(wanted.left_out)}.")
    said += [f"Not possible: {each}" for each in found.failed[:3]]
    return said


# ---------------------------------------------------------------- sensitivity


def _changes(found: Found, sensitive: Sensitivity | None) -> Iterator[str]:
    if sensitive is None or not sensitive.flips:
        yield "  not looked into: the time ran out; raise --budget-seconds"
        return
    for flip in sensitive.flips:
        said = f"  {_AXES[flip.axis] + ' x' + format(flip.factor, 'g'):<26}{_change(flip, found)}"
        yield from textwrap.wrap(
            said, _WIDTH, subsequent_indent=" " * 28, drop_whitespace=True, break_on_hyphens=False
        )
    if sensitive.cut_short:
        yield "  The time ran out before all of it was looked into; raise --budget-seconds."


def _change(flip: Flip, found: Found) -> str:
    if flip.holds:
        if flip.point is None or flip.to is None:
            return "holds"
        return f"holds; {_beyond(flip.point)} better: {_short(flip.to, found)}"
    assert flip.to is not None
    where = f" ({_beyond(flip.point)})" if flip.point is not None else ""
    if flip.ratio < _LEVEL:
        return f"level{where}: {_short(flip.to, found)}"
    return f"better by {(flip.ratio - 1) * 100:.1f} %{where}: {_short(flip.to, found)}"


def _beyond(point: float) -> str:
    return f"{'below' if point < 1.0 else 'above'} x{point:.2f}"


def _short(candidate: Candidate, found: Found) -> str:
    """What differs from the recommended."""
    best = found.best.candidate
    if candidate.drafters != best.drafters or candidate.placed != best.placed:
        return str(candidate)
    parts = []
    if candidate.mode != best.mode:
        parts.append(candidate.mode)
    if candidate.length != best.length or candidate.width != best.width:
        parts.append("as many guesses as pay" if candidate.length is None else f"k={candidate.length}")
    if candidate.chunk != best.chunk:
        parts.append(f"passes of {candidate.chunk}")
    return "the same with " + ", ".join(parts)


# ---------------------------------------------------------------- JSON


def json_of(wanted: Asked, found: Found, sensitive: Sensitivity | None, exports: Exports) -> dict[str, Any]:
    second = found.runner_up
    goal = wanted.world.objective
    return {
        "objective": {"goal": goal.goal, "unit": goal.unit, "fewer_is_better": goal.fewer_is_better},
        "recommended": _row(found.best),
        "plain": _row(found.plain),
        "gain": _lead(lead(found.best, found.plain)),
        "runner_up": None if second is None else _row(second),
        "ahead_of_runner_up": None if second is None else _lead(lead(found.best, second)),
        "ranked": [_row(each) for each in found.ranked],
        "sensitivity": [
            {**asdict(flip), "to": None if flip.to is None else _candidate(flip.to)}
            for flip in (sensitive.flips if sensitive is not None else ())
        ],
        "sensitivity_cut_short": sensitive is None or sensitive.cut_short,
        "search": {
            "tried": found.tried,
            "of": found.of,
            "simulations": found.simulations,
            "seconds": found.seconds,
            "cut_short": found.cut_short,
            "seed": wanted.seed,
            "left_out": list(wanted.left_out),
            "failed": list(found.failed),
        },
        "options": exports.line,
        "written": [path for path, _ in exports.schedules],
        "notes": list(exports.notes),
    }


def _row(scored: Scored) -> dict[str, Any]:
    value = scored.value
    return {
        **_candidate(scored.candidate),
        "value": value if value < float("inf") else None,
        "values": [each if each < float("inf") else None for each in scored.values],
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {"in_words": str(candidate), **asdict(candidate)}


def _lead(ahead: Lead) -> dict[str, Any]:
    return {
        "ratio": ahead.ratio,
        "low": ahead.low,
        "high": ahead.high if ahead.high < float("inf") else None,
        "within_noise": ahead.within_noise,
    }
