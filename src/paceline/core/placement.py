"""Where and when draft and target run. Modes differ here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.core.work import WaitUntil, Work


class Lanes(Protocol):
    """What a placement may see and ask of the core."""

    @property
    def draft_busy(self) -> bool: ...

    @property
    def target_busy(self) -> bool: ...

    def plan_drafts(self) -> list[Work]:
        """A draft round for the requests that decode and have no proposal yet; empty if none wants one."""
        ...

    def follow_drafts(self, now: float) -> list[Work]:
        """Tells a drafter that works ahead what it has not seen."""
        ...

    def propose(self, now: float) -> float:
        """Lets the requests that decode have the best guesses there are at this moment; when the target
        should take them if no better ones come."""
        ...

    def plan_target(self, *, follow_prefill: bool) -> list[Work]:
        """The next target pass; empty when no request can take part. follow_prefill: tell the drafter of
        the chunks of prompts in it."""
        ...


class Placement(Protocol):
    def next_work(self, lanes: Lanes, now: float) -> list[Work]: ...


@dataclass(frozen=True, slots=True)
class SerialPlacement:
    """Draft, then verify, in turn. A drafter that works ahead may do so while the target is busy, and then
    answers from what it has: SwiftSpec as published, which meets once per round (Algorithm 1)."""

    def next_work(self, lanes: Lanes, now: float) -> list[Work]:  # noqa: ARG002 - waits for answers only
        if lanes.draft_busy or lanes.target_busy:
            return []
        return lanes.plan_drafts() or lanes.plan_target(follow_prefill=True)


@dataclass(frozen=True, slots=True)
class OverlappedPlacement:
    """Draft and target at the same time: the target takes what guesses there are when it is free, and the
    drafter learns of the verdict meanwhile. Nothing waits for the drafter, but where a moment's wait pays."""

    def next_work(self, lanes: Lanes, now: float) -> list[Work]:
        work = lanes.follow_drafts(now)
        if lanes.target_busy:
            return work
        start = lanes.propose(now)
        if start > now:
            return [*work, WaitUntil(start)]
        return work + lanes.plan_target(follow_prefill=False)
