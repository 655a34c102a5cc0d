"""Hidden states on their way to a draft worker: each once, in order, after what they are of was computed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.core.params import SamplingParams
from paceline.core.work import AdvanceDrafts, Announcement, DraftItem, RunTarget, TargetItem
from paceline.drafters.features import ReceivedFeatures
from paceline.engine import feature_feed
from paceline.engine.draft_messages import FOR_WORKER, Codec, Malformed, TargetFeatures
from paceline.engine.draft_service import merged
from paceline.engine.feature_feed import FeatureFeed, tensor_of
from paceline.execution.target_view import Span


class View:
    """One request's features are its positions."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.reached, self.dtype = 0, dtype

    def computed(self, request_id: str) -> int:  # noqa: ARG002
        return self.reached

    def features(self, spans: Sequence[Span]) -> Tensor:
        ((_, start, end),) = spans
        if end > self.reached:
            raise ValueError
        rows = torch.arange(start, end, dtype=self.dtype)
        return rows[:, None, None].expand(-1, 2, 3) + torch.zeros(2, 3, dtype=self.dtype)


def told(generation: int, *, announced: bool = True) -> AdvanceDrafts:
    announcement = Announcement(3, SamplingParams().resolved()) if announced else None
    return AdvanceDrafts((DraftItem("r", 0, (1, 2, 3), 4, 4, announcement, generation),))


PASS = RunTarget(1, (TargetItem("r", 0, 0, (1,), 0, (0,), True),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_position_is_sent_once_and_comes_as_it_was(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_feed, "FEATURE_BYTES", 100)
    view, codec, received = View(dtype), Codec(FOR_WORKER), ReceivedFeatures()
    feed = FeatureFeed(view)  # type: ignore[arg-type]
    messages = list(feed.before(told(7)))
    assert not messages, "nothing is computed"
    for reached in (9, 9, 12):
        view.reached = reached
        assert not list(feed.after_pass()), "a pass is under way"
        feed.reached(PASS)
        messages += feed.after_pass()
    assert len(messages) > 2, "a message is no larger than it may be"
    for message in messages:
        _, _, copy = codec.decode(codec.encode(message, 1))
        received.take(copy.request_id, copy.generation, copy.start, tensor_of(copy))
    assert received.computed("r") == 12
    assert torch.equal(received.features([("r", 0, 12)]), view.features([("r", 0, 12)]))


def test_a_new_announcement_begins_anew() -> None:
    view, received = View(), ReceivedFeatures()
    feed = FeatureFeed(view)  # type: ignore[arg-type]
    view.reached = 5
    feed.reached(PASS)
    (first,) = feed.before(told(1))
    feed.forget_announcements()
    assert not list(feed.after_pass())
    (again,) = feed.before(told(2))
    assert (first.start, again.start, again.generation) == (0, 0, 2)
    for message in (first, again):
        received.take("r", message.generation, message.start, tensor_of(message))
    received.forget("r", 1)
    assert received.computed("r") == 5
    received.forget("r", 2)
    assert received.computed("r") == 0


def test_what_the_target_cannot_show_now_is_sent_later() -> None:
    view = View()
    feed = FeatureFeed(view)  # type: ignore[arg-type]
    list(feed.before(told(1)))
    view.reached = 5
    feed.reached(PASS)
    view.reached = 0
    assert not list(feed.after_pass())
    view.reached = 6
    assert [message.shape[0] for message in feed.after_pass()] == [5]
    feed.forget(["r"])
    assert not list(feed.after_pass())


def test_a_gap_is_noticed() -> None:
    received = ReceivedFeatures()
    received.take("r", 1, 0, torch.zeros(3, 2, 3))
    with pytest.raises(ValueError, match="start at 4, expected 3"):
        received.take("r", 1, 4, torch.zeros(3, 2, 3))


def test_position_0_begins_anew() -> None:
    """Of an engine that was lost before it announced the request, another may use the same ids."""
    received = ReceivedFeatures()
    received.take("r", 1, 0, torch.zeros(3, 2, 3))
    received.take("r", 1, 0, torch.ones(2, 2, 3))
    assert received.computed("r") == 2
    assert received.features([("r", 0, 2)]).eq(1).all()


def test_features_of_another_size_than_they_say_are_malformed() -> None:
    codec = Codec(FOR_WORKER)
    for shape, size in (((1, 2, 3), 23), ((1, 0, 3), 0), ((-1, 2, 3), 24)):
        wrong = TargetFeatures("r", 1, 0, "float32", shape, b"x" * size)
        with pytest.raises(Malformed, match="features of shape"):
            codec.decode(codec.encode(wrong, 1))


def test_features_do_not_keep_what_is_told_apart() -> None:
    news = TargetFeatures("r", 1, 0, "float32", (1, 1, 1), b"1234")
    first, second = told(1), AdvanceDrafts((DraftItem("r", 3, (4,), 4, 4, None, 1),))
    features, whole = merged([first, news, second])
    assert features is news
    assert isinstance(whole, AdvanceDrafts)
    assert whole.items[0].tokens == (1, 2, 3, 4)
    assert merged([news]) == [news]


def test_what_came_of_several_requests_is_read_at_once() -> None:
    received = ReceivedFeatures()
    for name, value in (("a", 1.0), ("b", 2.0)):
        received.take(name, 0, 0, torch.full((3, 2, 4), value))
    both = received.features([("b", 1, 3), ("a", 0, 1)])
    assert both[:, 0, 0].tolist() == [2.0, 2.0, 1.0]
