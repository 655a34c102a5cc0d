"""What a draft worker does with its drafter, message by message and pass by pass; no sockets, no process, and
no tensors (`engine.draft_service` takes in those)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal, TypeVar

from paceline.core.work import (
    AdvanceDrafts,
    DraftDone,
    DraftItem,
    DraftNodes,
    GrowDrafts,
    NodesDrafted,
    Proposal,
    Release,
)
from paceline.drafters.base import AheadDrafter, Drafter, plain, released

AheadMode = Literal["off", "stream", "silent"]
"""What a drafter does while nothing is asked of it: nothing, grow and send the nodes, or grow and keep them
until it is asked."""
DraftWork = GrowDrafts | AdvanceDrafts | Release

Message = TypeVar("Message")

_LONG_READ_TOKENS = 64
_LEAST_SCORE = -1e30
_MOST_DISTANCES = 64
_MOST_AHEAD = 256
"""Nodes that a drafter which only answers is asked for ahead: as many as one verification may hold."""


def proposals_of(drafter: Drafter, items: Sequence[DraftItem]) -> tuple[Proposal, ...]:
    """What `grow` answers, in plain types. Raises TypeError where it is something else than proposals."""
    proposals = list(drafter.grow(items))
    if not all(isinstance(proposal, Proposal) for proposal in proposals):
        raise TypeError("grow must return Proposals")
    return tuple(filter(None, map(plain, proposals)))


class DraftService:
    """Exceptions of the drafter pass through: whoever meets one has lost this drafter.

    slowest_s: longest of the passes that only guess, 0 before the first guesses.  reading: from the arrival
    of a long prompt to the next guesses.
    """

    def __init__(
        self,
        drafter: Drafter,
        ahead: AheadMode = "off",
        ahead_passes: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if ahead == "stream" and not isinstance(drafter, AheadDrafter):
            drafter = StreamedProposals(drafter)
        self.busy_s = 0.0
        self.slowest_s = 0.0
        self.reading = False
        self._drafter = drafter
        self._clock = clock
        self._worker_ahead = drafter if ahead != "off" and isinstance(drafter, AheadDrafter) else None
        self._sends = ahead == "stream"
        self._passes_per_answer = ahead_passes
        self._passes_left = 0
        self._known: set[str] = set()

    @property
    def wants_work(self) -> bool:
        """Whether there may be something to grow before the next message."""
        return self._worker_ahead is not None and self._passes_left > 0

    @property
    def by_distance(self) -> dict[int, tuple[int, int]]:
        """See `Beat`."""
        found: dict[int, list[int]] = getattr(self._drafter, "by_distance", {})
        return {far: (judged, right) for far, (judged, right) in sorted(found.items())[:_MOST_DISTANCES]}

    @property
    def settled(self) -> bool:
        """Whether `slowest_s` says how long a pass may take: before, it may take any time."""
        return self.slowest_s > 0 and not self.reading

    def apply(self, work: DraftWork) -> DraftDone | None:
        started = self._clock()
        answer = None
        self.reading = is_long(work) or self.reading
        match work:
            case GrowDrafts():
                answer = proposals_of(self._drafter, work.items)
                self._note(work.items)
                self._passes_left = self._passes_per_answer
            case AdvanceDrafts():
                self._drafter.advance(work.items)
                self._note(work.items)
            case Release():
                released(self._drafter, work)
                self._known.difference_update(work.request_ids)
        self._look_again()
        seconds = self._count(started, guessed=isinstance(work, GrowDrafts))
        if isinstance(work, GrowDrafts) and answer is not None:
            return DraftDone(work.round, answer, seconds)
        return None

    def work_ahead(self) -> NodesDrafted | None:
        """One pass of growth; its nodes where they are to be sent."""
        if self._worker_ahead is None or self._passes_left == 0:
            return None
        started = self._clock()
        grown = self._worker_ahead.work_ahead()
        if grown is None:
            self._passes_left = 0
        elif not self._sends:
            self._passes_left -= 1
        seconds = self._count(started, guessed=grown != [])
        return NodesDrafted(tuple(map(_bounded, grown)), seconds) if grown and self._sends else None

    def reset(self) -> None:
        """As before the first message."""
        self._drafter.release(sorted(self._known))
        self._known.clear()
        self._passes_left = 0

    def _look_again(self) -> None:
        """After a message there may be something to grow and to send."""
        if self._sends:
            self._passes_left = 1

    def _note(self, items: Sequence[DraftItem]) -> None:
        self._known.update(item.request_id for item in items)

    def _count(self, started: float, *, guessed: bool) -> float:
        seconds = self._clock() - started
        self.busy_s += seconds
        if self.reading:
            self.reading = not guessed
        elif guessed or self.slowest_s:
            self.slowest_s = max(self.slowest_s, seconds)
        return seconds


class StreamedProposals:
    """Makes a drafter that only answers one that streams: its guesses below the newest token are sent as
    soon as there is a moment for them."""

    def __init__(self, drafter: Drafter) -> None:
        self.needs = drafter.needs
        self._drafter = drafter
        self._waiting: dict[str, DraftItem] = {}
        self._next: dict[str, int] = {}

    def grow(self, items: Sequence[DraftItem]) -> list[Proposal]:
        return self._drafter.grow([self._whole(item) for item in items])

    def advance(self, items: Sequence[DraftItem]) -> None:
        silent = []
        for item in map(self._whole, items):
            if item.max_nodes > 0:
                self._waiting[item.request_id] = replace(item, max_nodes=min(item.max_nodes, _MOST_AHEAD))
            else:
                silent.append(item)
        if silent:
            self._drafter.advance(silent)

    def release(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            self._next.pop(request_id, None)
        self._drafter.release(request_ids)

    def work_ahead(self) -> list[DraftNodes] | None:
        if not self._waiting:
            return None
        asked, self._waiting = self._waiting, {}
        proposals = filter(None, map(plain, self._drafter.grow(list(asked.values()))))
        return [
            self._numbered(proposal, asked[proposal.request_id].generation)
            for proposal in proposals
            if proposal.tokens and proposal.request_id in asked
        ]

    def _whole(self, item: DraftItem) -> DraftItem:
        """With the tokens that waited for a moment that did not come."""
        if item.announcement is not None:
            self._next[item.request_id] = 0
        return follow_up(self._waiting.pop(item.request_id, None), item)

    def _numbered(self, proposal: Proposal, generation: int) -> DraftNodes:
        first = self._next.get(proposal.request_id, 0)
        self._next[proposal.request_id] = first + len(proposal.tokens)
        return DraftNodes(
            proposal.request_id,
            generation,
            proposal.num_tokens,
            first,
            proposal.tokens,
            tuple(first + parent if parent >= 0 else -proposal.num_tokens for parent in proposal.parents),
            proposal.scores or (0.0,) * len(proposal.tokens),
        )


def _bounded(nodes: DraftNodes) -> DraftNodes:
    """A candidate that is out of the question may have the score -inf, which no recording can hold."""
    return replace(nodes, scores=tuple(max(score, _LEAST_SCORE) for score in nodes.scores))


def is_long(work: object) -> bool:
    """Whether it brings so much to read that a pass may take longer than one that guesses."""
    return sum(len(item.tokens) for item in getattr(work, "items", ())) > _LONG_READ_TOKENS


def follow_up(earlier: DraftItem | None, later: DraftItem) -> DraftItem:
    """One item that says what both say."""
    if earlier is None or later.announcement is not None:
        return later
    return replace(
        later,
        start=earlier.start,
        tokens=earlier.tokens + later.tokens,
        announcement=earlier.announcement,
    )


def merged(work: Iterable[Message]) -> list[Message | AdvanceDrafts]:
    """The same work with neighbouring `AdvanceDrafts` made one, after what else came between them, so
    that a worker that fell behind reads what it missed in one pass."""
    result: list[Message | AdvanceDrafts] = []
    for advances, run in groupby(work, lambda message: not isinstance(message, GrowDrafts | Release)):
        if not advances:
            result.extend(run)
            continue
        items: dict[str, DraftItem] = {}
        for message in run:
            if not isinstance(message, AdvanceDrafts):
                result.append(message)
                continue
            for item in message.items:
                items[item.request_id] = follow_up(items.pop(item.request_id, None), item)
        if items:
            result.append(AdvanceDrafts(tuple(items.values())))
    return result
