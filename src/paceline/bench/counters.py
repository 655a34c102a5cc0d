"""Counters of speculation on a server's metrics page (Prometheus), as vLLM names them."""

from __future__ import annotations

import re

from paceline.core.stats import SpeculationStats

_LINE = re.compile(
    r"^(?:\w+:)?spec_decode_num_(?P<name>drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>[0-9.eE+-]+)",
    re.MULTILINE,
)
_POSITION = re.compile(r'position="(\d+)"')


def counted(page: str) -> SpeculationStats | None:
    """Since the server's start, all its engines together; None = it counts none."""
    stats, found = SpeculationStats(), False
    for match in _LINE.finditer(page):
        value, name = int(float(match["value"])), match["name"]
        found = True
        if name == "accepted_tokens_per_pos":
            position = _POSITION.search(match["labels"] or "")
            if position is not None:
                _count(stats.accepted_by_depth, int(position[1]), value)
        else:
            setattr(stats, f"num_{name}", getattr(stats, f"num_{name}") + value)
    return stats if found else None


def _count(depths: list[int], at: int, value: int) -> None:
    depths.extend([0] * (at + 1 - len(depths)))
    depths[at] += value


def difference(before: SpeculationStats | None, after: SpeculationStats | None) -> SpeculationStats | None:
    """What was counted in between; None where either is, or the server began anew."""
    if before is None or after is None or after.num_drafts < before.num_drafts:
        return None
    earlier = [*before.accepted_by_depth, *[0] * len(after.accepted_by_depth)]
    depths = [late - early for late, early in zip(after.accepted_by_depth, earlier, strict=False)]
    return SpeculationStats(
        num_drafts=after.num_drafts - before.num_drafts,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
        accepted_by_depth=[count for count in depths if count],
    )
