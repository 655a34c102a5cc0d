"""Suffix decoding against n-gram lookup on recorded answers, token for token; what a step and a cache cost.

    python benchmarks/suffix_traces.py TRACE.jsonl [TRACE.jsonl ...] [--requests N] [--out FILE]

A trace has one request per line: {"prompt_token_ids", "generated_token_ids"}, decoded greedily, so that what
a drafter without a model would have had accepted is known exactly. The first token comes with the prompt;
from there on every step drafts, and emits what is accepted and one token. `past` is the suffix drafter with a
cache that the preceding requests of the trace have filled, `alone` without.  N-grams: the best of shortest 1
to 4, longest 4 to 8, and 3 to 10 guesses, or so many as suffix decoding drafts on average.

Cost: at 8,192 tokens of context, with a cache of 10,000 outputs of 500 tokens, cut from the traces with every
25th token replaced; two tokens are committed per step. By the clock, and of processor time, which is what
counts where other programs have the core as well.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.params import SamplingParams
from paceline.core.suffix_cache import SuffixCache
from paceline.core.suffix_draft import SuffixRule
from paceline.core.text_index import IndexedText
from paceline.core.token_tree import TokenTree
from paceline.core.work import Announcement, DraftItem, FinishedOutput
from paceline.drafters.suffix import SuffixDrafter

Trace = list[tuple[list[int], list[int]]]
CACHED, OUTPUT, CONTEXT = 10_000, 500, 8192
MIB = 2**20


@dataclass(slots=True)
class Count:
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    seconds: list[float] = field(default_factory=list)

    def add(self, drafted: int, emitted: int) -> None:
        self.steps += 1
        self.drafted += drafted
        self.tokens += emitted

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps

    @property
    def drafted_per_step(self) -> float:
        return self.drafted / self.steps


def loaded(path: Path, requests: int) -> Trace:
    lines = path.read_text(encoding="utf-8").splitlines()[:requests]
    return [(r["prompt_token_ids"], r["generated_token_ids"]) for r in map(json.loads, lines)]


def suffix(trace: Trace, rule: SuffixRule, nodes: int, *, past: bool) -> Count:
    cache = SuffixCache(24, CACHED, 256 * MIB) if past else None
    drafter = SuffixDrafter(rule, sharing="shared" if past else "off", cache=cache)
    count = Count()
    for prompt, output in trace:
        told: Announcement | None = Announcement(
            len(prompt), SamplingParams(max_tokens=len(output)).resolved()
        )
        new, known, done = [*prompt, *output[:1]], 0, 1
        while done < len(output):
            busy = time.thread_time()
            (found,) = drafter.grow([DraftItem("r", known, tuple(new), nodes, nodes, told)])
            count.seconds.append(time.thread_time() - busy)
            assert found.error is None, found.error
            known, told = known + len(new), None
            new = emitted(TokenTree.build(found.tokens, found.parents), output[done:])
            done += len(new)
            count.add(len(found.tokens), len(new))
        drafter.learn([FinishedOutput(tuple(output))])
        drafter.release(["r"])
    return count


def emitted(tree: TokenTree, following: Sequence[int]) -> list[int]:
    """What a step commits of the answer: the accepted guesses and a token more, if there is one."""
    left = iter(following)
    return tree.walk(lambda _: next(left, None))[1]


def ngram(trace: Trace, shortest: int, longest: int, guesses: int) -> Count:
    count = Count()
    for prompt, output in trace:
        text = IndexedText(shortest, longest)
        text.extend([*prompt, *output[:1]])
        done = 1
        while done < len(output):
            draft = text.continuation(guesses)
            accepted = 0
            while (
                accepted < min(len(draft), len(output) - done) and draft[accepted] == output[done + accepted]
            ):
                accepted += 1
            new = output[done : done + accepted + 1]
            text.extend(new)
            done += len(new)
            count.add(len(draft), len(new))
    return count


def compared(name: str, trace: Trace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def row(drafter: str, count: Count) -> None:
        rows.append(
            {
                "trace": name,
                "drafter": drafter,
                "tokens_per_step": count.tokens_per_step,
                "drafted_per_step": count.drafted_per_step,
                "step_cpu_us": statistics.median(count.seconds) * 1e6 if count.seconds else None,
            }
        )

    drafted = []
    rules = {
        "": SuffixRule(),
        ", 2 m + 4 guesses": SuffixRule(2.0, 4.0),
        ", as in the paper": SuffixRule(offset=0.0),
    }
    for rule_name, rule in rules.items():
        for nodes in (10, 16) if not rule_name else (16,):
            for past in (False, True):
                count = suffix(trace, rule, nodes, past=past)
                where = "past" if past else "alone"
                row(f"suffix {where}, at most {nodes}{rule_name}", count)
                drafted.append(max(1, round(count.drafted_per_step)))
    lengths = [(low, high) for low in (1, 2, 3, 4) for high in range(4, 9)]
    grid = {
        (low, high, guesses): ngram(trace, low, high, guesses)
        for low, high in lengths
        for guesses in sorted({3, 5, 7, 10, *drafted})
    }
    best = max(grid, key=lambda setting: grid[setting].tokens_per_step)
    row(f"n-gram, best of {len(grid)}: {best}", grid[best])
    most = max(row["drafted_per_step"] for row in rows if row["drafter"] == "suffix alone, at most 10")
    fair = [setting for setting, count in grid.items() if count.drafted_per_step <= most]
    if fair:
        best = max(fair, key=lambda setting: grid[setting].tokens_per_step)
        row(f"n-gram, best that drafts as little as suffix alone, at most 10: {best}", grid[best])
    return rows


def pieces(traces: Sequence[Trace], rng: np.random.Generator) -> Iterator[list[int]]:
    tokens = np.concatenate([np.array(output) for trace in traces for _, output in trace])
    for start in rng.integers(0, len(tokens) - OUTPUT, CACHED):
        piece = tokens[start : start + OUTPUT].copy()
        piece[rng.integers(0, OUTPUT, OUTPUT // 25)] = rng.integers(0, 128_000, OUTPUT // 25)
        yield piece.tolist()


def cost(traces: Sequence[Trace], nodes: int, steps: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    before = resident()
    cache = SuffixCache(24, CACHED, 256 * MIB)
    drafter = SuffixDrafter(sharing="shared", cache=cache)
    learning = []
    for piece in pieces(traces, rng):
        busy = time.thread_time()
        drafter.learn([FinishedOutput(tuple(piece))])
        cache.catch_up(2048)
        learning.append(time.thread_time() - busy)
    memory = {"bound_mib": cache.max_bytes / MIB, "resident_mib": (resident() - before) / MIB}
    memory |= {"outputs": len(cache), "tokens": cache.num_tokens}
    text = [token for trace in traces for prompt, output in trace for token in (*prompt, *output)]
    text = text[: CONTEXT + 2 * steps]
    told = Announcement(CONTEXT, SamplingParams().resolved())
    drafter.advance([DraftItem("r", 0, tuple(text[:CONTEXT]), 0, 0, told)])
    for _ in range(8):  # the prompt is read in shares
        drafter.grow([DraftItem("r", CONTEXT, (), 0, 0)])
    took = []
    for at in range(CONTEXT, len(text) - 1, 2):
        item = DraftItem("r", at, tuple(text[at : at + 2]), nodes, nodes)
        wall, busy = time.perf_counter(), time.thread_time()
        drafter.grow([item])
        took.append((time.perf_counter() - wall, time.thread_time() - busy))
    named = zip(("wall", "cpu"), zip(*took, strict=True), strict=True)
    return {"memory": memory, "learn_cpu": spread(learning), **{name: spread(each) for name, each in named}}


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """In microseconds."""
    ordered = sorted(seconds)
    return {"median": statistics.median(ordered) * 1e6, "p99": ordered[int(len(ordered) * 0.99)] * 1e6}


def resident() -> int:
    """Most bytes this process has had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--requests", type=int, default=10**6, help="of each trace, the first ones")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    traces = {path.stem: loaded(path, args.requests) for path in args.traces}
    found = cost(list(traces.values()), 7, 1000)
    memory, wall, cpu, learn = (found[name] for name in ("memory", "wall", "cpu", "learn_cpu"))
    print(
        f"{memory['outputs']} outputs, {memory['tokens']} tokens: {memory['resident_mib']:.0f} MiB resident, "
        f"at most {memory['bound_mib']:.0f} MiB\n"
        f"a step: {wall['median']:.0f} us (p99 {wall['p99']:.0f}) by the clock, {cpu['median']:.0f} us "
        f"(p99 {cpu['p99']:.0f}) of processor time\n"
        f"an output learnt: {learn['median']:.0f} us (p99 {learn['p99']:.0f}) of processor time\n"
    )
    print("| trace | drafter | tokens per step | drafted per step | median us of processor time |")
    print("|---|---|---|---|---|")
    rows = []
    for name, trace in traces.items():
        for row in compared(name, trace):
            rows.append(row)
            took = f"{row['step_cpu_us']:.0f}" if row["step_cpu_us"] else ""
            rates = f"{row['tokens_per_step']:.3f} | {row['drafted_per_step']:.2f}"
            print(f"| {name} | {row['drafter']} | {rates} | {took} |", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({"cost": found, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
