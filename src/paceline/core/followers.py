"""Which drafters there are, and what each has been told of each request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.core.drafting import DrafterNeeds
from paceline.core.request import Request, Told
from paceline.core.work import Announcement, DraftItem


class Followers:
    """A drafter follows a request, and `Request.told` has an entry for it, or has not been told of it: not
    yet, or no longer, since a drafter that is lost forgets all. One that joins is told of each anew."""

    def __init__(self, drafters: Sequence[DrafterNeeds]) -> None:
        self._drafters = drafters
        self._lost: dict[int, str] = {}
        self._generation = 0
        self.present = list(range(len(drafters)))

    @property
    def lost(self) -> str | None:
        """Why those that are lost are; None = all are there."""
        return "; ".join(self._lost.values()) if self._lost else None

    def needs(self, drafter: int) -> DrafterNeeds:
        return self._drafters[drafter]

    def lose(self, drafter: int, reason: str, requests: Iterable[Request]) -> None:
        self._lost[drafter] = reason
        self._find_present()
        for request in requests:
            request.told.pop(drafter, None)

    def join(self, drafter: int) -> None:
        self._lost.pop(drafter, None)
        self._find_present()

    def _find_present(self) -> None:
        self.present = [drafter for drafter in range(len(self._drafters)) if drafter not in self._lost]

    def room(self, drafter: int, request: Request) -> int | None:
        """Guesses before the drafter's context is full, None = without end."""
        length = self._drafters[drafter].context_length
        return None if length is None else length - len(request.tokens)

    def num_told(self, drafter: int, request: Request) -> int:
        told = request.told.get(drafter)
        return told.num_tokens if told is not None else 0

    def item(
        self, drafter: int, request: Request, upto: int, max_nodes: int = 0, max_depth: int = 0
    ) -> DraftItem:
        """What the drafter has not seen of the first `upto` tokens; it has by then."""
        told, announcement = request.told.get(drafter), None
        if told is None:
            self._generation += 1
            told = request.told[drafter] = Told(generation=self._generation)
            announcement = Announcement(request.num_prompt, request.params)
        start, told.num_tokens = told.num_tokens, upto
        return DraftItem(
            request.request_id,
            start,
            tuple(request.tokens[start:upto]),
            max_nodes,
            max_depth,
            announcement,
            told.generation,
        )
