"""What the policy itself costs: `EngineCore.handle` per request and step, without any model.

    python benchmarks/core_overhead.py --batch 64 --draft 5
    python benchmarks/core_overhead.py --batch 1 --draft 8 --combined

A scripted executor answers at once: half of the guesses are accepted, prompts have 256 tokens. `--combined`:
two drafters, a cheap and a dear one, which agree on the first guesses; what is asked and verified is decided
by what it brings, and the time without drafters is told beside. Times are the thread's own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque

from paceline.core.draft_lane import DraftPolicy
from paceline.core.drafting import DrafterNeeds, FixedLength
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.params import SamplingParams
from paceline.core.scheduler import Limits
from paceline.core.work import (
    DraftDone,
    DraftItem,
    Event,
    GrowDrafts,
    Proposal,
    RequestArrived,
    RunTarget,
    StepDone,
    TargetItem,
    Verdict,
    Work,
)


def guesses(item: DraftItem, drafter: int) -> Proposal:
    """Both drafters' first two guesses are the same."""
    count = item.max_nodes
    tokens = tuple(at if at < 2 else at + 20 * drafter for at in range(count))
    known = item.start + len(item.tokens)
    return Proposal(item.request_id, known, tokens, tuple(range(-1, count - 1)), (-0.25,) * count)


def chain_of(item: TargetItem) -> tuple[int, ...]:
    """The first child, its first child, and so on."""
    path: list[int] = []
    for node, above in enumerate(item.tree_parents):
        if above == (path[-1] if path else -1):
            path.append(node)
    return tuple(path)


def answer(work: Work) -> Event | None:
    """Accepts the first half of every chain; token values carry no meaning."""
    if isinstance(work, GrowDrafts):
        made = tuple(guesses(item, work.drafter) for item in work.items)
        return DraftDone(work.round, made, (2e-5, 2e-3)[work.drafter], work.drafter)
    if isinstance(work, RunTarget):
        verdicts = []
        size = sum(len(item.tokens) + len(item.tree_tokens) for item in work.items)
        for item in work.items:
            path = chain_of(item)
            path = path[: len(path) // 2]
            tokens = (*(item.tree_tokens[node] for node in path), 999)
            if item.sample:
                verdicts.append(Verdict(item.request_id, path, tokens))
        return StepDone(work.step, tuple(verdicts), 7e-3 + 2e-5 * size)
    return None


def run(batch: int, draft: int, prompt: int, output: int, *, combined: bool) -> list[float]:
    """Seconds of `handle` per request and step, one value per decode step with a full batch."""
    drafters = (DrafterNeeds("cheap"), DrafterNeeds("dear"))[: 1 + combined]
    core = EngineCore(
        CoreConfig(
            limits=Limits(
                context_length=prompt + output + 1,
                num_slots=batch * (prompt + output + draft + 1),
                max_num_seqs=batch,
                max_batch_tokens=max(2048, batch * (draft + 1)),
            ),
            vocab_size=1000,
            drafting=DraftPolicy(drafters if draft else (), FixedLength(draft), planned=combined),
        )
    )
    pending: deque[Work] = deque()
    for index in range(batch):
        ids = tuple((index * 7 + at) % 1000 for at in range(prompt))
        arrival = RequestArrived(f"r{index}", ids, SamplingParams(max_tokens=output).resolved())
        pending.extend(core.handle(arrival, 0.0))
    now = 0.0
    costs: list[float] = []
    spent = 0.0
    while pending:
        event = answer(pending.popleft())
        if event is None:
            continue
        now += getattr(event, "seconds", 0.0)
        started = time.thread_time()
        pending.extend(core.handle(event, now))
        core.take_outputs()
        spent += time.thread_time() - started
        if isinstance(event, StepDone):
            if len(event.verdicts) == batch:
                costs.append(spent / batch)
            spent = 0.0
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--draft", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--combined", action="store_true")
    args = parser.parse_args()
    medians, worst = [], []
    for _ in range(args.repeats):
        costs = run(args.batch, args.draft, args.prompt, args.output, combined=args.combined)
        medians.append(statistics.median(costs) * 1e6)
        worst.append(statistics.quantiles(costs, n=100)[98] * 1e6)
    report = {
        "batch": args.batch,
        "draft": args.draft,
        "handle_us_per_request_and_step": round(statistics.median(medians), 2),
        "p99_us": round(statistics.median(worst), 2),
    }
    if args.combined:
        plain = run(args.batch, 0, args.prompt, args.output, combined=False)
        report["without_drafters_us"] = round(statistics.median(plain) * 1e6, 2)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
