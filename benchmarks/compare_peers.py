"""Measure Paceline beside other engines on this machine.

    python benchmarks/compare_peers.py --config peers.toml --json out.json --markdown out.md

The configuration (see `peers/README.md`) says which interpreter and which model file each engine has. All
runners are started first and then lie still; every repeat goes once round all engines, each time from another
one on, so that a drift of the machine meets all alike. Before each measurement the machine must be idle, and
one that was disturbed while it ran is taken again.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.machine import describe, wait_until_idle
from peers.protocol import batches, load_prompts
from peers.runner_process import EngineConfig, RunnerError, RunnerProcess
from peers.table import Measurement, markdown, rows

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Workload:
    """One table of the report."""

    prompt_set: str
    batch: int
    prompts: list[list[int]]

    @property
    def title(self) -> str:
        return f"{self.prompt_set}, {'one request' if self.batch == 1 else f'{self.batch} at once'}"


class Comparison:
    """All measurements of one invocation."""

    def __init__(self, arguments: argparse.Namespace, engines: Sequence[EngineConfig]) -> None:
        self.arguments = arguments
        self.engines = list(engines)
        self.runners: dict[str, RunnerProcess] = {}
        self.failures: dict[str, str] = {}
        self.measurements: list[Measurement] = []

    def start(self, stack: ExitStack, threads: int, log_folder: Path) -> None:
        """Start every runner, one after the other: loading compiles and uses all cores."""
        for number, engine in enumerate(self.engines):
            begin = time.monotonic()
            log = log_folder / f"{number:02d}-{engine.script.stem}.log"
            try:
                runner = RunnerProcess(
                    engine, threads, max(self.arguments.batches), log, self.arguments.patience
                )
            except (RunnerError, OSError) as error:
                self.fail(engine, f"did not start: {error}")
                continue
            stack.callback(runner.close)
            self.runners[engine.label] = runner
            say(f"{engine.label}: {runner.identity['version']}, ready after {time.monotonic() - begin:.0f} s")

    def run(self, workload: Workload) -> None:
        """Warm every engine up on the workload's shapes, then measure round by round."""
        say(workload.title)
        capable = [e for e in self.engines if e.label in self.runners and workload.batch in e.batches]
        chosen = list(batches(workload.prompts, workload.batch, self.arguments.repeats))
        for engine in list(capable):
            if not self._warm_up(engine, chosen):
                capable.remove(engine)
        for repeat, prompts in enumerate(chosen):
            first = repeat % max(len(capable), 1)
            for engine in [*capable[first:], *capable[:first]]:
                self._measure(engine, workload, repeat, prompts)

    def _warm_up(self, engine: EngineConfig, chosen: Sequence[list[list[int]]]) -> bool:
        """The same lengths, other text: nothing that an engine remembers can help it later."""
        try:
            for prompts in chosen if len(chosen[0]) == 1 else chosen[:1]:
                reverse = [ids[::-1] for ids in prompts]
                self.runners[engine.label].measure(reverse, WARM_UP_TOKENS)
        except RunnerError as error:
            self.fail(engine, str(error))
            return False
        return True

    def _measure(
        self, engine: EngineConfig, workload: Workload, repeat: int, prompts: list[list[int]]
    ) -> None:
        if engine.label not in self.runners:
            return
        limit, tries = self.arguments.max_disturbance, self.arguments.tries
        for attempt in range(1, tries + 1):
            before = wait_until_idle(limit, self.arguments.wait_idle)
            if not before.within(limit):
                say(f"  not idle: foreign {before.foreign:.0%}, stolen {before.stolen:.0%}")
                if self.arguments.strict:
                    raise SystemExit("the machine is not idle")
            try:
                record, during = self.runners[engine.label].measure(prompts, self.arguments.new_tokens)
            except RunnerError as error:
                self.fail(engine, str(error))
                return
            disturbed = not (before.within(limit) and during.within(limit))
            if not disturbed or attempt == tries:
                break
        measurement = Measurement(
            engine.label, workload.prompt_set, workload.batch, repeat, **record,
            foreign=during.foreign, stolen=during.stolen, disturbed=disturbed,
        )  # fmt: skip
        self.measurements.append(measurement)
        say(
            f"  {repeat + 1} {engine.label}: decode {measurement.decode_tok_s:.1f}, "
            f"end to end {measurement.end_to_end_tok_s:.1f} tok/s{' (disturbed)' if disturbed else ''}"
        )

    def fail(self, engine: EngineConfig, reason: str) -> None:
        """Leave the engine out from now on."""
        say(f"{engine.label}: {reason}")
        self.failures[engine.label] = reason
        runner = self.runners.pop(engine.label, None)
        if runner is not None:
            runner.close()


