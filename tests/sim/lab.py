"""Small workloads and costs for tests of the simulator."""

from __future__ import annotations

import random
from collections.abc import Sequence

from paceline.config import SpeculationConfig
from paceline.core.draft_lane import DraftPolicy
from paceline.core.drafting import FixedLength
from paceline.core.engine_core import CoreConfig
from paceline.core.growth import BestFirst, GrowthRule
from paceline.core.placement import OverlappedPlacement, SerialPlacement
from paceline.core.scheduler import Limits
from paceline.sim.acceptance import DrafterTrace, RequestTrace
from paceline.sim.costs.forms import LinearDraft, LinearPass
from paceline.sim.costs.model import CostModel
from paceline.sim.run.drafters import PricedRecord, RecordedDrafter, RecordedTree, SimDrafter, model_free
from paceline.sim.run.requests import VOCAB_SIZE, SimRequest

COSTS = CostModel(
    target=LinearPass(fixed_s=5e-3, per_token_s=2e-5, per_kv_token_s=4e-8),
    drafts={
        "ngram": LinearDraft(fixed_s=4e-5),
        "suffix": LinearDraft(fixed_s=6e-5, per_guess_s=1e-6),
        "head": LinearDraft(fixed_s=1e-4, per_level_s=7e-4, per_unread_s=1e-6),
        "tree": LinearDraft(per_level_s=1e-3, per_unread_s=1e-6),
    },
    step_overhead_s=1e-3,
    request_overhead_s=1e-5,
    switch_s=2e-5,
    message_s=1e-4,
)


def record(number: int = 0, prompt: int = 24, output: int = 40, *, top: bool = False) -> RequestTrace:
    """A text that repeats itself here and there, and heads that guess some of it."""
    chance = random.Random(number)
    words = [[chance.randrange(100) for _ in range(chance.randint(2, 6))] for _ in range(6)]
    text: list[int] = []
    while len(text) < prompt + output:
        text += chance.choice(words) if chance.random() < 0.7 else [chance.randrange(100)]
    written = tuple(text[prompt : prompt + output])
    accepted = [1, *(1 + min(chance.choice((0, 1, 1, 2, 3, 6)), output - at) for at in range(1, output))]
    tops = tuple(
        tuple((each, -0.1 - rank) for rank, each in enumerate(dict.fromkeys((token, 101, 102, 103))))
        for token in written
    )
    drafters = {
        "head": DrafterTrace(tuple(accepted)),
        "tree": DrafterTrace(tuple(accepted), None, tops if top else None),
    }
    return RequestTrace(f"t{number}", tuple(text[:prompt]), written, drafters)


def request(number: int, arrival_s: float = 0.0, prompt: int = 24, output: int = 40) -> SimRequest:
    trace = record(number, prompt, output, top=True)
    return SimRequest(f"r{number}", arrival_s, trace.prompt, trace.output, trace)


def drafter(name: str, *, rule: GrowthRule | None = None, thrifty: bool = False) -> SimDrafter:
    options = SpeculationConfig(prompt_lookup_min=2, prompt_lookup_max=4)
    free = model_free(name, options, COSTS.draft(name))
    if free is not None:
        return free
    if name == "tree":
        return RecordedTree(name, COSTS.draft(name), rule or BestFirst(4, 2), thrifty=thrifty)
    return PricedRecord(RecordedDrafter(name), COSTS.draft(name))


def core(
    drafters: Sequence[SimDrafter] = (),
    guesses: int = 4,
    *,
    planned: bool = False,
    overlapped: bool = False,
    limits: Limits | None = None,
    lookup: tuple[int, int] | None = None,
) -> CoreConfig:
    return CoreConfig(
        limits=limits or Limits(4096, 2**16, 16, 512),
        vocab_size=VOCAB_SIZE,
        drafting=DraftPolicy(
            tuple(each.needs for each in drafters), FixedLength(guesses), lookup=lookup, planned=planned
        ),
        placement=OverlappedPlacement() if overlapped else SerialPlacement(),
    )
