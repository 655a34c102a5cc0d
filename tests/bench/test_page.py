"""The report as a page: whole, self-contained, and true to the figures."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from paceline.bench.page import page_of
from paceline.bench.report import Bound, Report, read_bounds, report_of, write_report
from paceline.bench.settings import Settings
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError
from paceline.sim.metrics import Slo

from .cells import cell, plain_request, request

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Holds that tags nest, and keeps what a page shows and refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.count: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.references.append(value or "")
            if name == "id":
                self.ids.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def report(**more: object) -> Report:
    cells = []
    for workload in ("chat", "edit"):
        for name, made in (("none", plain_request), ("ngram", request), ("a<b>&c", request)):
            for batch in (1, 4):
                requests = [made(f"{workload}/{at}", step_s=0.1 + at / 50) for at in range(4)]
                cells.append(cell(name, requests, workload=workload, batch=batch))
    settings = Settings(SamplingParams(max_tokens=6))
    return report_of(cells, settings, expected=20, slos=[Slo("s", ttft_s=1.0)], **more)  # type: ignore[arg-type]


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    plots = pytest.importorskip("paceline.bench.plots")
    pytest.importorskip("matplotlib")
    bounds = [Bound(name="oracle", speedup=3.0), Bound(name="free", speedup=2.0, workload="chat", batch=4)]
    made = report(bounds=bounds)
    drawn = plots.plots_of(made)
    assert len(drawn) == 6
    page = page_of(made, drawn)
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert reader.open == []
    assert reader.count["svg"] == 6
    assert "://" not in page
    assert all(reference.startswith("#") for reference in reader.references)
    assert {reference[1:] for reference in reader.references} <= set(reader.ids)
    assert not re.search(r"url\((?!#)|@import|<script|<link", page)
    assert "oracle" in page


def test_names_are_escaped_and_gaps_told() -> None:
    page = page_of(report(), {})
    assert "a&lt;b&gt;&amp;c" in page
    assert "<b>" not in page
    assert "8 of 20 cells are missing" in page


def test_figures_stand_in_the_page() -> None:
    page = page_of(report(), {})
    assert "12.0 (1.00x, 2.50)" in page  # 24 tokens in two seconds, as without speculation
    assert "goodput s" in page
    assert page.count('class="passed"') == 8


def test_the_json_is_the_report(tmp_path: Path) -> None:
    made = report()
    (written,) = write_report(made, tmp_path, None)
    read = msgspec.json.decode(written.read_bytes(), type=Report)
    assert msgspec.json.encode(read) == msgspec.json.encode(made)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "holds no bounds"),
        ('[{"name": "a"}]', "holds no bounds"),
        ('[{"name": "a", "speedup": NaN}]', "holds no bounds"),
        ('[{"name": "a", "speedup": 0}]', "the bound a is 0"),
    ],
)
def test_bounds_that_are_none(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bounds.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_bounds(path)
    with pytest.raises(ConfigError, match="cannot read the bounds"):
        read_bounds(tmp_path / "none.json")


def test_bounds_that_a_simulation_printed(tmp_path: Path) -> None:
    row = {"name": "oracle", "tokens_per_s": 30.0, "speedup": 3.0, "reached": 0.5, "charged": "all"}
    path = tmp_path / "simulated.json"
    path.write_text(json.dumps({"requests": 2, "bounds": {"batch": 4, "requests": 2, "rows": [row]}}))
    assert read_bounds(path) == [Bound(name="oracle", speedup=3.0, batch=4, tokens_per_s=30.0, charged="all")]
