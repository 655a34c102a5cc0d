"""Every mode over paced groups: real processes, messages and trees, at the pass times of hardware that is not
here.

    python benchmarks/paced.py --trace trace.jsonl --pair qwen2-72b --repeats 3

The trace comes from `benchmarks/record_trace.py`. `--accepted X` bends it so that the serial tree accepts X
guesses per pass, as published for a pair. Times per pass are those of SwiftSpec (ASPLOS 2026): tables 1 and
7, section 4.5; in serial modes draft and target have all eight devices each in turn, otherwise a part of them
at the same time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import msgspec

from delayed_link import DelayedLink
from paceline.config import Config, GroupsConfig, SpeculationConfig, TreeConfig
from paceline.core.growth import BestFirst
from paceline.core.params import SamplingParams
from paceline.core.token_tree import ROOT, TokenTree
from paceline.core.work import Announcement, DraftItem
from paceline.drafters.tree_drafter import TreeDrafter
from paceline.engine.channel import Listener, read_key_file, write_key_file
from paceline.engine.draft_host import RemoteHost
from paceline.engine.draft_server import hosted
from paceline.engine.draft_worker import DraftWorker
from paceline.engine.engine import Engine
from paceline.loading import load
from paceline.loading.tokenizer import Tokenizer
from paceline.modes import MODES
from paceline.paced.build import PacedPair, build_paced, build_paced_drafter
from paceline.paced.groups import TraceCandidates
from paceline.paced.world import Recording, Text, World, read_recordings

MS = 1e-3
VOCAB_SIZE, CONTEXT = 151936, 4096
PAIRS = {
    # Table 7: target and draft with 6+2 devices at the same time, 8 each in turn; 16 tokens cost more by the
    # ratio that section 4.5 gives for the other pair.
    "qwen2-72b": {
        "serial": ([[8, 10.34], [16, 13.19]], [[8, 3.73]]),
        "parallel": ([[8, 10.48], [16, 13.36]], [[8, 3.25]]),
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
    latency_ms: float
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


def serial_acceptance(recordings: list[Recording], args: argparse.Namespace) -> float:
    """Guesses accepted per pass by a serial tree over the trace, without processes or waiting."""
    world, accepted, rounds = World(recordings, VOCAB_SIZE), 0, 0
    rule = BestFirst(args.width, args.passes)
    for each in recordings:
        drafter = TreeDrafter(TraceCandidates(world, CONTEXT), rule)
        text, tokens, told = world.text(each.prompt), list(each.prompt), 0
        while len(tokens) < len(each.prompt) + len(each.output):
            note = Announcement(len(each.prompt), SamplingParams().resolved()) if told == 0 else None
            item = DraftItem("r", told, tuple(tokens[told:]), args.guesses, args.guesses, note)
            told = len(tokens)
            (proposal,) = drafter.grow([item])
            tree = TokenTree.build(proposal.tokens, proposal.parents)
            path, new = tree.walk(partial(_chosen, text, tokens, tree))
            tokens += new
            accepted, rounds = accepted + len(path), rounds + 1
    return accepted / rounds


def _chosen(text: Text, tokens: list[int], tree: TokenTree, node: int) -> int:
    last = tree.tokens[node] if node != ROOT else tokens[-1]
    return text.target_token(len(tokens) + tree.depth(node), last)


def bent(recordings: list[Recording], accepted: float, args: argparse.Namespace) -> list[Recording]:
    """The trace with a share of its tokens made easier (the drafter's first choice) or harder (not among its
    candidates), so that the serial tree accepts `accepted`."""
    low, high, found, share = -1.0, 1.0, recordings, 0.0
    for _ in range(10):
        share = (low + high) / 2
        chance = random.Random(7)
        found = [_bent(each, share, chance) for each in recordings]
        low, high = (share, high) if serial_acceptance(found, args) < accepted else (low, share)
    reached = serial_acceptance(found, args)
    print(f"trace: {share:+.1%} of the tokens bent, the serial tree accepts {reached:.2f} per pass")
    return found


def _bent(each: Recording, share: float, chance: random.Random) -> Recording:
    rows = []
    for token, ids in zip(each.output, each.candidates, strict=True):
        if chance.random() >= abs(share):
            rows.append(ids)
            continue
        others = [other for other in ids if other != token]
        rows.append(tuple([token, *others] if share > 0 else [*others, -1])[: len(ids)])
    return msgspec.structs.replace(each, candidates=tuple(tuple(max(i, 0) for i in row) for row in rows))


def run(
    mode: str,
    latency_ms: float,
    pair: Path,
    recordings: list[Recording],
    args: argparse.Namespace,
    tokenizer: Tokenizer,
) -> Result:
    config = Config(
        speculation=_speculation(mode, args),
        tree=_tree(mode, args),
        groups=GroupsConfig(mode=mode),
    )
    with distant(pair, config, latency_ms) as host:
        engine = build_paced(pair, config, tokenizer, host=host)
        try:
            return _decoded(engine, mode, latency_ms, recordings)
        finally:
            if args.trace_out:
                engine.timeline.write_trace(args.trace_out.with_suffix(f".{mode}.json"))
            engine.close()


def _speculation(mode: str, args: argparse.Namespace) -> SpeculationConfig:
    """As many guesses as asked for where the mode is there to be compared with; ours chooses."""
    if not MODES[mode].overlapped:
        return SpeculationConfig(num_speculative_tokens=args.guesses)
    if args.without_lookup:  # no text repeats so much
        return SpeculationConfig(prompt_lookup_min=64, prompt_lookup_max=64)
    return SpeculationConfig()


def _tree(mode: str, args: argparse.Namespace) -> TreeConfig:
    """Width and passes where the mode counts them."""
    if MODES[mode].growth == "best-first":
        return TreeConfig(tree_width=args.width, tree_passes=args.passes)
    return TreeConfig(tree_passes=args.passes) if MODES[mode].ahead == "silent" else TreeConfig()


@contextmanager
def distant(pair: Path, config: Config, latency_ms: float) -> Iterator[RemoteHost | None]:
    """Where the drafter is: `latency_ms` away each way, None = a child process on this host."""
    if not latency_ms or not MODES[str(config.groups.mode)].separate:
        yield None
        return
    key = pair.with_suffix(".key")
    if not key.exists():
        write_key_file(key)
    ready: multiprocessing.SimpleQueue[int] = multiprocessing.get_context("spawn").SimpleQueue()
    worker = multiprocessing.get_context("spawn").Process(target=_serve, args=(str(pair), str(key), ready))
    worker.start()
    link = DelayedLink("127.0.0.1", ready.get(), latency_ms * MS)
    try:
        yield RemoteHost(f"tcp://127.0.0.1:{link.port}", key)
    finally:
        link.close()
        worker.terminate()
        worker.join()


def _serve(pair: str, key: str, ready: multiprocessing.SimpleQueue[int]) -> None:
    keys = read_key_file(Path(key))
    listener = Listener("tcp://127.0.0.1:0", keys.worker, keys.engine_public)
    ready.put(int(listener.endpoint.rpartition(":")[2]))
    own = Config(speculation=SpeculationConfig(draft=pair))
    DraftWorker(listener, lambda spec: build_paced_drafter(hosted(spec, own))).run(threading.Event())


def _decoded(engine: Engine, mode: str, latency_ms: float, recordings: list[Recording]) -> Result:
    seconds, tokens = 0.0, 0
    for index, each in enumerate(recordings):
        params = SamplingParams(max_tokens=len(each.output), ignore_eos=True).resolved()
        engine.add(f"r{index}", 0, each.prompt, params)
        while not engine.idle:
            for _, chunk in engine.step():
                if chunk.output is not None:
                    seconds += chunk.output.timing.decode_s or 0.0
                    tokens += len(chunk.output.token_ids) - 1
    total, gaps = engine.core.speculation, engine.timeline.gaps
    return Result(
        mode,
        latency_ms,
        tokens / seconds,
        total.num_accepted_tokens / max(total.num_steps, 1),
        gaps.median_s / MS if gaps else None,
        gaps.p99_s / MS if gaps else None,
        total.num_hits,
        total.num_leaf_hits,
        total.num_misses,
        total.num_drafted_nodes,
        total.num_draft_tokens,
        # Passes ahead that nobody is told of are not in the timeline.
        None if MODES[mode].ahead == "silent" else engine.timeline.draft_idle_share,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--pair", choices=PAIRS, default="qwen2-72b")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--guesses", type=int, default=7)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--accepted", type=float, help="default: as published for the pair; 0 = as recorded")
    parser.add_argument("--without-lookup", action="store_true", help="overlapped, by the drafter alone")
    parser.add_argument("--requests", type=int, help="recorded prompts to take; default: all")
    parser.add_argument("--latency-ms", type=float, nargs="+", default=[0.0], help="added, each way")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trace-out", type=Path, help="write the lanes of each mode for ui.perfetto.dev")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    preset = PAIRS[args.pair]
    recordings = read_recordings(args.trace)[: args.requests]
    accepted = preset["accepted"] if args.accepted is None else args.accepted
    if accepted:
        recordings = bent(recordings, accepted, args)
    tokenizer = load("embedded").tokenizer
    results = []
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        trace.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in recordings))
        for repeat in range(args.repeats):
            for mode, latency_ms in ((mode, ms) for mode in args.modes for ms in args.latency_ms):
                if latency_ms and not MODES[mode].separate:
                    continue
                times = preset["parallel" if MODES[mode].separate else "serial"]
                target, draft = (tuple((n, ms * MS) for n, ms in points) for points in times)
                pair = Path(folder) / f"{args.pair}.json"
                pair.write_bytes(msgspec.json.encode(PacedPair(target, draft, str(trace))))
                results.append(run(mode, latency_ms, pair, recordings, args, tokenizer))
                print(f"{repeat + 1}: {results[-1]}", file=sys.stderr)
    report(results, args)


def report(results: list[Result], args: argparse.Namespace) -> None:
    print("| mode | tok/s | accepted per pass | gap median / p99 ms | hit / leaf / miss | draft idle |")
    print("|---|---|---|---|---|---|")
    settings = dict.fromkeys((each.mode, each.latency_ms) for each in results)
    for mode, latency_ms in settings:
        runs = [each for each in results if (each.mode, each.latency_ms) == (mode, latency_ms)]
        middle = sorted(runs, key=lambda each: each.tokens_per_s)[len(runs) // 2]
        gap = "" if middle.gap_median_ms is None else f"{middle.gap_median_ms:.2f} / {middle.gap_p99_ms:.2f}"
        idle = "" if middle.draft_idle is None else f"{middle.draft_idle:.0%}"
        name = f"{mode}, +{latency_ms:g} ms" if latency_ms else mode
        print(
            f"| {name} | {middle.tokens_per_s:.0f} | {middle.accepted:.2f} | {gap} | "
            f"{middle.hits} / {middle.leaf_hits} / {middle.misses} | {idle} |"
        )
    if args.out:
        args.out.write_text(json.dumps([asdict(each) for each in results], indent=1))


if __name__ == "__main__":
    main()
