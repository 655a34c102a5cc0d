"""Bounds on recorded answers, as a table in Markdown.

python benchmarks/study_bounds.py TRACE.jsonl ... [--batch B ...] [--costs NAME]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.sim.acceptance import read_traces
from paceline.sim.bounds import bounds
from paceline.sim.costs.published import published


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--costs", default="llama3.1-8b@h100-calibrated", help="published ones, by name")
    args = parser.parse_args()
    costs = published(args.costs)
    columns, rows = ["bound"], dict[str, list[str]]()
    for path in args.traces:
        traces = read_traces(path)
        for batch in args.batch:
            columns.append(f"{traces.name}, batch {batch}")
            for bound in bounds(traces.requests, costs, batch):
                rows.setdefault(bound.name, []).append(f"{bound.speedup:.2f} ({bound.requests})")
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for name, cells in rows.items():
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
