"""A target and a draft model on this machine, every way of running them side by side, one request at a time.

    python benchmarks/pair.py TARGET DRAFT --dtype int8 --prompts 20 --tokens 24 --repeats 3 --out pair.json

Modes that run draft and target at the same time get half of the cores each, the others all cores for both.
Seconds are of decoding alone: prompts come from the prefix cache after a first run that is not counted.
The bound: every pass must read its model's weights once, so a round of one target pass and the draft passes
made meanwhile takes at least their bytes over the bandwidth that all cores reach when they read nothing but
weights.

Every output is compared, token for token, with that of the first mode; `--temperature 0.8` samples, seeded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from paceline import LLM, RequestOutput, SamplingParams
from paceline.engine.timeline import Timeline
from paceline.loading import load
from paceline.models.native_decoder import NativeDecoder
from prompts import DEFAULT_DATA, code, edits, open_questions

WORKLOADS = {"spec-bench": open_questions, "humaneval": code, "edit": edits}
MODES: dict[str, dict[str, object]] = {
    "autoregressive": {"mode": "autoregressive"},
    "serial-chain": {"mode": "serial-chain"},
    "serial-tree": {"mode": "serial-tree"},
    "swiftspec": {"mode": "swiftspec"},
    "overlapped": {"mode": "overlapped"},
    "auto": {"placement": "auto"},
}


@dataclass
class Result:
    """Of one workload in one run."""

    mode: str
    workload: str
    repeat: int
    tokens: int
    seconds: float
    tokens_per_pass: float | None
    target_passes: int
    draft_passes: int | None
    gap_median_ms: float | None
    draft_idle: float | None
    outputs: list[list[int]]


def choose(llm: LLM, args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """The first prompts of each workload that are short enough."""
    chosen: dict[str, list[list[int]]] = {}
    for name, source in WORKLOADS.items():
        prompts = (llm.chat_prompt([{"role": "user", "content": text}]) for _, text in source(args.data))
        fitting = (ids for ids in prompts if len(ids) <= args.longest)
        chosen[name] = [ids for ids, _ in zip(fitting, range(args.prompts), strict=False)]
    return chosen


def measure(name: str, args: argparse.Namespace) -> list[Result]:
    options = dict(MODES[name]) | {"dtype": args.dtype, "draft_dtype": args.dtype, "context_length": 1024}
    if name != "autoregressive":
        options["draft"] = args.draft
    results = []
    with LLM(args.target, max_num_seqs=4, kv_tokens=40_000, **options) as llm:
        workloads = choose(llm, args)
        params = SamplingParams(
            max_tokens=args.tokens, temperature=args.temperature, seed=7, top_p=1.0, ignore_eos=True
        )
        first = SamplingParams(max_tokens=1, temperature=0.0)
        for prompts in workloads.values():
            for ids in tqdm(prompts, desc=f"{name}: prompts", leave=False):
                llm.generate(ids, first)
        for repeat in range(args.repeats):
            for workload, prompts in workloads.items():
                results.append(_run(llm, name, workload, repeat, prompts, params))
                each = results[-1]
                print(f"{name} {workload} {repeat}: {each.tokens / each.seconds:.1f} tok/s", file=sys.stderr)
    return results


def _run(
    llm: LLM, name: str, workload: str, repeat: int, prompts: list[list[int]], params: SamplingParams
) -> Result:
    timeline = llm.engine.timeline
    before = len(timeline.target.spans), len(timeline.draft.spans)
    outputs = [llm.generate(ids, params)[0] for ids in prompts]
    tokens = sum(len(output.token_ids) - 1 for output in outputs)
    steps = sum(output.speculation.num_steps for output in outputs)
    gaps = timeline.gaps
    return Result(
        name,
        workload,
        repeat,
        tokens,
        sum(output.timing.decode_s or 0.0 for output in outputs),
        tokens / steps if steps else None,
        len(timeline.target.spans) - before[0],
        _draft_passes(name, timeline, before[1], outputs),
        gaps.median_s * 1e3 if gaps else None,
        None if name == "swiftspec" else timeline.draft_idle_share,
        [output.token_ids for output in outputs],
    )


def _draft_passes(name: str, timeline: Timeline, before: int, outputs: list[RequestOutput]) -> int | None:
    """One per streamed message, or one per guess of a chain; of other modes it is not known here."""
    if name == "overlapped":
        return len(timeline.draft.spans) - before
    if name in ("autoregressive", "serial-chain"):
        return sum(output.speculation.num_drafted_nodes for output in outputs)
    return None


def bandwidth(args: argparse.Namespace) -> dict[str, float]:
    """Bytes of both models' weights, and bytes per second that all cores read of the target's."""
    found = {}
    for name, source in (("target", args.target), ("draft", args.draft)):
        model = load(source)
        decoder = NativeDecoder(model.spec, model.weights, dtype=args.dtype, threads=args.threads)
        found[f"{name}_bytes"] = float(decoder.weight_bytes)
        if name == "target":
            seconds = []
            for _ in range(9):
                began = time.perf_counter()
                decoder.read_weights()
                seconds.append(time.perf_counter() - began)
            found["bytes_per_s"] = decoder.weight_bytes / statistics.median(seconds[1:])
    return found


def report(results: list[Result], bound: dict[str, float], args: argparse.Namespace) -> None:
    print(
        f"target {bound['target_bytes'] / 1e9:.2f} GB, draft {bound['draft_bytes'] / 1e9:.2f} GB, "
        f"{bound['bytes_per_s'] / 1e9:.1f} GB/s"
    )
    print("| mode | " + " | ".join(WORKLOADS) + " | tokens per pass | share of the bound | equal outputs |")
    print("|---|" + "---|" * (len(WORKLOADS) + 3))
    first = {each.workload: each.outputs for each in results if each.mode == args.modes[0]}
    for name in args.modes:
        rates, passes, shares, equal, total = [], [], [], 0, 0
        for workload in WORKLOADS:
            runs = [each for each in results if (each.mode, each.workload) == (name, workload)]
            rates.append(statistics.median(each.tokens / each.seconds for each in runs))
            for each in runs:
                equal += sum(one == other for one, other in zip(each.outputs, first[workload], strict=True))
                total += len(each.outputs)
            passes += [each.tokens_per_pass for each in runs if each.tokens_per_pass]
            shares += [_least_s(each, bound) / each.seconds for each in runs if each.draft_passes is not None]
        print(
            f"| {name} | "
            + " | ".join(f"{rate:.1f}" for rate in rates)
            + f" | {statistics.mean(passes):.2f} | {f'{statistics.median(shares):.0%}' if shares else '-'} "
            f"| {equal} / {total} |"
        )


def _least_s(each: Result, bound: dict[str, float]) -> float:
    moved = each.target_passes * bound["target_bytes"] + (each.draft_passes or 0) * bound["draft_bytes"]
    return moved / bound["bytes_per_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--longest", type=int, default=300, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bound = bandwidth(args)
    results = []
    for name in args.modes:
        results += measure(name, args)
        if args.out:
            args.out.write_text(json.dumps({"bound": bound, "runs": [asdict(each) for each in results]}))
    report(results, bound, args)


if __name__ == "__main__":
    main()
