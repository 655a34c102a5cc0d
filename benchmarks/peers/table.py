"""From measurements to medians, ratios and Markdown tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from peers.runner_process import EngineConfig


@dataclass
class Measurement:
    """One engine's record of one repeat of one workload, with what disturbed it."""

    label: str
    prompt_set: str
    batch: int
    repeat: int
    ttft_s: float
    decode_s: float
    total_s: float
    tokens: int
    decode_tok_s: float
    end_to_end_tok_s: float
    foreign: float
    stolen: float
    disturbed: bool
    token_ids: list[list[int]] = field(repr=False, default_factory=list)


@dataclass(frozen=True)
class Row:
    """Medians of one engine on one workload.

    Ratios are Paceline's rate over this engine's: the median of the ratios of the single repeats, which ran
    one soon after the other.  alike: the Paceline row of the same precision that speculates if this one does.
    best: Paceline's fastest row of the same precision.  agreement: tokens until the first that differs from
    the one of `alike`, mean over the prompts.
    """

    label: str
    ttft_s: float
    decode_tok_s: float
    end_to_end_tok_s: float
    disturbed: int
    repeats: int
    decode_ratio: float | None = None
    end_to_end_ratio: float | None = None
    best_ratio: float | None = None
    agreement: float | None = None


def rows(engines: Sequence[EngineConfig], measurements: Sequence[Measurement]) -> list[Row]:
    """The table of one workload, in the order of `engines`; those without a measurement are left out."""
    by_label: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        by_label.setdefault(measurement.label, []).append(measurement)
    present = [engine for engine in engines if engine.label in by_label]
    ours = [engine for engine in present if engine.runner == "paceline"]
    return [_row(engine, ours, by_label) for engine in present]


def _row(engine: EngineConfig, ours: Sequence[EngineConfig], by_label: dict[str, list[Measurement]]) -> Row:
    own = by_label[engine.label]
    same = [other for other in ours if other.precision == engine.precision]
    alike = next((e for e in same if (e.speculation == "none") == (engine.speculation == "none")), None)
    decode_ratio = end_to_end_ratio = best_ratio = agreement = None
    if alike is not None:
        decode_ratio = _ratio(by_label[alike.label], own, "decode_tok_s")
        end_to_end_ratio = _ratio(by_label[alike.label], own, "end_to_end_tok_s")
        agreement = _agreement(by_label[alike.label], own)
    if same:
        best = max(same, key=lambda e: _median(by_label[e.label], "end_to_end_tok_s"))
        best_ratio = _ratio(by_label[best.label], own, "end_to_end_tok_s")
    return Row(
        engine.label,
        _median(own, "ttft_s"),
        _median(own, "decode_tok_s"),
        _median(own, "end_to_end_tok_s"),
        sum(measurement.disturbed for measurement in own),
        len(own),
        decode_ratio,
        end_to_end_ratio,
        best_ratio,
        agreement,
    )


def markdown(title: str, table: Sequence[Row]) -> str:
    """A Markdown table; times in ms, rates in tokens per second, disturbed repeats marked."""
    lines = [
        f"### {title}",
        "",
        "| engine | TTFT ms | decode tok/s | end to end tok/s | Paceline alike: decode | end to end "
        "| Paceline best | same tokens | disturbed |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in table:
        ratios = (row.decode_ratio, row.end_to_end_ratio, row.best_ratio)
        cells = [
            row.label,
            f"{row.ttft_s * 1e3:.0f}",
            f"{row.decode_tok_s:.1f}",
            f"{row.end_to_end_tok_s:.1f}",
            *("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
            "" if row.agreement is None else f"{row.agreement:.0f}",
            f"{row.disturbed}/{row.repeats}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def _median(measurements: Sequence[Measurement], name: str) -> float:
    return float(statistics.median(getattr(measurement, name) for measurement in measurements))


def _ratio(ours: Sequence[Measurement], theirs: Sequence[Measurement], name: str) -> float | None:
    by_repeat = {measurement.repeat: getattr(measurement, name) for measurement in ours}
    ratios = [by_repeat[m.repeat] / getattr(m, name) for m in theirs if m.repeat in by_repeat]
    return statistics.median(ratios) if ratios else None


def _agreement(ours: Sequence[Measurement], theirs: Sequence[Measurement]) -> float | None:
    by_repeat = {measurement.repeat: measurement.token_ids for measurement in ours}
    lengths = [
        common_prefix(mine, yours)
        for measurement in theirs
        for mine, yours in zip(by_repeat.get(measurement.repeat, []), measurement.token_ids, strict=False)
    ]
    return statistics.fmean(lengths) if lengths else None


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Number of equal tokens before the first difference."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))
