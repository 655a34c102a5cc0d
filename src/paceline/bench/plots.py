"""Pictures of a report, as SVG that stands in a page by itself."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paceline.bench.matrix import PLAIN
from paceline.bench.report import Report
from paceline.bench.summary import TENTHS, Acceptance, Row, by_overlap, gains_by_overlap
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = ("draft", "verify", "sample", "overhead", "idle")


def check_plots() -> None:
    """Raises ConfigError where the library is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "the report's plots need matplotlib, which is not installed: pip install 'paceline[bench]', or "
            "choose --no-html, which writes the figures alone."
        ) from None


def plots_of(report: Report) -> dict[str, str]:
    """SVG by title; what there is nothing to draw for is left out."""
    import matplotlib

    matplotlib.use("Agg")
    drawn = {}
    for title, draw in _PLOTS.items():
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9}):
            svg = draw(report)
        if svg is not None:
            drawn[title] = svg
    return drawn


def _svg(width: float, height: float, columns: int, draw: Callable[[list[Axes]], None]) -> str:
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(1, columns, figsize=(width, height), layout="constrained", squeeze=False)
    try:
        draw(list(grid[0]))
        file = io.StringIO()
        empty = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=empty)
    finally:
        pyplot.close(figure)
    return _inline(file.getvalue())


