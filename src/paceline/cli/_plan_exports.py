"""What a plan writes for other engines, and for ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import ConfigError
from paceline.sim.plan.export import options_line, sglang_config, vllm_config, write_json
from paceline.sim.plan.schedule import Schedule, schedule

if TYPE_CHECKING:
    from paceline.cli._plan_inputs import Asked
    from paceline.sim.plan.candidates import Candidate
    from paceline.sim.plan.search import Found

_METHODS = {"ngram": "ngram", "suffix": "suffix", "mtp": "mtp", "eagle": "eagle3", "eagle3": "eagle3"}
"""Of vLLM. The published traces' "eagle" is an EAGLE-3 head."""


@dataclass(frozen=True, slots=True)
class Exports:
    """line: options for `paceline`.  schedules: by the file that they were written to.  notes: what a user
    has to know of them."""

    line: str
    schedules: tuple[tuple[str, Schedule], ...] = ()
    notes: tuple[str, ...] = ()


def exported(
    wanted: Asked, found: Found, vllm_out: Path | None, sglang_out: Path | None, most: int
) -> Exports:
    """Tables are of the best candidate with one drafter that the other engine knows, also where plain
    decoding wins at this load: they say at which batch sizes it does not."""
    best = found.best.candidate
    written: list[tuple[str, Schedule]] = []
    notes: list[str] = []
    for path, kinds, write in ((vllm_out, None, _vllm), (sglang_out, ("head",), _sglang)):
        if path is None:
            continue
        chosen = _single(wanted, found, kinds)
        if chosen is None:
            notes.append(f"{path} is not written: no single drafter of the kind it needs was tried at length")
            continue
        table = schedule(wanted.world, chosen, most)
        if chosen.drafters != best.drafters:
            notes.append(f"{path} is for {chosen.drafters[0]}: what is recommended here cannot be said there")
        try:
            write_json(path, write(wanted, chosen, table))
            written.append((str(path), table))
        except ConfigError as error:
            notes.append(f"{path} is not written: {error}")
    named = {name: model for name, model in wanted.checkpoints.items() if model}
    draft = "+".join(named.get(name, name) for name in best.drafters) or None
    seats = min(wanted.world.most_at_once, _seats(wanted, best))
    line = options_line(best, seats, draft, ranks=wanted.world.machine.devices_are_ranks)
    return Exports(line, tuple(written), tuple(notes))


def _seats(wanted: Asked, best: Candidate) -> int:
    return wanted.world.workload.at_once(best.placed.replicas, 1.0) or wanted.world.most_at_once


def _single(wanted: Asked, found: Found, kinds: tuple[str, ...] | None) -> Candidate | None:
    drives = {each.name: each.drive for each in wanted.drafters}
    for each in found.ranked:
        names = each.candidate.drafters
        if len(names) == 1 and (kinds is None or drives[names[0]] in kinds):
            return each.candidate
    return next(
        (
            each
            for each in wanted.candidates
            if len(each.drafters) == 1 and (kinds is None or drives[each.drafters[0]] in kinds)
        ),
        None,
    )


def _vllm(wanted: Asked, chosen: Candidate, table: Schedule) -> object:
    name = table.drafter
    ranks = chosen.placed.draft if chosen.placed.draft != chosen.placed.target else 0
    return vllm_config(
        table,
        _METHODS.get(name, "eagle3" if _head(wanted, name) else "draft_model"),
        model=wanted.checkpoints.get(name),
        draft_ranks=ranks,
    )


def _sglang(wanted: Asked, chosen: Candidate, table: Schedule) -> object:  # noqa: ARG001
    return sglang_config(table)


def _head(wanted: Asked, name: str) -> bool:
    return any(each.name == name and each.drive == "head" for each in wanted.drafters)
