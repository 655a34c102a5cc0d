"""The target's hidden states for a drafter in another process: which of them it has, which are to be sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from paceline.core.work import AdvanceDrafts, GrowDrafts, RunTarget
from paceline.engine.draft_messages import FEATURE_BYTES, TargetFeatures
from paceline.execution.target_view import TargetView


class FeatureFeed:
    """`reached` is told by the thread that runs the target, between two passes; all else is the engine's
    thread, which reads only what earlier passes have computed, whatever pass is under way."""

    def __init__(self, view: TargetView) -> None:
        self._view = view
        self._reached: dict[str, int] = {}
        self._sent: dict[str, tuple[int, int]] = {}  # of each announced request: generation, positions

    def reached(self, work: RunTarget) -> None:
        """This pass is over."""
        for item in work.items:
            self._reached[item.request_id] = self._view.computed(item.request_id)

    def before(self, work: GrowDrafts | AdvanceDrafts) -> Iterator[TargetFeatures]:
        """What the drafter should have when it is told of `work`."""
        for item in work.items:
            if item.announcement is not None:
                self._sent[item.request_id] = item.generation, 0
                yield from self._unsent(item.request_id)

    def after_pass(self) -> Iterator[TargetFeatures]:
        for request_id in list(self._sent):
            yield from self._unsent(request_id)

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._sent.pop(request_id, None)
            self._reached.pop(request_id, None)

    def forget_announcements(self) -> None:
        """The drafter is lost; the next is told of each request anew."""
        self._sent.clear()

    def _unsent(self, request_id: str) -> Iterator[TargetFeatures]:
        generation, start = self._sent[request_id]
        end = min(self._reached.get(request_id, 0), self._view.computed(request_id))
        if start >= end:
            return
        try:
            features = self._view.features([(request_id, start, end)])
        except ValueError:  # the target's thread has just taken these slots for another: after a later pass
            return
        self._sent[request_id] = generation, end
        most = max(1, FEATURE_BYTES // (features[0].numel() * features.element_size()))
        for first in range(0, end - start, most):
            yield _message(request_id, generation, start + first, features[first : first + most])


def _message(request_id: str, generation: int, start: int, features: Tensor) -> TargetFeatures:
    narrow = features.dtype == torch.bfloat16
    raw = features.detach().cpu().contiguous().view(torch.int16 if narrow else torch.int32)
    return TargetFeatures(
        request_id=request_id,
        generation=generation,
        start=start,
        dtype="bfloat16" if narrow else "float32",
        shape=(features.shape[0], features.shape[1], features.shape[2]),
        data=raw.numpy().tobytes(),
    )


def tensor_of(message: TargetFeatures) -> Tensor:
    dtype = torch.bfloat16 if message.dtype == "bfloat16" else torch.float32
    return torch.frombuffer(bytearray(message.data), dtype=dtype).view(message.shape)
