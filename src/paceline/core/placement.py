"""Where and when draft and target run. Modes differ here and nowhere else."""

from __future__ import annotations

from typing import Protocol

from paceline.core.work import Work


class Lanes(Protocol):
    """What a placement may see and ask of the core."""

    @property
    def draft_busy(self) -> bool: ...

    @property
    def target_busy(self) -> bool: ...

    def plan_drafts(self) -> list[Work]:
        """A draft round for the requests that decode and have no proposal yet; empty if none wants one."""
        ...

    def plan_target(self) -> list[Work]:
        """The next target pass; empty when no request can take part."""
        ...


class Placement(Protocol):
    def next_work(self, lanes: Lanes) -> list[Work]: ...


class SerialPlacement:
    """Draft, then verify, in turn."""

    def next_work(self, lanes: Lanes) -> list[Work]:
        if lanes.draft_busy or lanes.target_busy:
            return []
        return lanes.plan_drafts() or lanes.plan_target()
