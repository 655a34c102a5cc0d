"""Which split of eight GPUs for SwiftSpec's pair, Qwen2-72B with its small draft? (ASPLOS 2026, table 9)

Every split is simulated with one request at a time, along texts on which a drafter of the paper's acceptance
is made up (`sim/papers/swiftspec.py`). Pass times are a roofline of H800s whose exchanges between ranks are
set so that it comes near the paper's passes: 10.48 ms on six devices, 10.34 on eight, 3.25 and 3.73 for the
draft's on two and eight. The paper tried even degrees only, and so does this.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from paceline.sim.costs.hardware import gpu_named, shape_of
from paceline.sim.costs.roofline import efficiency_of
from paceline.sim.papers.swiftspec import DRAFTER, records, texts
from paceline.sim.plan.candidates import Candidate, DrafterOption, Placed, Space, candidates
from paceline.sim.plan.machines import Gpus
from paceline.sim.plan.search import ROUNDS, lead, search
from paceline.sim.plan.world import Effort, Objective, Workload, World

# A pass of 80 layers is nearly the same on 4, 6 and 8 devices: what is fixed lies in the exchanges.
_REACHED = {"exchange_s": 48e-6, "step_s": 0.0, "draft_s": 0.0, "draft_layer_s": 12e-6}
_EVEN = (2, 4, 6, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draft", default="qwen2-1.5b", help="its shape")
    parser.add_argument("--target", default="qwen2-72b")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--message-us", type=float, default=20.0)
    asked = parser.parse_args()
    machine = Gpus(
        gpu_named("H800"),
        8,
        shape_of(asked.target),
        {DRAFTER: shape_of(asked.draft)},
        weight_bits=4.25,
        efficiency=efficiency_of(_REACHED),
        target_ranks=_EVEN,
        draft_ranks=_EVEN,
        padded=True,
        message_s=asked.message_us * 1e-6,
    )
    along = tuple(records(texts(asked.requests, 200), 0))
    world = World(Workload(along, concurrency=1), machine, Objective(), {DRAFTER: True})
    _passes(machine)
    space = Space(lengths=(3, 7, None), chunks=(2048,), combined=False)
    most = world.most_context
    drafter = DrafterOption(DRAFTER, "model", trees=True)
    ways = candidates(space, [drafter], machine.alone(most), machine.together(most))
    _splits(world, ways, asked.requests)
    found = search(world, space, ways, rounds=ROUNDS)
    print(f"\nrecommended: {found.best.candidate}: {found.best.value:.0f} tokens/s")
    for each in (*found.ranked[1:4], found.plain):
        ahead = lead(found.best, each)
        noise = "within noise" if ahead.within_noise else "more than noise"
        print(f"  {each.candidate}: {each.value:.0f}, {ahead.ratio:.3f} times less, {noise}")


def _passes(machine: Gpus) -> None:
    print("ms of a pass of 8 tokens, 500 of context:")
    for target, draft in ((8, 8), (6, 2), (4, 4), (2, 6)):
        each = Candidate((DRAFTER,), placed=Placed(target, draft, apart=target + draft <= 8))
        costs = machine.costs(each)
        verify = costs.target.seconds(8, 500, 1)
        level = costs.draft(DRAFTER).seconds(1, 1, 8, 8, 500)
        print(f"  target on {target}: {verify * 1e3:.2f}, draft on {draft}: {level * 1e3:.2f}")


def _splits(world: World, ways: Sequence[Candidate], requests: int) -> None:
    """The best of each split, published protocol and ours."""
    effort = Effort(requests, requests, 1.0, (1, 1))
    best: dict[tuple[str, Placed], float] = {}
    for each in ways:
        placed = each.placed
        if each.plain or placed.shares is not None or placed.devices * placed.replicas > 8:
            continue
        key = each.mode, replace(placed, replicas=1)
        best[key] = max(best.get(key, 0.0), world.value(each, 0, effort))
    print("\ntokens/s of one request:")
    for (mode, placed), rate in sorted(best.items(), key=lambda pair: -pair[1]):
        where = (
            f"{placed.target} + {placed.draft}"
            if placed.apart
            else f"{placed.target}, draft on {placed.draft}"
        )
        print(f"  {rate:6.1f}  {mode:<14} {where}")


if __name__ == "__main__":
    main()
