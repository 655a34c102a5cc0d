"""Combining drafters, on recorded acceptance: the engine's own core, with passes replaced by their recorded
outcome and by what they would take.

    python benchmarks/combination_traces.py acceptance_llama3.1-8b_instructcoder.jsonl --requests 120

A trace has one request per line: `prompt_token_ids`, `generated_token_ids` (greedy), and in
`acc_eagle.acc_len` how many tokens a step of an EAGLE-3 head would have brought after so many generated ones
(its guesses that are right, and the bonus token). Only requests are used whose two recordings are equally
long: of others the head's is of another text. The head's guesses are the right tokens and then wrong ones; it
gives no confidence, so all have the same. The n-gram drafter's guesses are found anew in the token ids
(vLLM's rule: the longest match of 7 to 3 tokens, its earliest place), the length of the match being their
confidence.

Seconds are those of Llama-3.1-8B on one H100 (the simulator of arXiv 2601.11580): with T tokens of context in
all, and G guesses and roots in a pass

    pass     3.926e-8 T + 2.101e-5 G + 5.886e-3
    head     2.378e-9 T + 8.414e-7 G + 2.135e-3, the last term being 0.712e-3 per guess with `--head-levels`
    n-gram   0.5875 % of a pass
    step     1.207e-3

A batch is one request many times, as there: the core sees one of them and the seconds of all. The speed-up is
that of the mean over requests of tokens per second.

best single: the best of both drafters and all fixed lengths, known afterwards.  oracle: each step verifies
exactly the guesses that are right, of the drafter that has more of them; n-gram lookup is paid in every step,
the head in those where it wins, with the guesses it makes then.  oracle, head always: it is paid in all.
share: of the oracle's speed-up.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from time import process_time

from paceline.core.draft_lane import DraftPolicy
from paceline.core.drafting import DrafterNeeds, FixedLength
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.params import SamplingParams
from paceline.core.scheduler import Limits
from paceline.core.text_index import IndexedText
from paceline.core.token_tree import TokenTree
from paceline.core.work import (
    DraftDone,
    Event,
    GrowDrafts,
    Proposal,
    Release,
    RequestArrived,
    RunTarget,
    StepDone,
    Verdict,
    Work,
)

VOCAB = 128_512
WRONG = VOCAB - 1
MOST = 20
FIXED = (1, 2, 3, 4, 5, 7, 10, 15, 20)
BATCHES = (1, 8, 16, 32, 64, 128)
SELECTORS = ("combined", "reactive", "bandit", "classifier")


@dataclass(frozen=True)
class Costs:
    """levels: whether a head's guesses in a row take a pass each."""

    levels: bool = False
    overhead: float = 1.20683946e-3

    def target(self, context: int, tokens: int) -> float:
        return 3.92645679e-8 * context + 2.10103129e-5 * tokens + 5.88590713e-3

    def head(self, context: int, guesses: int, depth: int) -> float:
        fixed = 2.13526175e-3 / 3 * depth if self.levels else 2.13526175e-3
        return 2.37768493e-9 * context + 8.41429603e-7 * guesses + fixed

    def ngram(self, context: int, batch: int) -> float:
        return 0.005875 * self.target(context, batch)


@dataclass
class Request:
    """right: guesses of the head that are, after so many generated tokens.  found: what n-gram lookup says
    then, the length of its match, and how much of it is right."""

    prompt: list[int]
    output: list[int]
    right: list[int]
    found: list[tuple[list[int], int, int]] = field(default_factory=list)


