"""Draft trees and their mirrors at the two ends of a slow wire, under every order of messages."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.draft_lane import DraftPolicy
from paceline.core.drafting import DrafterNeeds, FixedLength
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.growth import BestFirst, Calibrated, Chain, FixedShape, GrowthRule, Layers
from paceline.core.placement import OverlappedPlacement
from paceline.core.scheduler import Limits
from paceline.core.work import AdvanceDrafts, NodesDrafted, Release
from paceline.drafters.tree_drafter import Candidates, DraftSequence, Leaf, TreeDrafter
from tests.core.streaming import OverlappedDrive
from tests.core.test_engine_core import assert_no_leak
from tests.core.toy import VOCAB, toy_generate, toy_next

RULES: dict[str, GrowthRule] = {
    "chain": Chain(9),
    "fixed-shape": FixedShape((2, 2, 1, 1)),
    "best-first": BestFirst(4, candidates=4),
    "layers": Layers(3, 9, candidates=3),
    "calibrated": Calibrated(4, candidates=4),
}


class ToyCandidates:
    """The target's own token at a rank that is mostly the first; always the same after the same text."""

    needs = DrafterNeeds("toy", context_length=90, ingests_prompts=True)

    def problem(self, sequence: DraftSequence) -> str | None:
        return "too long" if len(sequence.tokens) > 90 else None

    def moved(self, sequence: DraftSequence, accepted: Sequence[int], place: dict[int, int]) -> None:
        """Nothing is held."""

    def advance(self, sequences: Sequence[DraftSequence]) -> bool:  # noqa: ARG002
        return False

    def expand(self, leaves: Sequence[Leaf]) -> list[Candidates | None]:
        return [
            self._after([*leaf.sequence.tokens, *leaf.sequence.path_tokens(leaf.node)], leaf.count)
            for leaf in leaves
        ]

    def _after(self, text: list[int], count: int) -> Candidates:
        right, rng = toy_next(text), random.Random(repr(text))
        tokens = rng.sample([token for token in range(VOCAB) if token != right], count)
        tokens[min(int(rng.expovariate(1.5)), count - 1)] = right
        return Candidates(tokens, [-0.4 - 1.5 * rank for rank in range(count)])

    def forget(self, sequence: DraftSequence) -> None:
        """Nothing is held."""


class TreeAtTheOtherEnd:
    """A `TreeDrafter` where the drive expects a drafter of its own."""

    def __init__(self, rng: random.Random, rule: GrowthRule) -> None:
        self._drafter = TreeDrafter(
            ToyCandidates(),
            rule,
            keep_tree=rng.random() < 0.8,
            pass_leaves=rng.choice([3, 64]),
            most_nodes=40,
        )
        self._known: set[str] = set()

    def take_in(self, work: AdvanceDrafts | Release) -> None:
        if isinstance(work, Release):
            self._drafter.release(work.request_ids)
        else:
            self._known |= {item.request_id for item in work.items}
            self._drafter.advance(work.items)

    def draft(self) -> NodesDrafted | None:
        grown = self._drafter.work_ahead()
        return NodesDrafted(tuple(grown), 0.001) if grown else None

    def forget(self) -> None:
        self._drafter.release(self._known)


def make_drive(seed: int, rule: GrowthRule, pace: int) -> OverlappedDrive:
    rng = random.Random(seed)
    core = EngineCore(
        CoreConfig(
            limits=Limits(
                context_length=100, num_slots=rng.choice([90, 400]), max_num_seqs=3, max_batch_tokens=40
            ),
            vocab_size=VOCAB,
            drafting=DraftPolicy((ToyCandidates.needs,), FixedLength(4)),
            placement=OverlappedPlacement(),
        )
    )
    drive = OverlappedDrive(core, rng, pace=pace)
    drive.drafter = TreeAtTheOtherEnd(rng, rule)  # type: ignore[assignment]
    return drive


def prompts(count: int) -> dict[str, list[int]]:
    return {f"r{i}": [(i * 5 + at) % VOCAB for at in range(3 + 7 * i)] for i in range(count)}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(sorted(RULES)), st.sampled_from([1, 4, 12]))
def test_the_output_is_the_targets_own_and_no_message_is_out_of_step(seed: int, name: str, pace: int) -> None:
    drive = make_drive(seed, RULES[name], pace)
    texts = prompts(5)
    for request, prompt in texts.items():
        drive.arrive(request, prompt, max_tokens=40)
        for _ in range(drive.rng.randrange(30)):
            drive.step()
        if drive.rng.random() < 0.2:
            drive.lose_drafter()
            drive.step()
            drive.find_drafter()
    drive.run()
    for request, prompt in texts.items():
        assert drive.tokens[request] == toy_generate(prompt, 40)
    assert drive.core.speculation.num_failed_drafts == 0
    assert_no_leak(drive.core)


@pytest.mark.parametrize("name", sorted(RULES))
def test_with_a_quick_drafter_most_verdicts_land_in_its_tree(name: str) -> None:
    """Also though it always hears of them late."""
    drive = make_drive(7, RULES[name], 12)
    for request, prompt in prompts(3).items():
        drive.arrive(request, prompt, max_tokens=60)
    drive.run()
    stats = drive.core.speculation
    landed = stats.num_hits + stats.num_leaf_hits
    assert landed > stats.num_misses * (0.8 if name == "chain" else 1.5)
    assert stats.num_hits > 0
    assert stats.mean_acceptance_length is not None
    assert stats.mean_acceptance_length > 1.5
