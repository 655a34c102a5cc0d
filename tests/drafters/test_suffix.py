"""What the suffix drafter offers, and from whom it learns."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.config import SuffixCache as Sharing
from paceline.core.params import SamplingParams
from paceline.core.suffix_cache import SuffixCache
from paceline.core.suffix_draft import SuffixRule
from paceline.core.work import Announcement, DraftItem, FinishedOutput, Proposal, Release
from paceline.drafters.base import LearningDrafter, released
from paceline.drafters.suffix import SuffixDrafter


def drafter(sharing: Sharing = "off", **rule: float) -> SuffixDrafter:
    cache = SuffixCache(24, 100, 2**20) if sharing != "off" else None
    return SuffixDrafter(SuffixRule(**rule), sharing=sharing, cache=cache)  # type: ignore[arg-type]


def ask(
    drafter: SuffixDrafter, tokens: list[int], *, tenant: str = "", name: str = "a", nodes: int = 8
) -> Proposal:
    told = Announcement(len(tokens), SamplingParams(tenant=tenant).resolved())
    (proposal,) = drafter.grow([DraftItem(name, 0, tuple(tokens), nodes, nodes, told)])
    assert proposal.error is None
    return proposal


def teach(drafter: SuffixDrafter, tokens: list[int], tenant: str = "") -> None:
    released(drafter, Release(("x",), (FinishedOutput(tuple(tokens), tenant),)))


def test_the_requests_own_text_is_looked_at_without_a_cache() -> None:
    own = drafter()
    assert not own.needs.learns_outputs
    found = ask(own, [1, 2, 3, 4, 5, 1, 2, 3])
    assert found.tokens == (4, 5, 1, 2, 3)
    assert found.scores[0] == pytest.approx(np.log(1 / 2))
    assert found.scores[1] == pytest.approx(0.0)


def test_what_is_committed_later_counts_too() -> None:
    own = drafter()
    ask(own, [1, 2, 3, 4])
    (found,) = own.grow([DraftItem("a", 4, (9, 1, 2, 3), 3, 3)])
    assert found.tokens == (4, 9, 1)
    assert found.num_tokens == 8


def test_requests_do_not_see_each_other() -> None:
    own = drafter("shared")
    ask(own, [1, 2, 3, 4], name="a")
    assert ask(own, [7, 1, 2], name="b").tokens == ()


def test_shared_outputs_are_everybodys() -> None:
    own = drafter("shared")
    teach(own, [1, 2, 3, 4], tenant="one")
    assert ask(own, [1, 2], tenant="other").tokens == (3, 4)
    assert ask(own, [1, 2]).tokens == (3, 4)


def test_a_tenants_outputs_are_its_own_and_nobodys_are_not_learnt() -> None:
    own = drafter("tenant")
    teach(own, [1, 2, 3, 4], tenant="one")
    teach(own, [1, 2, 9, 9])
    assert ask(own, [1, 2], tenant="one").tokens == (3, 4)
    assert ask(own, [1, 2], tenant="other").tokens == ()
    assert ask(own, [1, 2]).tokens == ()


def test_off_learns_from_nobody() -> None:
    own = drafter("off")
    teach(own, [1, 2, 3, 4])
    assert ask(own, [1, 2]).tokens == ()


def test_it_says_that_it_learns() -> None:
    assert isinstance(drafter(), LearningDrafter)
    assert drafter("tenant").needs.learns_outputs


def test_the_better_draft_wins_wherever_it_comes_from() -> None:
    own = drafter("shared", offset=0.0)
    teach(own, [5, 1, 2, 3, 3, 3])
    assert ask(own, [1, 2, 8, 5, 1, 2]).tokens[0] == 3, "three tokens of context against two"
    assert ask(own, [7, 5, 1, 2, 8, 0, 7, 5, 1, 2], name="b").tokens[0] == 8, "four against three"


@pytest.mark.parametrize("nodes", [0, 1, 4])
def test_it_keeps_within_what_is_asked_for(nodes: int) -> None:
    assert len(ask(drafter(factor=9.0), [1, 2, 1, 3, 1, 4, 1] * 3, nodes=nodes).tokens) == nodes


def test_a_forgotten_request_may_begin_again() -> None:
    own = drafter()
    ask(own, [1, 2, 1])
    own.release(["a", "unknown"])
    assert ask(own, [3, 4, 3]).tokens[0] == 4


def test_a_long_prompt_is_read_in_shares() -> None:
    """What has been read is found at once, the rest in later steps."""
    own = drafter()
    rng = np.random.default_rng(0)
    prompt = rng.permutation(20_000).tolist()
    early, late = prompt[100:110], prompt[18_000:18_010]
    assert ask(own, [*prompt, *early]).tokens[0] == prompt[110]
    at = len(prompt) + len(early)
    (found,) = own.grow([DraftItem("a", at, tuple(late), 4, 4)])
    assert found.tokens == ()
    for _ in range(12):
        (found,) = own.grow([DraftItem("a", at + len(late), (), 4, 4)])
    assert found.tokens[0] == prompt[18_010]


def test_unasked_it_streams_one_draft_for_what_it_was_told() -> None:
    """Nodes are numbered through, and hang below the committed token by its position."""
    own = drafter(offset=0.0)
    told = Announcement(5, SamplingParams().resolved())
    own.advance([DraftItem("a", 0, (1, 2, 3, 1, 2), 9, 9, told, 7), DraftItem("b", 0, (4,), 9, 9, told, 8)])
    grown = own.work_ahead()
    assert grown is not None
    first, nothing = grown
    assert (first.generation, first.num_tokens, first.first) == (7, 5, 0)
    assert (first.tokens, first.parents) == ((3, 1), (-5, 0))
    assert (nothing.request_id, nothing.tokens) == ("b", ())
    assert own.work_ahead() is None
    own.advance([DraftItem("a", 5, (3,), 9, 9, generation=7), DraftItem("b", 1, (5,), 9, 9, generation=8)])
    own.release(["b"])
    (second,) = own.work_ahead() or []
    assert (second.num_tokens, second.first, second.parents[:2]) == (6, 2, (-6, 2))
    assert second.tokens == (1, 2, 3)
