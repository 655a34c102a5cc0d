"""Every mode over paced groups: real processes, messages and trees at the pass times of hardware that is not here.

    python benchmarks/paced.py --trace trace.jsonl --pair qwen2-72b --tokens 2000 --repeats 3

The trace comes from `benchmarks/record_trace.py`. `--accepted X` bends it so that the serial tree accepts X
guesses per pass, as published for a pair. Times per pass are those of SwiftSpec (ASPLOS 2026): tables 1 and 7,
section 4.5; in serial modes draft and target have all eight devices each in turn, otherwise a part of them at the
same time.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from paceline.config import Config, GroupsConfig, SpeculationConfig, TreeConfig
from paceline.core.growth import BestFirst, DraftTree
from paceline.core.params import SamplingParams
from paceline.core.token_tree import ROOT
from paceline.engine.modes import MODES
from paceline.loading import load
from paceline.paced.build import PacedPair, build_paced
from paceline.paced.world import Moment, World, read_trace

MS = 1e-3
VOCAB_SIZE = 49152
PAIRS = {
    # Table 7: target and draft with 6+2 devices at the same time, 8 each in turn.
    "qwen2-72b": {
        "serial": ([[8, 10.34]], [[8, 3.73]]),
        "parallel": ([[8, 10.48]], [[8, 3.25]]),
        "accepted": 3.63,
    },
    # Section 4.5 (4 devices); the draft's from Table 1 (3B on 4 and on 8 devices), the serial target's scaled
    # by Table 1's 11.22 / 11.86.
    "llama3-70b": {
        "serial": ([[4, 9.76], [8, 9.83], [16, 12.53]], [[8, 3.27]]),
        "parallel": ([[4, 10.32], [8, 10.39], [16, 13.25]], [[8, 2.80]]),
        "accepted": 3.63,
    },
}


@dataclass
class Result:
    """Of one run. accepted: guesses per pass; the bonus token comes on top."""

    mode: str
    tokens_per_s: float
    accepted: float
    gap_median_ms: float | None
    gap_p99_ms: float | None
    hits: int
    leaf_hits: int
    misses: int
    drafted: int
    verified: int
    draft_idle: float | None


def serial_acceptance(moments: list[Moment], width: int, passes: int, nodes: int) -> float:
    """Guesses accepted per pass by a serial tree over the trace, without processes or waiting."""
    world, rule = World(moments, VOCAB_SIZE), BestFirst(width, passes)
    position, last, accepted, rounds = 0, 1, 0, 0
    while position < len(moments):
        draft = DraftTree()
        for _ in range(passes):
            for leaf in rule.leaves(draft, nodes):
                depth = draft.tree.depth(leaf)
                before = draft.tree.tokens[leaf] if leaf != ROOT else last
                found = world.candidates(position + depth, before, 8)
                for rank, (token, score) in enumerate(zip(*found, strict=True)):
                    draft.add(leaf, token, score, rank, score)
                draft.expanded.add(leaf)
            draft.passes += 1
        tree = draft.tree.select(nodes, nodes)
        start, end = position, last
        path, tokens = tree.walk(
            lambda node, at=start, token=end: world.target_token(
                at + tree.depth(node), tree.tokens[node] if node != ROOT else token
            )
        )
        position, last = position + len(tokens), tokens[-1]
        accepted, rounds = accepted + len(path), rounds + 1
    return accepted / rounds


def bent(moments: list[Moment], accepted: float, args: argparse.Namespace) -> list[Moment]:
    """The trace with a share of its tokens made easier (the drafter's first choice) or harder (not among its
    candidates), so that the serial tree accepts `accepted`."""
    low, high = -1.0, 1.0
    found = moments
    for _ in range(12):
        share = (low + high) / 2
        chance = random.Random(7)
        rank = 0 if share > 0 else None
        found = [Moment(rank, each.scores) if chance.random() < abs(share) else each for each in moments]
        reached = serial_acceptance(found, args.width, args.passes, args.guesses)
        low, high = (share, high) if reached < accepted else (low, share)
    print(f"trace: {share:+.1%} of the tokens bent, the serial tree accepts {reached:.2f} per pass")
    return found


def run(mode: str, pair: Path, args: argparse.Namespace, tokenizer) -> Result:
    config = Config(
        speculation=SpeculationConfig(num_speculative_tokens=args.guesses),
        tree=TreeConfig(tree_width=args.width, tree_passes=args.passes),
        groups=GroupsConfig(mode=mode),
    )
    engine = build_paced(pair, config, tokenizer)
    try:
        seconds, tokens = 0.0, 0
        for index in range(args.requests):
            prompt = list(range(100, 116 + index))
            engine.add(f"r{index}", 0, prompt, SamplingParams(max_tokens=args.tokens).resolved())
            while not engine.idle:
                for _, chunk in engine.step():
                    if chunk.output is not None:
                        seconds += chunk.output.timing.decode_s
                        tokens += len(chunk.output.token_ids) - 1
        total = engine.core.speculation
        gaps = engine.timeline.gaps
        return Result(
            mode,
            tokens / seconds,
            total.num_accepted_tokens / max(total.num_steps, 1),
            gaps.median_s / MS if gaps else None,
            gaps.p99_s / MS if gaps else None,
            total.num_hits,
            total.num_leaf_hits,
            total.num_misses,
            total.num_drafted_nodes,
            total.num_draft_tokens,
            engine.timeline.draft_idle_share,
        )
    finally:
        if args.trace_out:
            engine.timeline.write_trace(args.trace_out.with_suffix(f".{mode}.json"))
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--pair", choices=PAIRS, default="qwen2-72b")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--guesses", type=int, default=7)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--accepted", type=float, help="default: as published for the pair; 0 = as recorded")
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trace-out", type=Path, help="write the lanes of each mode for ui.perfetto.dev")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    preset = PAIRS[args.pair]
    moments = read_trace(args.trace)
    accepted = preset["accepted"] if args.accepted is None else args.accepted
    if accepted:
        moments = bent(moments, accepted, args)
    tokenizer = load("embedded").tokenizer
    results = []
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        trace.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in moments))
        for repeat in range(args.repeats):
            for mode in args.modes:
                times = preset["parallel" if MODES[mode].separate else "serial"]
                target, draft = (tuple((n, ms * MS) for n, ms in points) for points in times)
                pair = Path(folder) / f"{args.pair}.json"
                pair.write_bytes(msgspec.json.encode(PacedPair(target, draft, str(trace))))
                results.append(run(mode, pair, args, tokenizer))
                print(f"{repeat + 1}: {results[-1]}", file=sys.stderr)
    report(results, args)


def report(results: list[Result], args: argparse.Namespace) -> None:
    print("| mode | tok/s | accepted per pass | gap median / p99 ms | hit / leaf / miss | draft idle |")
    print("|---|---|---|---|---|---|")
    for mode in args.modes:
        runs = [each for each in results if each.mode == mode]
        middle = sorted(runs, key=lambda each: each.tokens_per_s)[len(runs) // 2]
        gap = "" if middle.gap_median_ms is None else f"{middle.gap_median_ms:.2f} / {middle.gap_p99_ms:.2f}"
        idle = "" if middle.draft_idle is None else f"{middle.draft_idle:.0%}"
        print(
            f"| {mode} | {middle.tokens_per_s:.0f} | {middle.accepted:.2f} | {gap} | "
            f"{middle.hits} / {middle.leaf_hits} / {middle.misses} | {idle} |"
        )
    if args.out:
        args.out.write_text(json.dumps([asdict(each) for each in results], indent=1))


if __name__ == "__main__":
    main()
