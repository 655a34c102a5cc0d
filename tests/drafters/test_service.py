"""What a worker does between messages, without worker or socket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.core.drafting import DrafterNeeds
from paceline.core.mirror import DraftMirror
from paceline.core.token_tree import TokenTree
from paceline.core.work import AdvanceDrafts, DraftItem, GrowDrafts, Proposal, Release
from paceline.drafters.base import AheadDrafter, Drafter
from paceline.drafters.service import DraftService, StreamedProposals, merged
from paceline.engine.draft_messages import FOR_ENGINE, Codec
from tests.cases.drafters import RuleDrafter
from tests.core.toy import VOCAB
from tests.engine.draft_toys import (
    Spoiled,
    ToyAhead,
    advance_of,
    guesses,
    mostly_right,
    slow_reader_in_passes,
    spec,
)


def item(start: int, tokens: Sequence[int], bound: int = 4, name: str = "a") -> DraftItem:
    return DraftItem(name, start, tuple(tokens), bound, bound, None, 1)


FIRST = advance_of("a", [1, 2, 3])


def test_toys_are_what_they_stand_for() -> None:
    assert isinstance(ToyAhead(), AheadDrafter)
    assert not isinstance(mostly_right(spec()), AheadDrafter)
    assert isinstance(StreamedProposals(mostly_right(spec())), AheadDrafter)


def test_streaming_goes_on_until_nothing_is_left_and_again_after_a_message() -> None:
    service = DraftService(ToyAhead(), "stream")
    assert not service.wants_work
    assert service.work_ahead() is None
    service.apply(FIRST)
    made = []
    while service.wants_work:
        made.append(service.work_ahead())
    assert made.pop() is None, "the drafter said that it is done"
    assert [nodes.grown[0].first for nodes in made if nodes] == list(range(8))
    assert all(nodes.seconds >= 0 for nodes in made if nodes)
    service.apply(AdvanceDrafts((item(3, guesses([1, 2, 3], 1), bound=9),)))
    assert service.wants_work
    assert service.work_ahead() is not None


def test_the_published_schedule_works_ahead_so_many_passes_after_each_answer() -> None:
    drafter = ToyAhead(reserve=9)
    service = DraftService(drafter, "silent", ahead_passes=3)
    service.apply(FIRST)
    assert not service.wants_work, "nothing was asked yet"
    for number in (1, 2):
        done = service.apply(GrowDrafts(number, (item(3, ()),)))
        assert done is not None
        assert done.round == number
        before = drafter.passes
        while service.wants_work:
            assert service.work_ahead() is None, "nodes are kept"
        assert drafter.passes == before + 3
    assert service.busy_s > 0


@pytest.mark.parametrize("drafter", [ToyAhead(), mostly_right(spec())])
def test_off_is_off(drafter: Drafter) -> None:
    service = DraftService(drafter, "off", ahead_passes=3)
    service.apply(FIRST)
    done = service.apply(GrowDrafts(5, (item(3, ()),)))
    assert done is not None
    assert done.proposals[0].tokens == tuple(guesses([1, 2, 3], 4))
    assert not service.wants_work


def test_only_passes_that_guess_say_how_long_a_pass_may_take() -> None:
    service = DraftService(slow_reader_in_passes(spec()), "stream")
    service.apply(FIRST)
    assert not service.settled
    service.work_ahead()
    assert service.settled
    service.apply(advance_of("long", [1] * 200))
    while not service.settled:
        assert service.slowest_s < 0.5
        service.work_ahead()
    while service.wants_work:
        service.work_ahead()
    assert 0 < service.slowest_s < 0.5


def test_reset_forgets_every_request() -> None:
    drafter = ToyAhead()
    service = DraftService(drafter, "stream")
    service.apply(FIRST)
    service.apply(advance_of("b", [4]))
    service.apply(Release(("b", "never heard of")))
    service.reset()
    assert drafter.texts == {}
    assert not service.wants_work
    service.apply(FIRST)


def test_what_a_drafter_returns_is_checked() -> None:
    class Odd(ToyAhead):
        def grow(self, items: Sequence[DraftItem]) -> list[Proposal]:  # noqa: ARG002
            return ["guesses"]  # type: ignore[list-item]

    service = DraftService(Odd())
    with pytest.raises(TypeError, match="Proposals"):
        service.apply(GrowDrafts(1, ()))


# ---------------------------------------------------------------- answers made into a stream


def test_a_stream_of_answers_fits_the_engines_copy() -> None:
    """Numbers go on within an announcement and begin anew with the next, as a mirror expects."""
    service = DraftService(mostly_right(spec()), "stream")
    service.apply(FIRST)
    known = [1, 2, 3]
    mirror = DraftMirror(1, len(known))
    for _ in range(3):
        nodes = service.work_ahead()
        assert nodes is not None
        assert mirror.extend(nodes.grown[0], VOCAB) == len(nodes.grown[0].tokens)
        assert mirror.tree.best_path(mirror.root, 8) == guesses(known, 8)
        token = guesses(known, 1)[0]
        service.apply(AdvanceDrafts((item(len(known), [token], bound=8),)))
        known.append(token)
        mirror.commit([token])
    service.apply(advance_of("a", known, generation=2))
    again = service.work_ahead()
    assert again is not None
    assert (again.grown[0].first, again.grown[0].generation) == (0, 2)
    assert again.grown[0].parents == (-6, 0, 1, 2, 3, 4, 5, 6)


def test_trees_keep_their_shape_in_a_stream() -> None:
    tree = TokenTree.build([1, 2, 3], [-1, -1, 0], [-0.1, -0.2, -0.3])
    service = DraftService(RuleDrafter(lambda *_: tree), "stream")
    service.apply(FIRST)
    service.work_ahead()
    service.apply(AdvanceDrafts((item(3, [9]),)))
    nodes = service.work_ahead()
    assert nodes is not None
    assert nodes.grown[0].parents == (-4, -4, 3)
    assert nodes.grown[0].scores == (-0.1, -0.2, -0.3)


def test_tokens_that_wait_for_a_moment_are_not_forgotten() -> None:
    drafter = RuleDrafter(lambda known, nodes, depth: TokenTree.chain(guesses(known, min(nodes, depth))))
    service = DraftService(drafter, "stream")
    service.apply(FIRST)
    service.apply(AdvanceDrafts((item(3, [4, 5]),)))
    service.apply(AdvanceDrafts((item(5, [6], bound=0),)))
    assert drafter._states == {"a": [1, 2, 3, 4, 5, 6]}
    assert service.work_ahead() is None, "the newest bound is none"
    service.apply(AdvanceDrafts((item(6, [7]),)))
    done = service.apply(GrowDrafts(1, (item(7, [8]),)))
    assert done is not None
    assert done.proposals[0].tokens == tuple(guesses([1, 2, 3, 4, 5, 6, 7, 8], 4))
    assert service.work_ahead() is None
    service.apply(AdvanceDrafts((item(8, [9]),)))
    service.apply(Release(("a",)))
    assert service.work_ahead() is None
    assert drafter.asked == [(8, 4)]


def test_an_error_in_an_answer_is_no_node() -> None:
    class Failing(RuleDrafter):
        needs = DrafterNeeds("failing")

    def rule(*_: object) -> TokenTree:
        raise ValueError("no idea")

    service = DraftService(Failing(rule), "stream")
    service.apply(FIRST)
    assert service.work_ahead() is None


# ---------------------------------------------------------------- what a worker that fell behind reads


def test_neighbouring_advances_become_one() -> None:
    other = advance_of("b", [7])
    work = merged([FIRST, AdvanceDrafts((item(3, [4]),)), other, AdvanceDrafts((item(4, [5, 6], bound=2),))])
    assert work == [
        AdvanceDrafts(
            (
                other.items[0],
                replace(FIRST.items[0], tokens=(1, 2, 3, 4, 5, 6), max_nodes=2, max_depth=2),
            )
        )
    ]


def test_what_is_announced_anew_replaces_what_was_known() -> None:
    again = advance_of("a", [1, 2], generation=2)
    assert merged([FIRST, again]) == [again]


def test_order_is_kept_around_everything_else() -> None:
    release, grow = Release(("a",)), GrowDrafts(1, (item(3, [4]),))
    late = AdvanceDrafts((item(4, [5]),))
    assert merged([FIRST, release, FIRST, grow, late]) == [FIRST, release, FIRST, grow, late]


def test_a_drafter_that_only_answers_is_not_asked_for_more_than_can_be_verified() -> None:
    """What it sends ahead fits a message, however long the request may get."""
    asked: list[int] = []

    def note(known: Sequence[int], nodes: int, depth: int) -> TokenTree:  # noqa: ARG001
        asked.append(nodes)
        return TokenTree.chain([1])

    service = DraftService(RuleDrafter(note), "stream")
    service.apply(advance_of("a", [1, 2, 3], max_nodes=100_000, max_depth=100_000))
    service.work_ahead()
    assert asked == [256]


def test_a_score_of_minus_infinity_is_sent_as_a_number() -> None:
    """A candidate that is out of the question costs nobody his place."""
    drafter = Spoiled(lambda nodes: [replace(nodes, scores=(float("-inf"),))])
    service = DraftService(drafter, "stream")
    service.apply(advance_of("a", [1, 2, 3]))
    sent = service.work_ahead()
    assert sent is not None
    codec = Codec(FOR_ENGINE)
    assert codec.decode(codec.encode(sent, 1))[2] == sent
    assert sent.grown[0].scores[0] < -1e20
