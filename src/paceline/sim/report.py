"""What a simulation says: one object for JSON, and the table made of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paceline.errors import ConfigError
from paceline.sim.acceptance import RequestTrace
from paceline.sim.bounds import bounds
from paceline.sim.costs.model import CostModel
from paceline.sim.metrics import Distribution, Slo, goodput, latencies
from paceline.sim.run.simulator import SimResult

SHOWN = (50, 95, 99)
_MS = 1e3
_MOST_ERRORS = 3


def as_object(result: SimResult, slos: Sequence[Slo] = ()) -> dict[str, Any]:
    """Seconds, tokens and counts. Latencies are of requests that wrote their whole output."""
    finished, spent, rounds = result.finished, result.spent, result.rounds
    stats = result.speculation
    return {
        "requests": len(result.requests),
        "failed": len(result.requests) - len(finished),
        "errors": dict(Counter(each.error for each in result.requests if each.error is not None)),
        "duration_s": spent.duration,
        "output_tokens": result.output_tokens,
        "prompt_tokens": sum(each.prompt_tokens for each in result.requests),
        "cached_tokens": sum(each.cached_tokens for each in result.requests),
        "output_tokens_per_s": result.output_rate,
        "requests_per_s": len(finished) / spent.duration if spent.duration else 0.0,
        "preemptions": result.preemptions,
        "target_passes": result.target_passes,
        "tokens_per_step": stats.tokens_per_step,
        "acceptance_length": stats.mean_acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "drafted": stats.num_drafted_nodes,
        "verified": stats.num_draft_tokens,
        "accepted": stats.num_accepted_tokens,
        "landings": {"hit": stats.num_hits, "leaf_hit": stats.num_leaf_hits, "miss": stats.num_misses},
        "questions": result.questions,
        "seconds": asdict(spent),
        "round_s": {
            name: getattr(rounds, name) / rounds.count if rounds.count else None
            for name in ("passes", "gap", "overhead", "drafting", "behind", "other")
        },
        "rounds": rounds.count,
        "latency": {name: asdict(value) if value else None for name, value in _latencies(result)},
        "goodput": {slo.name: goodput(finished, slo, spent.duration) for slo in slos},
        "events": result.events,
    }


def _latencies(result: SimResult) -> list[tuple[str, Distribution | None]]:
    found = latencies(result.finished)
    return [(name, getattr(found, name)) for name in found.__dataclass_fields__]


def bounded(
    result: SimResult, traces: Sequence[RequestTrace], costs: CostModel, drafters: Sequence[str]
) -> dict[str, Any]:
    """Bounds of these requests at the run's own mean batch, and the share of each that the run reaches while
    it has something to do. drafters: those of the run."""
    steps = result.speculation.num_steps or result.output_tokens
    batch = max(1, round(steps / max(result.target_passes, 1)))
    known = [name for name in drafters if name != "suffix"]  # of which no record says what it would find
    try:
        found = bounds(traces, costs, batch, drafters=known)
    except ConfigError as error:
        return {"batch": batch, "reason": str(error), "rows": []}
    busy_s = result.spent.duration - result.spent.idle
    rate = result.output_tokens / busy_s if busy_s > 0 else 0.0
    return {
        "batch": batch,
        "requests": len(traces),
        "tokens_per_s": rate,
        "rows": [
            {
                "name": each.name,
                "tokens_per_s": each.tokens_per_s,
                "speedup": each.speedup,
                "reached": rate / each.tokens_per_s,
                "charged": each.charged,
            }
            for each in found
        ],
    }


def table(said: dict[str, Any]) -> list[str]:
    """Lines for a terminal."""
    beside = f"failed {said['failed']}, preemptions {said['preemptions']}"
    rates = f"{said['output_tokens_per_s']:,.1f} tokens/s   {said['requests_per_s']:.3f} requests/s"
    lines = [
        f"requests          {said['requests']:>12,}   {beside}",
        f"simulated         {said['duration_s']:>12,.2f} s",
        f"output            {said['output_tokens']:>12,} tokens   {rates}",
    ]
    worst = sorted(said["errors"].items(), key=lambda pair: -pair[1])[:_MOST_ERRORS]
    lines += [f"failed            {count:>12,}   {error}" for error, count in worst]
    if said["verified"]:
        lines.append(
            f"guesses           {said['verified']:>12,} verified   {said['accepted']:,} accepted, "
            f"{said['acceptance_length']:.2f} tokens per draft, {said['tokens_per_step']:.2f} per step"
        )
    lines += ["", *_time_lines(said), "", *_latency_lines(said)]
    for name, rate in said["goodput"].items():
        share = rate / said["requests_per_s"] if said["requests_per_s"] else 0.0
        lines.append(f"goodput {name}: {rate:.3f} requests/s, {share:.1%} of those served")
    return lines + (_bound_lines(said["bounds"]) if "bounds" in said else [])


def _bound_lines(said: dict[str, Any]) -> list[str]:
    if not said["rows"]:
        return ["", f"no bounds: {said['reason']}"]
    about = f"bounds of {said['requests']} of the requests, {said['batch']} alike at a time"
    lines = ["", f"{about:<58}{'tokens/s':>10}{'reached':>10}"]
    return lines + [
        f"  {each['name']:<56}{each['tokens_per_s']:>10,.0f}{each['reached']:>10.1%}" for each in said["rows"]
    ]


def _time_lines(said: dict[str, Any]) -> list[str]:
    seconds, whole = said["seconds"], said["seconds"]["duration"] or 1.0
    parts = ", ".join(
        f"{name} {seconds[name] / whole:.1%}" for name in ("verify", "draft", "overhead", "idle")
    )
    lines = [f"share of the time  {parts}"]
    if said["rounds"]:
        round_ = said["round_s"]
        parts = " + ".join(
            f"{name} {round_[name] * _MS:.3f}"
            for name in ("overhead", "drafting", "behind", "other")
            if round_[name] >= 5e-7
        )
        lines.append(
            f"a round           {(round_['passes'] + round_['gap']) * _MS:>12.3f} ms = pass "
            f"{round_['passes'] * _MS:.3f} + gap {round_['gap'] * _MS:.3f} ({parts or 'nothing'})"
        )
    landings, count = said["landings"], sum(said["landings"].values())
    if count:
        lines.append(
            f"the bonus token   {count:>12,} times: hit {landings['hit'] / count:.1%}, "
            f"leaf hit {landings['leaf_hit'] / count:.1%}, miss {landings['miss'] / count:.1%}"
        )
    return lines


def _latency_lines(said: dict[str, Any]) -> list[str]:
    lines = [f"{'ms':<18}{'mean':>12}" + "".join(f"{f'p{level}':>12}" for level in SHOWN)]
    for name, found in said["latency"].items():
        if found is None:
            continue
        values = [found["mean"], *(found["percentiles"][level] for level in SHOWN)]
        label = name.removesuffix("_s").replace("_", " ")
        lines.append(f"{label:<18}" + "".join(f"{value * _MS:>12,.3f}" for value in values))
    return lines
