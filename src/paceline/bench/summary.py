"""From cells to figures: medians over repeats, acceptance over all of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import groupby

from msgspec import Struct

from paceline.bench.matrix import PLAIN, Load
from paceline.bench.records import Cell, Memory, Place, RequestRecord
from paceline.core.stats import SpeculationStats
from paceline.sim.metrics import Distribution, Latencies, RequestTimes, Slo, goodput, latencies

TENTHS = 10


class Acceptance(Struct, kw_only=True):
    """Of all requests of a row. length: tokens per verified draft, bonus included.  tokens_per_step: the
    same, steps without a draft included.  rate: accepted over verified guesses.  joint: share of drafts that
    were accepted to this depth or beyond.  conditional: of those accepted to the depth before.
    by_tenth: tokens per step in each tenth of the outputs; None = no step began there."""

    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_drafted_nodes: int
    length: float | None
    tokens_per_step: float | None
    rate: float | None
    joint: list[float]
    conditional: list[float]
    by_tenth: list[float | None]


class RequestFigures(Struct, kw_only=True):
    """One request of one repeat. tpot_speedup: of the same request without speculation over this one's."""

    prompt: str
    repeat: int
    tpot_s: float | None
    acceptance_length: float | None
    tokens_per_step: float | None
    overlap: float | None
    tpot_speedup: float | None


class Row(Struct, kw_only=True):
    """One contender, workload and load: medians over repeats unless said otherwise.

    speedup: output tokens per second over those without speculation in the same repeat, prompts included.
    tpot_speedup: mean time per token without speculation over this one's.  latencies: by name, in seconds:
    mean, percentiles, and how many values.  goodput: requests per second that met a service level, by its
    name.  shares: of the time, over all repeats: draft, verify, sample, overhead, idle; draft_beside is no
    part of the sum.  rss_peak: most of all repeats.
    """

    contender: str
    workload: str
    load: str
    batch: int | None
    rate: float | None
    burstiness: float
    repeats: int
    requests: int
    failed: int
    duration_s: float
    output_tokens: float | None
    output_tokens_per_s: float | None
    requests_per_s: float
    speedup: float | None = None
    tpot_speedup: float | None = None
    latencies: dict[str, dict[str, float]] = {}
    goodput: dict[str, float | None] = {}
    acceptance: Acceptance | None = None
    shares: dict[str, float] | None = None
    memory: list[Memory] = []
    rss_before: int | None = None
    rss_peak: int | None = None
    per_request: list[RequestFigures] = []


def rows_of(cells: Iterable[Cell], slos: Sequence[Slo]) -> list[Row]:
    """In the order in which contenders, workloads and loads first appear."""
    kept = list(cells)
    plain = {(cell.place, cell.repeat): cell for cell in kept if cell.contender == PLAIN}
    rows = []
    for _, group in groupby(kept, lambda cell: (cell.contender, cell.place)):
        rows.append(_row(list(group), plain, slos))
    return rows


def _row(cells: list[Cell], plain: Mapping[tuple[Place, int], Cell], slos: Sequence[Slo]) -> Row:
    first = cells[0]
    pairs = [(cell, plain.get((cell.place, cell.repeat))) for cell in cells]
    times = [[request.times for request in cell.ended] for cell in cells]
    found = [latencies(each) for each in times]
    goodputs = {
        slo.name: _median(
            goodput(each, slo, cell.duration_s) for cell, each in zip(cells, times, strict=True)
        )
        for slo in slos
    }
    return Row(
        contender=first.contender,
        workload=first.workload,
        load=Load(first.batch, first.rate, first.burstiness).name,
        batch=first.batch,
        rate=first.rate,
        burstiness=first.burstiness,
        repeats=len(cells),
        requests=sum(len(cell.requests) for cell in cells),
        failed=sum(len(cell.requests) - len(cell.ended) for cell in cells),
        duration_s=statistics.median(cell.duration_s for cell in cells),
        output_tokens=_median(map(tokens_of, cells)),
        output_tokens_per_s=_median(map(_rate, cells)),
        requests_per_s=statistics.median(len(cell.ended) / cell.duration_s for cell in cells),
        speedup=_median(_ratio(_rate(cell), _rate(base)) for cell, base in pairs if base is not None),
        tpot_speedup=_median(
            _ratio(_mean_tpot(base), _mean_tpot(cell)) for cell, base in pairs if base is not None
        ),
        latencies={
            field.name: _medians([getattr(each, field.name) for each in found]) for field in fields(Latencies)
        },
        goodput=goodputs,
        acceptance=_acceptance(cells),
        shares=_shares(cells),
        memory=first.memory,
        rss_before=first.rss_before,
        rss_peak=max((cell.rss_peak for cell in cells if cell.rss_peak is not None), default=None),
        per_request=[figures for cell, base in pairs for figures in _per_request(cell, base)],
    )


def tokens_of(cell: Cell) -> int | None:
    """Of all outputs; None where those of any are not known."""
    counts = [request.tokens for request in cell.ended]
    return None if None in counts else sum(count for count in counts if count is not None)


def _rate(cell: Cell) -> float | None:
    tokens = tokens_of(cell)
    return tokens / cell.duration_s if tokens is not None and cell.duration_s > 0 else None


