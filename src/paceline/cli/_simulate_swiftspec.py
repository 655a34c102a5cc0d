"""`paceline simulate --paper swiftspec`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from paceline.cli._options import refuse_unused
from paceline.sim.acceptance import read_traces
from paceline.sim.papers.swiftspec import PAIRS, PASSES, Pair, decode_rate, records, run, texts
from paceline.sim.run.requests import sampled
from paceline.sim.run.simulator import SimResult

_USED = ("paper", "traces", "more_traces", "count", "seed", "check", "json_output", "quiet")
_WITHIN = 0.1
_REQUESTS, _TOKENS = 24, 200
_MS = 1e3
_ABOUT = """\
behind: the drafter is in the middle of a pass when the verdict is there. drafting: passes that the target
waits for, in turn, or because a tree holds too little after a miss or on a leaf. other: waits of its own."""
_PARTS = ("passes", "behind", "drafting", "other")


def run_paper(name: str, values: Mapping[str, Any]) -> None:
    """values: `traces`, `more_traces` (files whose texts are taken besides), `count`, `seed`, `check`,
    `json_output`.

    Exits with 1 where `check` is asked for and a value is out of tolerance. Raises ConfigError.
    """
    refuse_unused(_USED, "SwiftSpec")
    count, seed = values.get("count") or _REQUESTS, values.get("seed") or 0
    along = list(records(texts(count, _TOKENS), seed))
    rows = [_row(pair, run(pair, along)) for pair in PAIRS]
    for path in [*values["traces"], *values["more_traces"]]:
        given = [each for each in read_traces(path).requests if len(each.output) > 1]
        real = [(each.prompt, each.output[:_TOKENS]) for each in sampled(given, count, seed)]
        found = list(records(real, seed))
        rows += [_row(pair, run(pair, found), path.stem) for pair in PAIRS if pair.published is None]
    agrees = all(abs(row["difference"]) <= _WITHIN for row in rows if row["published"])
    if values.get("json_output"):
        click.echo(json.dumps({"paper": name, "rows": rows, "agrees": agrees}))
    else:
        _print(rows, agrees=agrees)
    if values.get("check") and not agrees:
        raise SystemExit(1)


def _row(pair: Pair, result: SimResult, text: str = "") -> dict[str, Any]:
    rate, stats, rounds = decode_rate(result), result.speculation, result.rounds
    landings = {"hit": stats.num_hits, "leaf hit": stats.num_leaf_hits, "miss": stats.num_misses}
    return {
        "pair": pair.name,
        "mode": pair.mode,
        "text": text,
        "tokens_per_s": rate,
        "published": pair.published,
        "difference": rate / pair.published - 1 if pair.published else None,
        "accepted_per_round": stats.num_accepted_tokens / stats.num_steps,
        "landings": {name: number / sum(landings.values()) for name, number in landings.items()},
        "round_s": {name: getattr(rounds, name) / rounds.count for name in _PARTS},
    }


def _print(rows: Sequence[Mapping[str, Any]], *, agrees: bool) -> None:
    click.echo(f"seven guesses per round, {PASSES} draft passes; no overhead but what is shown\n")
    heads = ("tok/s", "published", "", "accepted", "hit", "leaf hit", "miss")
    times = ("round ms =", "pass +", "behind +", "drafting +", "other")
    click.echo(f"{'':<34}" + "".join(f"{head:>10}" for head in heads) + "".join(f"{t:>12}" for t in times))
    for row in rows:
        label = f"{row['pair']}{', ' + row['text'] if row['text'] else ''}"
        published = row["published"]
        cells = [
            f"{row['tokens_per_s']:.0f}",
            f"{published:.0f}" if published else "",
            f"{row['difference']:+.1%}" if published else "",
            f"{row['accepted_per_round']:.2f}",
            *(f"{share:.0%}" for share in row["landings"].values()),
        ]
        parts = [row["round_s"][name] * _MS for name in _PARTS]
        spent = "".join(f"{part:>12.2f}" for part in (sum(parts), *parts))
        click.echo(f"{label[:34]:<34}" + "".join(f"{cell:>10}" for cell in cells) + spent)
    click.echo(f"\n{_ABOUT}\npublished values are {'' if agrees else 'not all '}met within {_WITHIN:.0%}")
