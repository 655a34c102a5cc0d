"""The report as one page of HTML that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from statistics import geometric_mean

from paceline.bench.matrix import PLAIN
from paceline.bench.report import Report
from paceline.bench.summary import Row, by_overlap, gains_by_overlap

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.86rem; }
th, td { padding: 0.2rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.passed { color: #17693a; } .failed { color: #b00020; font-weight: 600; } .open { color: #777; }
svg { max-width: 100%; height: auto; }
p.note { color: #555; font-size: 0.86rem; }
"""


def page_of(report: Report, plots: dict[str, str]) -> str:
    head, *lines = throughput(report)
    parts = [
        f"<h1>paceline bench: {escape(', '.join(report.contenders))}</h1>",
        f'<p class="note">{escape(_about(report))}</p>',
        _section("Throughput", _table(head, lines), _THROUGHPUT_NOTE),
        *(f"<h2>{escape(title)}</h2>\n<div class='wide'>{svg}</div>" for title, svg in plots.items()),
        _section("Latency", _latency(report), _LATENCY_NOTE),
        _section("Acceptance", _acceptance(report), _ACCEPTANCE_NOTE),
        _section("Speed-up by overlap", _overlaps(report), _OVERLAP_NOTE),
        _section("Where the time goes", _shares(report), _SHARES_NOTE),
        _section("Memory", _memory(report), _MEMORY_NOTE),
        f"<h2>Checks</h2>\n<ul>{''.join(_checks(report))}</ul>",
        _section("Settings", _settings(report)),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>paceline bench</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _about(report: Report) -> str:
    missing = report.expected - report.cells
    unfinished = f" {missing} of {report.expected} cells are missing." if missing else ""
    return (
        f"Paceline {report.paceline}, {report.machine}, {report.created}. {report.cells} cells.{unfinished}"
    )


def _section(title: str, table: str, note: str = "") -> str:
    if not table:
        return ""
    told = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<h2>{escape(title)}</h2>\n{told}<div class="wide">{table}</div>'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [line(row, "td") for row in rows]
    if not lines:
        return ""
    return f"<table>\n<thead>{line(head, 'th')}</thead>\n<tbody>\n" + "\n".join(lines) + "\n</tbody></table>"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return f"{value:.{digits}f}{unit}" if value is not None else "-"


def _ms(row: Row, name: str, level: str) -> str:
    seconds = row.latencies.get(name, {}).get(level)
    return number(seconds * 1e3 if seconds is not None else None, 1)


def _mib(count: float | None) -> str:
    return number(count / 2**20 if count is not None else None, 0)


# ---------------------------------------------------------------- tables

_THROUGHPUT_NOTE = (
    "Output tokens per second of the whole cell, prompts included; in brackets the speed-up over no "
    "speculation, and the mean acceptance length, bonus included. Medians over repeats; speed-ups are "
    "medians of the ratios within a repeat. The last line has geometric means of the speed-ups."
)
_LATENCY_NOTE = (
    "Milliseconds, medians over repeats. ttft: from when a request was due to its first token. tpot: (e2e - "
    "ttft) / (tokens - 1). itl per chunk: between two pieces of a stream, of which a step of speculation "
    "hands out several tokens at once (what vLLM and SGLang call itl). itl per token: that over the "
    "number of the piece's tokens. Goodput: requests per second that met the service level."
)
_ACCEPTANCE_NOTE = (
    "Length: tokens per verified draft, bonus included. Per step: the same, steps without a draft included. "
    "Rate: accepted over verified guesses. Joint: share of drafts accepted to that depth or beyond. "
    "Conditional: of those accepted to the depth before."
)
_OVERLAP_NOTE = (
    "Time per token without speculation over that with it, means over the requests whose prompt and output "
    "overlap so much (BLEU-4 without the brevity penalty), in brackets how many those are; at the first load."
)
_SHARES_NOTE = (
    "Share of wall time. Draft: where the target waits for it. Verify: target passes, those of prompts "
    "included, without sample. Beside: a drafter that works while the target does, no part of the sum."
)
_MEMORY_NOTE = (
    "Weights in MiB, the rest in bytes per token. RSS: of the process and its children, before the engine "
    "was made and at most while a cell ran; what processes share counts for each."
)


def throughput(report: Report) -> list[list[str]]:
    """As rows of cells, the first one the head."""
    places = list(dict.fromkeys((row.workload, row.load) for row in report.rows))
    found = {(row.contender, row.workload, row.load): row for row in report.rows}
    lines = []
    for workload, load in places:
        cells = [found.get((name, workload, load)) for name in report.contenders]
        lines.append([f"{workload}, {load}", *(_speed(cell) for cell in cells)])
    means = []
    for name in report.contenders:
        gains = [row.speedup for row in report.rows if row.contender == name and row.speedup]
        means.append(number(geometric_mean(gains), 2, "x") if gains else "-")
    return [["", *report.contenders], *lines, ["geometric mean", *means]]


def _speed(row: Row | None) -> str:
    if row is None:
        return "-"
    told = [number(row.speedup, 2, "x")] if row.speedup is not None else []
    if row.acceptance is not None and row.acceptance.length is not None:
        told.append(number(row.acceptance.length))
    return number(row.output_tokens_per_s, 1) + (f" ({', '.join(told)})" if told else "")


def _latency(report: Report) -> str:
    columns = (
        ("ttft_s", "p50"),
        ("ttft_s", "p95"),
        ("tpot_s", "p50"),
        ("tpot_s", "p95"),
        ("itl_per_chunk_s", "p50"),
        ("itl_per_chunk_s", "p99"),
        ("itl_per_token_s", "p50"),
        ("itl_per_token_s", "p99"),
        ("e2e_s", "p50"),
        ("e2e_s", "p95"),
    )
    head = ["", *(f"{name[:-2].replace('_', ' ')} {level}" for name, level in columns), "tpot speed-up"]
    lines = [
        [
            _name(row),
            *(_ms(row, name, level) for name, level in columns),
            number(row.tpot_speedup, 2, "x"),
            *(number(row.goodput.get(slo)) for slo in report.slos),
        ]
        for row in report.rows
    ]
    return _table([*head, *(f"goodput {slo}" for slo in report.slos)], lines)


def _name(row: Row) -> str:
    return f"{row.workload}, {row.load}, {row.contender}"


def _acceptance(report: Report) -> str:
    def shares(values: Sequence[float]) -> str:
        return " ".join(number(value) for value in values[:8]) + (" ..." if len(values) > 8 else "")

    lines = [
        [
            _name(row),
            number(told.length),
            number(told.tokens_per_step),
            number(told.rate),
            str(told.num_drafts),
            str(told.num_draft_tokens),
            str(told.num_accepted_tokens),
            shares(told.joint),
            shares(told.conditional),
        ]
        for row in report.rows
        if (told := row.acceptance) is not None and row.contender != PLAIN
    ]
    head = ["", "length", "per step", "rate", "drafts", "verified", "accepted", "joint", "conditional"]
    return _table(head, lines)


def _overlaps(report: Report) -> str:
    lines = []
    for name in report.contenders:
        found = {low: cell for low, *cell in by_overlap(gains_by_overlap(report.rows, name, report.loads[0]))}
        if found and name != PLAIN:
            cells = [found.get(low) for low in (at / 5 for at in range(5))]
            lines.append([name, *(f"{cell[1]:.2f} ({cell[0]})" if cell else "-" for cell in cells)])
    return _table(["", "0 - 0.2", "0.2 - 0.4", "0.4 - 0.6", "0.6 - 0.8", "0.8 - 1"], lines)


def _shares(report: Report) -> str:
    names = ("draft", "verify", "sample", "overhead", "idle", "draft_beside")
    lines = [
        [_name(row), *(f"{row.shares[name]:.1%}" for name in names)]
        for row in report.rows
        if row.shares is not None
    ]
    return _table(["", *names[:-1], "beside"], lines)


def _memory(report: Report) -> str:
    lines = []
    for name in report.contenders:
        rows = [row for row in report.rows if row.contender == name and row.memory]
        if not rows:
            continue
        peak = max((row.rss_peak for row in rows if row.rss_peak is not None), default=None)
        before = max((row.rss_before for row in rows if row.rss_before is not None), default=None)
        for at, each in enumerate(rows[0].memory):
            parts = [name, each.name, _mib(each.weight_bytes), str(each.kv_bytes_per_token)]
            rss = [_mib(before), _mib(peak)] if at == 0 else ["", ""]
            lines.append([*parts, str(each.feature_bytes_per_token), *rss])
    head = ["", "of", "weights", "KV per token", "hidden states per token", "RSS before", "RSS peak"]
    return _table(head, lines)


def _checks(report: Report) -> list[str]:
    kinds = {True: "passed", False: "failed", None: "open"}
    return [f'<li class="{kinds[check.passed]}">{escape(check.line())}</li>' for check in report.checks]


def _settings(report: Report) -> str:
    return _table(["", ""], [[name, str(value)] for name, value in report.settings.items()])