def _mean_tpot(cell: Cell) -> float | None:
    known = [tpot for request in cell.ended if (tpot := request.times.tpot_s) is not None]
    return statistics.fmean(known) if known else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _median(values: Iterable[float | None]) -> float | None:
    """None where any is not known."""
    known = list(values)
    if not known or any(value is None for value in known):
        return None
    return float(statistics.median(value for value in known if value is not None))


def _medians(found: Sequence[Distribution | None]) -> dict[str, float]:
    """Of each figure of the distributions, one per repeat. Empty = there is nothing to tell."""
    known = [each for each in found if each is not None]
    if not known:
        return {}

    def median(figure: Callable[[Distribution], float]) -> float:
        return statistics.median(map(figure, known))

    levels = {
        f"p{level}": median(lambda each, level=level: each.percentiles[level])  # type: ignore[misc]
        for level in known[0].percentiles
    }
    return {"mean": median(lambda each: each.mean), **levels, "count": median(lambda each: float(each.count))}


# ---------------------------------------------------------------- acceptance


def _acceptance(cells: Sequence[Cell]) -> Acceptance | None:
    totals = [total for cell in cells if (total := cell.total_speculation()) is not None]
    requests = [request for cell in cells for request in cell.ended]
    if not totals:
        return None
    all_ = SpeculationStats()
    for total in totals:
        all_.add(total)
    depths = all_.accepted_by_depth
    return Acceptance(
        num_steps=all_.num_steps,
        num_drafts=all_.num_drafts,
        num_draft_tokens=all_.num_draft_tokens,
        num_accepted_tokens=all_.num_accepted_tokens,
        num_drafted_nodes=all_.num_drafted_nodes,
        length=all_.mean_acceptance_length,
        tokens_per_step=all_.tokens_per_step,
        rate=all_.acceptance_rate,
        joint=[count / all_.num_drafts for count in depths] if all_.num_drafts else [],
        conditional=[
            count / before if before else 0.0
            for count, before in zip(depths, [all_.num_drafts, *depths], strict=False)
        ],
        by_tenth=by_tenth([request.times for request in requests]),
    )


def by_tenth(requests: Sequence[RequestTimes]) -> list[float | None]:
    """Tokens per chunk after the first, by how much of its output a request had when the chunk came. Chunks
    are steps where streams hand out each step's tokens at once, as ours do."""
    tokens, chunks = [0] * TENTHS, [0] * TENTHS
    for request in requests:
        at, total = 0, sum(request.chunk_tokens)
        for number, count in enumerate(request.chunk_tokens):
            if number:
                tenth = min(TENTHS - 1, at * TENTHS // total)
                tokens[tenth] += count
                chunks[tenth] += 1
            at += count
    return [count / steps if steps else None for count, steps in zip(tokens, chunks, strict=True)]


def _per_request(cell: Cell, plain: Cell | None) -> list[RequestFigures]:
    partners: Sequence[RequestRecord | None] = plain.requests if plain is not None else ()
    partners = [*partners, *[None] * (len(cell.requests) - len(partners))]
    figures = []
    for request, partner in zip(cell.requests, partners, strict=False):
        if request.error is not None:
            continue
        told, tpot = request.speculation, request.times.tpot_s
        base = partner.times.tpot_s if partner is not None and partner.prompt == request.prompt else None
        figures.append(
            RequestFigures(
                prompt=request.prompt,
                repeat=cell.repeat,
                tpot_s=tpot,
                acceptance_length=told.mean_acceptance_length if told is not None else None,
                tokens_per_step=told.tokens_per_step if told is not None else None,
                overlap=request.overlap,
                tpot_speedup=_ratio(base, tpot),
            )
        )
    return figures


def gains_by_overlap(rows: Iterable[Row], contender: str, load: str) -> list[tuple[float, float]]:
    """(overlap of prompt and output, speed-up of the time per token) of every request that has both."""
    return [
        (each.overlap, each.tpot_speedup)
        for row in rows
        if row.contender == contender and row.load == load
        for each in row.per_request
        if each.overlap is not None and each.tpot_speedup is not None
    ]


def by_overlap(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, int, float]]:
    """(where a fifth of the scale begins, how many requests it holds, their mean speed-up); empty ones are
    left out."""
    fifths: dict[int, list[float]] = {}
    for overlap, gain in pairs:
        fifths.setdefault(min(int(overlap * 5), 4), []).append(gain)
    return [(at / 5, len(gains), statistics.fmean(gains)) for at, gains in sorted(fifths.items())]


def _shares(cells: Sequence[Cell]) -> dict[str, float] | None:
    known = [(cell.duration_s, cell.shares) for cell in cells if cell.shares is not None]
    total = sum(duration for duration, _ in known)
    if not total:
        return None
    parts = {
        "draft": sum(shares.draft_s for _, shares in known),
        "verify": sum(shares.verify_s for _, shares in known),
        "sample": sum(shares.sample_s for _, shares in known),
        "idle": sum(shares.idle_s for _, shares in known),
    }
    parts["overhead"] = max(0.0, total - sum(parts.values()))
    parts["draft_beside"] = sum(shares.draft_beside_s for _, shares in known)
    return {name: seconds / total for name, seconds in parts.items()}
