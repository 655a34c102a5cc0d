"""Whether a target that is free takes what guesses there are, or waits a moment for better ones."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.request import Request

_MEMORY = 0.1
_PATIENCE = 1.5
"""An answer that takes longer than so many times the usual is not waited for."""


class HandOver:
    """Waits only where a request has nothing but its root to verify, and an answer of the drafter is due so
    soon that the tokens it is expected to bring outweigh those of the whole batch in the meantime. A slow
    link makes it never wait, a fast drafter makes it wait after every miss.

    reply_s: seconds from a commit to the first nodes that were drafted below it.  rate: tokens per second.
    """

    def __init__(self) -> None:
        self.reply_s: float | None = None
        self.rate: float | None = None
        self._asked_at: dict[str, float] = {}
        self._last_commit: float | None = None

    def on_follow(self, request_id: str, now: float) -> None:
        self._asked_at[request_id] = now

    def on_nodes(self, request_id: str, now: float, *, caught_up: bool) -> None:
        """caught_up: whether the drafter knew all committed tokens."""
        if caught_up and (asked := self._asked_at.pop(request_id, None)) is not None:
            self.reply_s = _mixed(self.reply_s, now - asked)

    def on_commit(self, tokens: int, now: float) -> None:
        if self._last_commit is not None and now > self._last_commit:
            self.rate = _mixed(self.rate, tokens / (now - self._last_commit))
        self._last_commit = now

    def forget(self, request_id: str) -> None:
        self._asked_at.pop(request_id, None)

    def at(self, deciding: Sequence[Request], now: float) -> float:
        """When the target should start if nothing comes before; `now` = at once."""
        if self.reply_s is None or self.rate is None:
            return now
        gain, latest = 0.0, now
        for request in deciding:
            asked = self._asked_at.get(request.request_id)
            if request.guesses or asked is None or now - asked > _PATIENCE * self.reply_s:
                continue
            gain += request.acceptance.rate
            latest = max(latest, asked + _PATIENCE * self.reply_s)
        expected_s = max(latest - now - (_PATIENCE - 1.0) * self.reply_s, 0.0)
        return latest if gain > self.rate * expected_s else now


def _mixed(before: float | None, new: float) -> float:
    return new if before is None else before + _MEMORY * (new - before)