def _inline(svg: str) -> str:
    """Without what only a file of its own needs: a page knows the namespaces, and names must be unique."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'\sxmlns(?::\w+)?="[^"]*"', "", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r'<g id="[^"]*"', "<g", svg)


def _colours(names: Sequence[str]) -> dict[str, str]:
    return {name: f"C{at % 10}" for at, name in enumerate(names)}


def _drafters(report: Report) -> list[str]:
    return [name for name in report.contenders if name != PLAIN]


def _rows(report: Report, contender: str, *, workload: str | None = None) -> list[Row]:
    return [row for row in report.rows if row.contender == contender and workload in (None, row.workload)]


# ---------------------------------------------------------------- the pictures


def _speedup(report: Report) -> str | None:
    if not any(row.speedup for row in report.rows if row.contender != PLAIN):
        return None
    colours = _colours(report.contenders)
    places = {load: at for at, load in enumerate(report.loads)}

    def one(axes: Axes, workload: str) -> None:
        for name in _drafters(report):
            rows = _rows(report, name, workload=workload)
            points = [(places[row.load], row.speedup) for row in rows if row.speedup is not None]
            axes.plot(
                [place for place, _ in points],
                [speedup for _, speedup in points],
                marker="o",
                color=colours[name],
                label=name,
            )
        for bound in report.bounds:
            if bound.workload in (None, workload):
                here = f"batch {bound.batch}"
                if bound.batch is None:
                    axes.axhline(bound.speedup, linestyle=":", color="grey", label=bound.name)
                elif here in places:
                    axes.plot([places[here]], [bound.speedup], "v", color="grey", label=bound.name)
        axes.axhline(1.0, color="black", linewidth=0.6)
        axes.set_xticks(range(len(places)), list(places))
        axes.set(title=workload, ylabel="output tokens/s over no speculation")

    def draw(all_: list[Axes]) -> None:
        for axes, workload in zip(all_, report.workloads, strict=True):
            one(axes, workload)
        _legend(all_[0])

    return _svg(3.2 * len(report.workloads) + 1, 3.2, len(report.workloads), draw)


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    shown = dict(zip(labels, handles, strict=True))
    if shown:
        axes.legend(shown.values(), shown.keys(), fontsize=7)


def _breakdown(report: Report) -> str | None:
    """Means over workloads."""
    bars: list[tuple[str, dict[str, float]]] = []
    for load in report.loads:
        for name in report.contenders:
            known = [row.shares for row in _rows(report, name) if row.load == load and row.shares is not None]
            if known:
                parts = {part: statistics.fmean(each[part] for each in known) for part in PARTS}
                bars.append((f"{load}\n{name}", parts))
    if not bars:
        return None

    def draw(all_: list[Axes]) -> None:
        below = [0.0] * len(bars)
        for part in PARTS:
            heights = [parts[part] for _, parts in bars]
            all_[0].bar(range(len(bars)), heights, bottom=below, label=part)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        all_[0].set_xticks(range(len(bars)), [label for label, _ in bars], rotation=60, fontsize=7)
        all_[0].set(ylabel="share of the time, mean over workloads", ylim=(0, 1))
        all_[0].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return _svg(max(6.0, 0.45 * len(bars) + 2), 4.2, 1, draw)


def _acceptances(report: Report) -> dict[str, list[Acceptance]]:
    """By drafter, where the fewest requests share a pass."""
    found = {}
    for name in _drafters(report):
        told = [
            row.acceptance
            for row in _rows(report, name)
            if row.load == report.loads[0] and row.acceptance is not None and row.acceptance.num_drafts
        ]
        if told:
            found[name] = told
    return found


def _in_draft(report: Report) -> str | None:
    """Over all workloads together: joint, and given that the guess before was accepted."""
    found = _acceptances(report)
    if not found:
        return None
    colours = _colours(report.contenders)

    def draw(all_: list[Axes]) -> None:
        for name, told in found.items():
            drafts = sum(each.num_drafts for each in told)
            depth = max(len(each.joint) for each in told)
            joint = [
                sum(each.joint[at] * each.num_drafts for each in told if at < len(each.joint)) / drafts
                for at in range(depth)
            ]
            before = [1.0, *joint]
            given = [share / last if last else 0.0 for share, last in zip(joint, before, strict=False)]
            for axes, values in zip(all_, (joint, given), strict=True):
                axes.plot(range(1, depth + 1), values, marker="o", color=colours[name], label=name)
        all_[0].set(title="joint", xlabel="position in the draft", ylabel="share of drafts accepted so far")
        all_[1].set(title="conditional", xlabel="position in the draft", ylabel="share accepted, if the last")
        for axes in all_:
            axes.set_ylim(0, 1)
        _legend(all_[0])

    return _svg(8, 3.2, 2, draw)


def _in_output(report: Report) -> str | None:
    found = {
        name: [each for each in told if any(value is not None for value in each.by_tenth)]
        for name, told in _acceptances(report).items()
    }
    if not any(found.values()):
        return None
    colours = _colours(report.contenders)

    def mean(told: list[Acceptance], tenth: int) -> float:
        known = [value for each in told if (value := each.by_tenth[tenth]) is not None]
        return statistics.fmean(known) if known else float("nan")

    def draw(all_: list[Axes]) -> None:
        for name, told in found.items():
            values = [mean(told, tenth) for tenth in range(TENTHS)]
            all_[0].plot(range(1, TENTHS + 1), values, marker="o", color=colours[name], label=name)
        all_[0].set(xlabel="tenth of the output", ylabel="tokens per step, mean over workloads")
        _legend(all_[0])

    return _svg(5, 3.2, 1, draw)


def _boxes(report: Report) -> str | None:
    """Requests of the first load; whiskers from the 5th to the 95th percentile."""
    groups: list[tuple[str, list[float]]] = []
    for workload in report.workloads:
        for name in _drafters(report):
            for row in _rows(report, name, workload=workload):
                lengths = [each.acceptance_length for each in row.per_request]
                known = [length for length in lengths if length is not None]
                if row.load == report.loads[0] and known:
                    groups.append((f"{workload}\n{name}", known))
    if not groups:
        return None

    def draw(all_: list[Axes]) -> None:
        all_[0].boxplot([values for _, values in groups], whis=(5, 95), showfliers=False)
        all_[0].set_xticks(range(1, len(groups) + 1), [label for label, _ in groups], rotation=60, fontsize=7)
        all_[0].set(ylabel="acceptance length of a request, bonus included")

    return _svg(max(6.0, 0.4 * len(groups) + 2), 4.2, 1, draw)


def _against_overlap(report: Report) -> str | None:
    """Every request of the first load, and means of five bins."""
    colours = _colours(report.contenders)
    points = {name: gains_by_overlap(report.rows, name, report.loads[0]) for name in _drafters(report)}
    points = {name: pairs for name, pairs in points.items() if pairs}
    if not points:
        return None

    def draw(all_: list[Axes]) -> None:
        for name, pairs in points.items():
            x, y = zip(*pairs, strict=True)
            all_[0].scatter(x, y, s=8, alpha=0.35, color=colours[name])
            means = [(low + 0.1, mean) for low, _, mean in by_overlap(pairs)]
            all_[0].plot(*zip(*means, strict=True), marker="s", color=colours[name], label=name)
        all_[0].axhline(1.0, color="black", linewidth=0.6)
        all_[0].set(xlabel="overlap of prompt and output (BLEU-4)", ylabel="time per token without / with")
        _legend(all_[0])

    return _svg(6, 3.6, 1, draw)


_PLOTS: dict[str, Callable[[Report], Any]] = {
    "Speed-up over load": _speedup,
    "Where the time goes": _breakdown,
    "Acceptance by position in the draft": _in_draft,
    "Tokens per step along the output": _in_output,
    "Acceptance length of requests": _boxes,
    "Speed-up against overlap of prompt and output": _against_overlap,
}
