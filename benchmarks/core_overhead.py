"""What the policy itself costs: `EngineCore.handle` per request and step, without any model.

    python benchmarks/core_overhead.py --batch 64 --draft 5

A scripted executor answers at once: half of the guesses are accepted, prompts have 256 tokens.
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
    Event,
    GrowDrafts,
    Proposal,
    RequestArrived,
    RunTarget,
    StepDone,
    Verdict,
    Work,
)


def answer(work: Work) -> Event | None:
    """Accepts the first half of every chain; token values carry no meaning."""
    if isinstance(work, GrowDrafts):
        return DraftDone(
            work.round,
            tuple(
                Proposal(
                    item.request_id,
                    item.start + len(item.tokens),
                    tuple(range(item.max_nodes)),
                    tuple(range(-1, item.max_nodes - 1)),
                )
                for item in work.items
            ),
        )
    if isinstance(work, RunTarget):
        verdicts = []
        for item in work.items:
            accepted = len(item.tree_tokens) // 2
            if item.sample:
                verdicts.append(
                    Verdict(item.request_id, tuple(range(accepted)), (*item.tree_tokens[:accepted], 999))
                )
        return StepDone(work.step, tuple(verdicts))
    return None


def run(batch: int, draft: int, prompt: int, output: int) -> list[float]:
    """Seconds of `handle` per request and step, one value per decode step with a full batch."""
    core = EngineCore(
        CoreConfig(
            limits=Limits(
                context_length=prompt + output + 1,
                num_slots=batch * (prompt + output + draft + 1),
                max_num_seqs=batch,
                max_batch_tokens=max(2048, batch * (draft + 1)),
            ),
            vocab_size=1000,
            drafting=DraftPolicy((DrafterNeeds("scripted"),) if draft else (), FixedLength(draft)),
        )
    )
    pending: deque[Work] = deque()
    for index in range(batch):
        ids = tuple((index * 7 + at) % 1000 for at in range(prompt))
        arrival = RequestArrived(f"r{index}", ids, SamplingParams(max_tokens=output).resolved())
        pending.extend(core.handle(arrival, 0.0))
    costs: list[float] = []
    spent = 0.0
    while pending:
        event = answer(pending.popleft())
        if event is None:
            continue
        started = time.perf_counter()
        pending.extend(core.handle(event, 0.0))
        core.take_outputs()
        spent += time.perf_counter() - started
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
    args = parser.parse_args()
    medians, worst = [], []
    for _ in range(args.repeats):
        costs = run(args.batch, args.draft, args.prompt, args.output)
        medians.append(statistics.median(costs) * 1e6)
        worst.append(statistics.quantiles(costs, n=100)[98] * 1e6)
    report = {
        "batch": args.batch,
        "draft": args.draft,
        "handle_us_per_request_and_step": round(statistics.median(medians), 2),
        "p99_us": round(statistics.median(worst), 2),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
