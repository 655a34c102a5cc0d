"""Ways to decide which drafter is asked and what is verified."""

from __future__ import annotations

from paceline.core.draft_round import Ask, Drafted
from paceline.core.followers import Followers
from paceline.core.planner import Planner


class Everyone:
    """Asks every drafter for as many guesses as there may be, and verifies the best of all."""

    def __init__(self, followers: Followers, planner: Planner | None) -> None:
        self._followers = followers
        self._planner = planner

    def next_ask(self, round: list[Drafted], drafters: list[int]) -> Ask | None:
        for drafter in drafters:
            sizes = [
                (each, size)
                for each in round
                if drafter not in each.asked and (size := self._size(each, drafter, len(round))) > 0
            ]
            if sizes:
                return Ask(drafter, sizes)
        return None

    def _size(self, each: Drafted, drafter: int, batch_size: int) -> int:
        room = self._followers.room(drafter, each.request)
        most = each.most if room is None else min(each.most, room)
        if self._planner is None or not each.free or drafter:
            return most
        return self._planner.length(each.request.acceptance, most, batch_size)

    def on_draft(self, round: list[Drafted], drafter: int, seconds: float) -> None:
        if self._planner is not None and not drafter:
            self._planner.on_draft(
                max((max(each.tree.depths, default=0) for each in round), default=0), seconds
            )

    def kept(self, round: list[Drafted]) -> list[list[int]]:
        return [sorted(each.tree.best_below(-1, each.most, each.most)) for each in round]
