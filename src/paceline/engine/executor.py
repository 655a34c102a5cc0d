"""Runs the core's work in this process."""

from __future__ import annotations

import logging

from paceline.core.work import (
    AdvanceDrafts,
    DraftDone,
    DrafterLost,
    Event,
    GrowDrafts,
    Proposal,
    Release,
    RunTarget,
    Work,
)
from paceline.drafters.base import Drafter, plain
from paceline.execution.target import TargetExecutor

logger = logging.getLogger(__name__)


class LocalExecutor:
    """Target and drafter in turn on the calling thread."""

    def __init__(self, target: TargetExecutor, drafter: Drafter | None) -> None:
        self._target = target
        self._drafter = drafter

    def run(self, work: Work) -> Event | None:
        """The event that answers `work`, if it is of a kind that is answered."""
        if isinstance(work, RunTarget):
            return self._target.run(work)
        if isinstance(work, Release):
            self._target.release(work.request_ids)
        return self._run_drafter(work)

    def _run_drafter(self, work: GrowDrafts | AdvanceDrafts | Release) -> Event | None:
        if self._drafter is None:
            return None
        try:
            match work:
                case GrowDrafts():
                    proposals = tuple(self._drafter.grow(work.items))
                    if not all(isinstance(proposal, Proposal) for proposal in proposals):
                        raise TypeError("grow must return Proposals")
                    return DraftDone(work.round, tuple(filter(None, map(plain, proposals))))
                case AdvanceDrafts():
                    self._drafter.advance(work.items)
                case Release():
                    self._drafter.release(work.request_ids)
        except Exception as error:
            # Whatever a drafter does, decoding goes on without it: the output is the target's own.
            logger.exception("the drafter failed; decoding goes on without speculation")
            self._drafter = None
            return DrafterLost(f"{type(error).__name__}: {error}")
        return None
