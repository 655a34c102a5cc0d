"""A draft worker's service for drafters that read hidden states of the target."""

from __future__ import annotations

from paceline.core.work import DraftDone
from paceline.drafters import service
from paceline.drafters.features import FeatureDrafter
from paceline.drafters.service import is_long, merged
from paceline.engine.draft_messages import TargetFeatures
from paceline.engine.feature_feed import tensor_of

DraftWork = service.DraftWork | TargetFeatures


class DraftService(service.DraftService):
    """Takes in what the target sends of itself, too."""

    def apply(self, work: DraftWork) -> DraftDone | None:
        if not isinstance(work, TargetFeatures):
            return super().apply(work)
        started = self._clock()
        if isinstance(self._drafter, FeatureDrafter):
            self._drafter.take_features(work.request_id, work.generation, work.start, tensor_of(work))
        self._look_again()
        self._count(started, guessed=False)
        return None


__all__ = ["DraftService", "DraftWork", "is_long", "merged"]