def report(comparison: Comparison, workloads: Sequence[Workload]) -> str:
    """The Markdown report."""
    arguments, machine = comparison.arguments, describe()
    parts = [
        f"{machine['cpu']}, {machine['cores']} cores; greedy, end of text ignored, "
        f"{arguments.new_tokens} new tokens; medians of {arguments.repeats} repeats.",
        "",
    ]
    disturbed = sum(measurement.disturbed for measurement in comparison.measurements)
    if disturbed:
        parts += [
            f"**{disturbed} of {len(comparison.measurements)} measurements were disturbed by other "
            "processes: not for citing.**",
            "",
        ]
    for workload in workloads:
        table = rows(comparison.engines, list(_of(comparison.measurements, workload)))
        parts.append(markdown(workload.title, table))
    parts += [f"- {label}: {reason}" for label, reason in comparison.failures.items()]
    return "\n".join(parts)


def to_json(comparison: Comparison, workloads: Sequence[Workload], identities: dict[str, Any]) -> str:
    """Everything measured, without the tokens, and the medians."""
    options = {k: str(v) if isinstance(v, Path) else v for k, v in vars(comparison.arguments).items()}
    runs = [dataclasses.asdict(m) for m in comparison.measurements]
    for run in runs:
        del run["token_ids"]
    summary = [
        {"set": w.prompt_set, "batch": w.batch}
        | {
            "rows": [
                dataclasses.asdict(row)
                for row in rows(comparison.engines, list(_of(comparison.measurements, w)))
            ]
        }
        for w in workloads
    ]
    content = {
        "machine": describe(),
        "options": options,
        "engines": identities,
        "failures": comparison.failures,
        "summary": summary,
        "runs": runs,
    }
    return json.dumps(content, indent=1)


def load_engines(path: Path, patterns: Sequence[str]) -> tuple[dict[str, Any], list[EngineConfig]]:
    """The configuration's top level and its engines whose label matches one of `patterns` (all if none)."""
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    tables: list[dict[str, Any]] = tree.pop("engine")
    engines = [EngineConfig(**table) for table in tables]
    if patterns:
        engines = [e for e in engines if any(fnmatch.fnmatch(e.label, pattern) for pattern in patterns)]
    if not engines:
        raise SystemExit("no engine of the configuration matches --only")
    return tree, engines


def _of(measurements: Sequence[Measurement], workload: Workload) -> Iterator[Measurement]:
    wanted = (workload.prompt_set, workload.batch)
    return (m for m in measurements if (m.prompt_set, m.batch) == wanted)


def say(text: str) -> None:
    print(text, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, help="prompt file (default: the configuration's `prompts`)")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="engines by label")
    parser.add_argument("--sets", nargs="+", default=["chat-100", "edit-200", "long-1000"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--max-disturbance", type=float, default=0.05, help="share of all cores' time")
    parser.add_argument("--wait-idle", type=float, default=60.0, help="seconds to wait for an idle machine")
    parser.add_argument("--tries", type=int, default=3, help="attempts at an undisturbed measurement")
    parser.add_argument("--strict", action="store_true", help="stop if the machine does not become idle")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds for one answer of a runner")
    parser.add_argument("--logs", type=Path, help="folder of the engines' logs (default: a temporary one)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that the runners are closed
    settings, engines = load_engines(arguments.config, arguments.only)
    prompts = arguments.prompts or Path(settings["prompts"]).expanduser()
    workloads = [
        Workload(name, batch, load_prompts(prompts, name))
        for name in arguments.sets
        for batch in arguments.batches
    ]
    log_folder = arguments.logs or Path(tempfile.mkdtemp(prefix="compare-peers-"))
    log_folder.mkdir(parents=True, exist_ok=True)
    say(f"engine logs in {log_folder}")
    comparison = Comparison(arguments, engines)
    identities: dict[str, Any] = {}

    def save() -> None:
        text = report(comparison, workloads)
        if arguments.markdown:
            arguments.markdown.write_text(text, encoding="utf-8")
        if arguments.json:
            arguments.json.write_text(to_json(comparison, workloads, identities), encoding="utf-8")

    with ExitStack() as stack:
        comparison.start(stack, settings.get("threads", 2), log_folder)
        identities |= {label: runner.identity for label, runner in comparison.runners.items()}
        for workload in workloads:
            comparison.run(workload)
            save()
    say(report(comparison, workloads))


if __name__ == "__main__":
    main()