def read(path: Path, count: int) -> tuple[list[Request], int]:
    """A sample of so many, and how many there were."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    aligned = [
        Request(
            each["prompt_token_ids"],
            each["generated_token_ids"],
            [n - 1 for n in each["acc_eagle"]["acc_len"]],
        )
        for each in lines
        if len(each["generated_token_ids"]) == len(each["acc_eagle"]["acc_len"]) > 8
    ]
    chosen = random.Random(42).sample(aligned, min(count, len(aligned)))
    for request in chosen:
        request.found = lookups(request)
    return chosen, len(aligned)


def lookups(request: Request) -> list[tuple[list[int], int, int]]:
    text = IndexedText(3, 7)
    text.extend(request.prompt)
    found = []
    for at, token in enumerate(request.output):
        tokens, matched = text.continuation_after([], MOST)
        truth = request.output[at : at + MOST]
        right = next(
            (n for n, (a, b) in enumerate(zip(tokens, truth, strict=False)) if a != b),
            len(tokens[: len(truth)]),
        )
        found.append((tokens, matched, right))
        text.extend([token])
    return found


# ---------------------------------------------------------------- without the core: what is known afterwards

Step = tuple[int, int, int]
"""Tokens generated before; guesses by the head (-1 = it does not run); guesses verified."""


def fixed_head(request: Request, k: int) -> list[Step]:
    return walk(request, lambda at, left: (min(k, left), min(k, left), request.right[at]))


def fixed_ngram(request: Request, k: int) -> list[Step]:
    def step(at: int, left: int) -> Step:
        tokens, _, right = request.found[at]
        return -1, min(k, left, len(tokens)), right

    return walk(request, step)


def oracle(request: Request, always: bool) -> list[Step]:
    def step(at: int, left: int) -> Step:
        ngram, head = min(request.found[at][2], left), min(request.right[at], left)
        if head > ngram:
            return head, head, head
        return 0 if always else -1, ngram, ngram

    return walk(request, step)


def walk(request: Request, step: Callable[[int, int], Step]) -> list[Step]:
    """step: by the tokens generated and those that may be guessed; (head's guesses, verified, right ones)."""
    at, steps = 1, []
    while at < len(request.output):
        head, verified, right = step(at, min(MOST, len(request.output) - at - 1))
        steps.append((at, head, verified))
        at += min(right, verified) + 1
    return steps


def seconds(request: Request, steps: Iterable[Step], batch: int, costs: Costs, *, lookup: bool) -> float:
    total = 0.0
    for at, head, verified in steps:
        context = batch * (len(request.prompt) + at)
        total += costs.target(context, batch * (1 + verified)) + costs.overhead
        total += costs.head(context, batch * head, head) if head >= 0 else 0.0
        total += costs.ngram(context, batch) if lookup else 0.0
    return total


def plain(request: Request, batch: int, costs: Costs) -> float:
    steps = [(at, -1, 0) for at in range(1, len(request.output))]
    return seconds(request, steps, batch, costs, lookup=False)


# ---------------------------------------------------------------- the core


@dataclass
class World:
    """Does the core's work for one request at a time, as a batch of many like it. clock: seconds that went
    by.  decode_s: those of steps that decode, of the request that runs.  asked: questions to each drafter."""

    batch: int
    costs: Costs
    request: Request | None = None
    clock: float = 0.0
    decode_s: float = 0.0
    asked: list[int] = field(default_factory=lambda: [0, 0])
    steps: int = 0
    verified: int = 0

    def run(self, work: Work) -> Event | None:
        match work:
            case GrowDrafts():
                return self._draft(work)
            case RunTarget():
                return self._verify(work)
        return None

    def _spend(self, seconds: float, *, decoding: bool = True) -> float:
        self.clock += seconds
        self.decode_s += seconds if decoding else 0.0
        return seconds

    def _draft(self, work: GrowDrafts) -> DraftDone:
        request, item = self.request, work.items[0]
        assert request is not None
        self.asked[work.drafter] += 1
        known = item.start + len(item.tokens)
        at, size = known - len(request.prompt), item.max_nodes
        context = self.batch * known
        if work.drafter == 0:
            tokens, matched, _ = request.found[at]
            guesses, score = tokens[:size], log(1.0 - 1.0 / (matched + 1)) if tokens else 0.0
            took = self._spend(self.costs.ngram(context, self.batch))
        else:
            right = request.output[at : at + min(request.right[at], size)]
            guesses, score = right + [WRONG] * (size - len(right)), log(0.7)
            took = self._spend(self.costs.head(context, self.batch * size, size))
        count = len(guesses)
        made = Proposal(item.request_id, known, tuple(guesses), tuple(range(-1, count - 1)), (score,) * count)
        return DraftDone(work.round, (made,), took, work.drafter)

    def _verify(self, work: RunTarget) -> StepDone:
        request, item = self.request, work.items[0]
        assert request is not None
        known = item.start + len(item.tokens)
        at, decoding = known - len(request.prompt), known > len(request.prompt)
        tree = TokenTree.build(item.tree_tokens, item.tree_parents)
        path, tokens = tree.walk(lambda node: request.output[at + tree.depth(node)])
        took = self.costs.target(self.batch * known, self.batch * (len(item.tokens) + len(tree)))
        self._spend(took, decoding=decoding)
        self._spend(self.costs.overhead, decoding=decoding)
        self.steps += decoding
        self.verified += len(tree)
        return StepDone(work.step, (Verdict(item.request_id, tuple(path), tuple(tokens)),), took)


def drive(
    requests: list[Request], selector: str, batch: int, costs: Costs
) -> tuple[list[float], World, EngineCore]:
    """Seconds of decoding of each request."""
    longest = max(len(each.prompt) + len(each.output) for each in requests) + 1
    core = EngineCore(
        CoreConfig(
            limits=Limits(longest, 4 * longest + 64, max_num_seqs=1, max_batch_tokens=longest),
            vocab_size=VOCAB,
            prefix_cache=False,
            drafting=DraftPolicy(
                (DrafterNeeds("ngram"), DrafterNeeds("eagle3", ingests_prompts=True)),
                FixedLength(MOST),
                planned=True,
                selector=selector,
            ),
        )
    )
    world, spent = World(batch, costs), []
    for index, request in enumerate(requests):
        world.request, world.decode_s = request, 0.0
        params = SamplingParams(max_tokens=len(request.output)).resolved()
        pending = deque(core.handle(RequestArrived(f"r{index}", tuple(request.prompt), params), world.clock))
        while pending:
            work = pending.popleft()
            event = world.run(work) if not isinstance(work, Release) else None
            if event is not None:
                pending.extend(core.handle(event, world.clock))
        core.take_outputs()
        assert core.idle
        spent.append(world.decode_s)
    return spent, world, core


# ---------------------------------------------------------------- the report


def speedup(requests: list[Request], spent: list[float], base: list[float]) -> float:
    tokens = [len(each.output) - 1 for each in requests]
    rate = sum(count / each for count, each in zip(tokens, spent, strict=True))
    return rate / sum(count / each for count, each in zip(tokens, base, strict=True))


def report(requests: list[Request], batch: int, costs: Costs, selectors: list[str]) -> dict[str, object]:
    base = [plain(each, batch, costs) for each in requests]
    singles = {}
    for name, path, lookup in (("ngram", fixed_ngram, True), ("eagle3", fixed_head, False)):
        for k in FIXED:
            spent = [seconds(each, path(each, k), batch, costs, lookup=lookup) for each in requests]
            singles[f"{name} k={k}"] = speedup(requests, spent, base)
    best = max(singles, key=lambda name: singles[name])
    row: dict[str, object] = {"batch": batch, "best single": f"{singles[best]:.2f} ({best})"}
    bounds = {}
    for name, always in (("oracle", False), ("oracle, head always", True)):
        spent = [seconds(each, oracle(each, always), batch, costs, lookup=True) for each in requests]
        bounds[name] = speedup(requests, spent, base)
    for name in selectors:
        started = process_time()
        spent, world, core = drive(requests, name, batch, costs)
        found = speedup(requests, spent, base)
        row[name] = round(found, 3)
        if name == "combined":
            row["share"] = round(found / bounds["oracle"], 3)
            row["head asked"] = round(world.asked[1] / world.steps, 3)
            row["verified/step"] = round(world.verified / world.steps, 2)
            row["ece"] = [round(each.calibration_error or 0.0, 3) for each in core.drafts.report()]
            row["us/step"] = round((process_time() - started) / world.steps * 1e6)
    return row | {name: round(value, 3) for name, value in bounds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--requests", type=int, default=120, help="sampled from each trace, seed 42")
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--selector", nargs="+", default=list(SELECTORS))
    parser.add_argument("--head-levels", action="store_true")
    args = parser.parse_args()
    for path in args.traces:
        requests, there = read(path, args.requests)
        print(f"{path.stem}: {len(requests)} of {there} requests with recordings of one length", flush=True)
        for batch in args.batch:
            print(json.dumps(report(requests, batch, Costs(args.head_levels), args.selector)), flush=True)


if __name__ == "__main__":
    main()
