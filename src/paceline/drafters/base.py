"""What a drafter is. It learns committed tokens and answers with guesses; nobody asks which one runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from math import isfinite
from operator import index
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from paceline.core.drafting import DrafterNeeds
from paceline.core.token_tree import TokenTree
from paceline.core.work import Announcement, DraftItem, DraftNodes, FinishedOutput, Proposal, Release


@runtime_checkable
class Drafter(Protocol):
    """Called from one thread. An exception from any method loses the drafter, not the requests."""

    needs: DrafterNeeds

    def grow(self, items: Sequence[DraftItem]) -> list[Proposal]:
        """One proposal per item, for the tokens known after taking in the item's own."""
        ...

    def advance(self, items: Sequence[DraftItem]) -> None:
        """Take in tokens of prompts that are still being prefilled."""
        ...

    def release(self, request_ids: Iterable[str]) -> None:
        """Forget these requests; unknown ids are ignored."""
        ...


@runtime_checkable
class AheadDrafter(Drafter, Protocol):
    """A drafter that keeps a tree per request and can go on growing it while the target is busy.

    `grow` answers from that tree, topping it up where it is too small; `advance` re-roots it at the last
    token it tells, keeping what is below.
    """

    def work_ahead(self) -> list[DraftNodes] | None:
        """One pass of growth over all requests whose bounds allow it: short, so that the caller can look
        for messages in between. The new nodes; None when there is nothing left to grow."""
        ...


@runtime_checkable
class LearningDrafter(Drafter, Protocol):
    """A drafter whose needs say that it learns from outputs."""

    def learn(self, outputs: Sequence[FinishedOutput]) -> None:
        """Outputs of requests that ended well, before they are released. One may come twice."""
        ...


@runtime_checkable
class ClosingDrafter(Drafter, Protocol):
    """A drafter that has something to do before its end, in the target's process."""

    def close(self) -> None: ...


def released(drafter: Drafter, work: Release) -> None:
    """What a `Release` means to a drafter."""
    if work.finished and isinstance(drafter, LearningDrafter):
        drafter.learn(work.finished)
    drafter.release(work.request_ids)


def plain(proposal: Any) -> Proposal | None:
    """The proposal in the types its fields promise, so that it can be checked, sent and recorded.

    Numbers of any library are converted; what cannot be becomes a proposal without guesses that says why.
    None if not even the request it is for can be read.
    """
    try:
        request_id, known = proposal.request_id, index(proposal.num_tokens)
    except Exception:  # noqa: BLE001 - whatever a drafter returns, decoding goes on
        return None
    if type(request_id) is not str:
        return None
    if proposal.error is not None:
        return Proposal(request_id, known, error=str(proposal.error))
    try:
        tokens, parents = tuple(map(index, proposal.tokens)), tuple(map(index, proposal.parents))
        scores = tuple(map(float, proposal.scores))
        if not all(map(isfinite, scores)):
            raise ValueError("a score is not finite")
        return Proposal(request_id, known, tokens, parents, scores)
    except Exception as error:  # noqa: BLE001
        return Proposal(request_id, known, error=f"{type(error).__name__}: {error}")


State = TypeVar("State")


class PerRequestDrafter(ABC, Generic[State]):
    """For drafters that treat every request on its own: an exception costs one request its guesses."""

    needs: DrafterNeeds

    def __init__(self) -> None:
        self._states: dict[str, State] = {}

    @abstractmethod
    def begin(self, announcement: Announcement) -> State:
        """The state of a new request, no token taken in yet."""

    @abstractmethod
    def take_in(self, state: State, tokens: Sequence[int]) -> None:
        """Committed tokens that follow those of before."""

    @abstractmethod
    def guess(self, state: State, max_nodes: int, max_depth: int) -> TokenTree:
        """Guesses below the last token taken in."""

    def grow(self, items: Sequence[DraftItem]) -> list[Proposal]:
        return [self._propose(item) for item in items]

    def advance(self, items: Sequence[DraftItem]) -> None:
        for item in items:
            self._note(item)

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._states.pop(request_id, None)

    def _note(self, item: DraftItem) -> State:
        if item.announcement is not None:
            self._states[item.request_id] = self.begin(item.announcement)
        state = self._states[item.request_id]
        self.take_in(state, item.tokens)
        return state

    def _propose(self, item: DraftItem) -> Proposal:
        known = item.start + len(item.tokens)
        try:
            tree = self.guess(self._note(item), item.max_nodes, item.max_depth)
        except Exception as error:  # noqa: BLE001 - whatever a drafter does, decoding goes on
            return Proposal(item.request_id, known, error=f"{type(error).__name__}: {error}")
        return Proposal(item.request_id, known, tuple(tree.tokens), tuple(tree.parents), tuple(tree.scores))
