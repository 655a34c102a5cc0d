"""One hundred mixed requests on the real engine, and the same ones simulated: do the times agree?

    python benchmarks/simulated_against_real.py serve --out DIR
    python benchmarks/simulated_against_real.py trace --out DIR
    python benchmarks/simulated_against_real.py compare --out DIR --costs costs.json

`serve` sends the requests (chat, code, edit, maths, summary in turn, at most so many tokens each as a draw
says) through `AsyncLLM`: as they come (Poisson) and all at once, `--repeats` times in turn, and keeps what
came of each, and the engine's event log. `trace` records what the drafters are worth along the texts that
came out. `compare` simulates the same arrivals under the very configuration of the log, with costs that
`paceline profile` measured, and prints throughput, ttft, tpot and e2e of both.

Only `serve` is timed: it wants the machine for itself.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import msgspec
from tqdm import tqdm

from drafters import workloads
from paceline import SamplingParams
from paceline.config import Config, SpeculationConfig, load_config
from paceline.core.drafting import DrafterNeeds
from paceline.core.work import (
    AdvanceDrafts,
    DraftDone,
    DraftItem,
    GrowDrafts,
    Proposal,
    RunTarget,
    StepDone,
)
from paceline.engine.async_llm import AsyncLLM
from paceline.engine.replay import read_log
from paceline.loading import load
from paceline.profiling.fit import scaled
from paceline.sim.acceptance import RequestTrace, read_traces, write_traces
from paceline.sim.costs.forms import TableDraft, TablePass, pass_seconds
from paceline.sim.costs.model import CostModel, load_costs
from paceline.sim.metrics import Distribution, RequestTimes, latencies
from paceline.sim.run.drafters import PricedRecord, RecordedDrafter, SimDrafter, model_free
from paceline.sim.run.requests import SimRequest
from paceline.sim.run.simulator import SimResult, simulate
from paceline.sim.run.target import decodes, shape_of
from paceline.tracing.ask import KnownText
from paceline.tracing.replayed import replayed
from paceline.tracing.tracer import Depth, Tracer
from paceline.workload import Bursts
from prompts import DEFAULT_DATA

LENGTHS = (24, 48, 72, 96, 128)
LONGEST_PROMPT = 900
CONTEXT = 1152
KINDS = ("poisson", "closed")
_CORE_NAMES = {"eagle3": "head"}


class Asked(msgspec.Struct, frozen=True):
    """workload: where the prompt is from.  due_s: from the start, by kind of arrival."""

    request_id: str
    workload: str
    prompt: list[int]
    max_tokens: int


class Served(msgspec.Struct, frozen=True):
    """What came of a request. Seconds from the start; due_s: when it should arrive."""

    request_id: str
    due_s: float
    chunk_times_s: list[float]
    chunk_tokens: list[int]
    output: list[int]

    def times(self) -> RequestTimes:
        return RequestTimes(
            self.due_s,
            self.chunk_times_s[0],
            self.chunk_times_s[-1],
            len(self.output),
            self.chunk_times_s,
            self.chunk_tokens,
        )


@dataclass(frozen=True)
class Folder:
    path: Path

    def log(self, kind: str, repeat: int) -> Path:
        return self.path / f"events-{kind}-{repeat}.jsonl"

    def served(self, kind: str, repeat: int) -> Path:
        return self.path / f"served-{kind}-{repeat}.json"

    @property
    def asked(self) -> Path:
        return self.path / "asked.json"

    @property
    def traces(self) -> Path:
        return self.path / "traces.jsonl"

    def runs(self) -> list[tuple[str, int]]:
        numbers = itertools.product(KINDS, range(100))
        return [(kind, repeat) for kind, repeat in numbers if self.served(kind, repeat).exists()]

    def read(self, kind: str, repeat: int) -> list[Served]:
        return msgspec.json.decode(self.served(kind, repeat).read_bytes(), type=list[Served])


def config_of(args: argparse.Namespace) -> Config:
    options = {"draft": args.draft, "dtype": args.dtype, "context_length": CONTEXT}
    return load_config(overrides=args.set, options={**options, "max_num_seqs": args.max_num_seqs})


# ---------------------------------------------------------------- the real run


def questions(engine: AsyncLLM, data: Path, count: int, seed: int) -> list[Asked]:
    """In turn from every workload, in an order drawn by `seed`."""
    chance, found = random.Random(seed), []
    for name, source in workloads(data).items():
        ids = (engine.chat_prompt([{"role": "user", "content": text}]) for _, text in source)
        fitting = (each for each in ids if len(each) <= LONGEST_PROMPT)
        found += [(name, each) for each in itertools.islice(fitting, -(-count // 5))]
    chance.shuffle(found)
    return [
        Asked(f"{name}-{number}", name, ids, chance.choice(LENGTHS))
        for number, (name, ids) in enumerate(found[:count])
    ]


def arrivals(kind: str, count: int, rate: float, seed: int) -> list[float]:
    if kind == "closed":
        return [0.0] * count
    return list(itertools.islice(Bursts(rate, seed=seed).times(), count))


async def serve_one(engine: AsyncLLM, asked: Asked, due: float, started: float) -> Served:
    if (wait := started + due - perf_counter()) > 0.0:
        await asyncio.sleep(wait)
    times: list[float] = []
    counts: list[int] = []
    params = SamplingParams(max_tokens=asked.max_tokens, temperature=0.0)
    output: list[int] = []
    async for chunk in engine.stream(asked.prompt, params):
        if chunk.token_ids:
            times.append(perf_counter() - started)
            counts.append(len(chunk.token_ids))
            output += chunk.token_ids
    return Served(asked.request_id, due, times, counts, output)


async def serve_all(engine: AsyncLLM, asked: Sequence[Asked], due: Sequence[float]) -> list[Served]:
    """Those that are due at once come in the order that they are given in."""
    started = perf_counter()
    return list(
        await asyncio.gather(
            *(serve_one(engine, each, at, started) for each, at in zip(asked, due, strict=True))
        )
    )


def serve(args: argparse.Namespace, folder: Folder) -> None:
    """Each run has an engine of its own: nothing is left in its caches, or in what its planner has learnt."""
    for repeat, kind in itertools.product(range(args.first, args.first + args.repeats), args.kinds):
        engine = AsyncLLM(config=config_of(args), record=folder.log(kind, repeat))
        try:
            asked = questions(engine, args.data, args.requests, args.seed)
            due = arrivals(kind, len(asked), args.rate, args.seed + repeat)
            warm = engine.stream(asked[0].prompt[:5], SamplingParams(max_tokens=2, temperature=0.0))
            asyncio.run(_drained(warm))
            served = asyncio.run(serve_all(engine, asked, due))
        finally:
            engine.close()
        folder.asked.write_bytes(msgspec.json.encode(asked))
        folder.served(kind, repeat).write_bytes(msgspec.json.encode(served))
        tokens, last = sum(len(each.output) for each in served), max(s.chunk_times_s[-1] for s in served)
        print(f"{kind} {repeat}: {tokens} tokens in {last:.1f} s, {tokens / last:.1f} tok/s")


async def _drained(stream: Any) -> None:
    async for _ in stream:
        pass


# ---------------------------------------------------------------- traces of its texts


def trace(args: argparse.Namespace, folder: Folder) -> None:
    asked = msgspec.json.decode(folder.asked.read_bytes(), type=list[Asked])
    outputs = {each.request_id: tuple(each.output) for each in folder.read(*folder.runs()[0])}
    for kind, repeat in folder.runs():
        assert {each.request_id: tuple(each.output) for each in folder.read(kind, repeat)} == outputs
    config, model = config_of(args), load("embedded")
    longest = max(len(each.prompt) + len(outputs[each.request_id]) for each in asked)
    found: list[RequestTrace] = []
    with Tracer(config, model, Depth(), longest) as tracer:
        for each in tqdm(asked, desc="tracing"):
            params = SamplingParams(max_tokens=each.max_tokens, temperature=0.0).resolved()
            text = KnownText(tuple(each.prompt), outputs[each.request_id], params)
            found.append(tracer.trace(each.request_id, text))
    header = {"target": model.name, "drafters": [{"name": each.name} for each in tracer.drafters]}
    write_traces(folder.traces, header, found)


# ---------------------------------------------------------------- both, side by side


@dataclass(frozen=True)
class Figures:
    """tokens_per_s: from the first arrival to the last token.  of: over the requests of all runs."""

    tokens_per_s: float
    of: dict[str, Distribution]


def figures(runs: Sequence[Sequence[RequestTimes]]) -> Figures:
    found = latencies([each for run in runs for each in run])
    parts = {"ttft": found.ttft_s, "tpot": found.tpot_s, "e2e": found.e2e_s}
    return Figures(
        statistics.fmean(map(rate, runs)),
        {name: part for name, part in parts.items() if part is not None},
    )


def rate(run: Sequence[RequestTimes]) -> float:
    seconds = max(each.end_s for each in run) - min(each.arrival_s for each in run)
    return sum(each.tokens or 0 for each in run) / seconds


def table(kind: str, real: Sequence[Sequence[RequestTimes]], told: Sequence[Sequence[RequestTimes]]) -> str:
    """With how far the real runs are apart."""
    lines = [f"{kind:10} {'real':>10} {'(range of runs)':>20} {'simulated':>10} {'ratio':>7}"]
    rows: list[tuple[str, Callable[[Figures], float], float]] = [
        ("tok/s", lambda each: each.tokens_per_s, 1.0)
    ]
    for name, level in itertools.product(("ttft", "tpot", "e2e"), (50, 95)):
        rows.append((f"{name} p{level}", partial(_level, name=name, level=level), 1e3))
    whole, foretold, single = figures(real), figures(told), [figures([run]) for run in real]
    for label, value, scale in rows:
        measured = [scale * value(each) for each in single]
        spread = f"{min(measured):.1f} to {max(measured):.1f}"
        here, there = scale * value(whole), scale * value(foretold)
        lines.append(f"{label:10} {here:10.1f} {spread:>20} {there:10.1f} {there / here:7.3f}")
    return "\n".join(lines)


def _level(each: Figures, *, name: str, level: int) -> float:
    return each.of[name].percentiles[level]


def simulated(
    folder: Folder, kind: str, repeat: int, costs: CostModel, speculation: SpeculationConfig
) -> SimResult:
    """The core of the log, the arrivals of the run, the recorded texts."""
    config, _ = read_log(folder.log(kind, repeat))
    asked = {
        each.request_id: each for each in msgspec.json.decode(folder.asked.read_bytes(), type=list[Asked])
    }
    due = {each.request_id: each.due_s for each in folder.read(kind, repeat)}
    traces = {each.request_id: each for each in read_traces(folder.traces).requests}
    requests = [
        SimRequest(
            name,
            due[name],
            each.prompt,
            traces[name].output,
            renamed(traces[name]),
            params=SamplingParams(max_tokens=each.max_tokens, temperature=0.0).resolved(),
        )
        for name, each in asked.items()
    ]
    costs = renamed_costs(costs)
    drafters = [drafter_of(needs, speculation, costs) for needs in config.drafting.drafters]
    return simulate(config, requests, costs, drafters)


def renamed(trace: RequestTrace) -> RequestTrace:
    """Heads are called so by the core, whatever the configuration calls them."""
    found = {_CORE_NAMES.get(name, name): each for name, each in trace.drafters.items()}
    return replace(trace, drafters=found)


def renamed_costs(costs: CostModel) -> CostModel:
    return replace(costs, drafts={_CORE_NAMES.get(name, name): each for name, each in costs.drafts.items()})


def drafter_of(needs: DrafterNeeds, speculation: SpeculationConfig, costs: CostModel) -> SimDrafter:
    found = model_free(needs.name, speculation, costs.draft(needs.name))
    if found is None:
        recorded = RecordedDrafter(needs.name)
        recorded.needs = needs
        found = PricedRecord(recorded, costs.draft(needs.name))
    return found


# ---------------------------------------------------------------- where they differ


@dataclass
class Sum:
    """seconds: measured, and by the costs."""

    count: int = 0
    real: float = 0.0
    told: float = 0.0

    def add(self, real: float, told: float) -> None:
        self.count, self.real, self.told = self.count + 1, self.real + real, self.told + told


def explained(log: Path, costs: CostModel) -> dict[str, Sum]:
    """What every pass, question and gap of a real run took, and what the costs say of the same."""
    config, entries = read_log(log)
    names = [needs.name for needs in config.drafting.drafters]
    sums: dict[str, Sum] = {}
    passes: dict[int, RunTarget] = {}
    questions: dict[int, GrowDrafts] = {}
    before = reading = 0.0
    for now, event, work in entries:
        if isinstance(event, StepDone):
            asked = passes.pop(event.step)
            known = [len(item.tokens) for item in asked.items]
            size = "decoding" if decodes(asked) else "with prompts"
            told = pass_seconds(costs.target, shape_of(asked))
            sums.setdefault(f"pass {size}", Sum()).add(event.seconds, told)
            rest = now - before - event.seconds
            gap = sums.setdefault(f"rest of a step {size}", Sum())
            gap.add(rest, costs.overhead_s(len(known)) + reading)
            reading = 0.0
        elif isinstance(event, DraftDone):
            asked_of = questions.pop(event.round)
            told = priced(costs, names[asked_of.drafter], asked_of.items, event.proposals)
            sums.setdefault(f"question to {names[event.drafter]}", Sum()).add(event.seconds, told)
            sums.setdefault("rest of a question", Sum()).add(now - before - event.seconds, 0.0)
        for item in work:
            if isinstance(item, RunTarget):
                passes[item.step] = item
            elif isinstance(item, GrowDrafts):
                questions[item.round] = item
            elif isinstance(item, AdvanceDrafts):
                told = priced(costs, names[item.drafter], item.items, ())
                reading += told
                sums.setdefault(f"reading by {names[item.drafter]}", Sum()).add(0.0, told)
        before = now
    return sums


def priced(costs: CostModel, name: str, items: Sequence[DraftItem], proposals: Sequence[Proposal]) -> float:
    lengths = [len(each.tokens) for each in proposals]
    unread = sum(len(item.tokens) for item in items)
    context = sum(item.start for item in items) + unread
    return costs.draft(name).seconds(len(items), max(lengths, default=0), sum(lengths), unread, context)


def at_pace(costs: CostModel, folder: Folder, kind: str, repeat: int, wanted: bool) -> CostModel:
    """The costs at the pace that the machine had in this run. What tells it are the passes over prompts,
    which are nearly the same work in every run."""
    if not wanted:
        return costs
    part = explained(folder.log(kind, repeat), renamed_costs(costs))["pass with prompts"]
    pace = part.real / part.told
    target = scaled(cast(TablePass, costs.target), pace)
    drafts = {name: scaled(cast(TableDraft, each), pace) for name, each in costs.drafts.items()}
    overhead = {name: pace * getattr(costs, name) for name in ("step_overhead_s", "request_overhead_s")}
    return replace(costs, target=target, drafts=drafts, **overhead)


def compare(args: argparse.Namespace, folder: Folder) -> None:
    """Every run is simulated with every file of costs."""
    costs, speculation = [load_costs(path) for path in args.costs], config_of(args).speculation
    for kind in args.kinds:
        repeats = [repeat for other, repeat in folder.runs() if other == kind]
        repeats = [repeat for repeat in repeats if not args.only or repeat in args.only]
        for repeat in repeats:
            events = replayed(folder.log(kind, repeat)).events
            print(f"{kind} {repeat}: {events} events simulated to identical work")
        results = [
            simulated(folder, kind, repeat, at_pace(each, folder, kind, repeat, args.at_pace), speculation)
            for repeat, each in itertools.product(repeats, costs)
        ]
        real = [[each.times() for each in folder.read(kind, repeat)] for repeat in repeats]
        print(table(kind, real, [each.finished for each in results]))
        for repeat, each in itertools.product(repeats, costs):
            print(f"run {repeat}: what was measured, what the costs say of the same work")
            for name, part in sorted(explained(folder.log(kind, repeat), renamed_costs(each)).items()):
                ratio = f"{part.told / part.real:6.3f}" if part.real else ""
                print(f"  {name:28} {part.count:5} {part.real:8.3f} s {part.told:8.3f} s {ratio}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("stage", choices=["serve", "trace", "compare"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--costs", type=Path, nargs="+", help="of paceline profile, one or several")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="compare these runs")
    parser.add_argument("--at-pace", action="store_true", help="with costs at the machine's pace in each run")
    parser.add_argument("--draft", default="ngram+eagle3")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first repeat")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    {"serve": serve, "trace": trace, "compare": compare}[args.stage](args, Folder(args.out))


if __name__ == "__main__":
    main()
