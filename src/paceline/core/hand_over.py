"""Whether a target that is free takes what guesses there are, or waits a moment for better ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.request import Request

_MEMORY = 0.1
_PATIENCE = 1.5
"""An answer that takes longer than so many times the usual is not waited for any longer, and its request not
again until the drafter is heard of it."""


@dataclass(slots=True)
class _Question:
    """Tokens that the drafter was told at `at` and whose guesses have not come. waited: whether the target
    waited for them."""

    at: float
    waited: bool = False


class HandOver:
    """Waits only where a request has nothing but its root to verify, and an answer of the drafter is due so
    soon that the tokens it is expected to bring outweigh those of the whole batch in the meantime. A slow
    link makes it never wait, a fast drafter makes it wait after every miss.

    reply_s: seconds from a commit to the first nodes that were drafted below it, None = none came so far.
    rate: tokens per second that the whole batch commits, None = fewer than two steps were seen. While one of
    them is None nobody waits.
    """

    def __init__(self) -> None:
        self.reply_s: float | None = None
        self.rate: float | None = None
        self._open: dict[str, _Question] = {}
        self._silent: set[str] = set()  # waited for in vain, and nothing heard since
        self._step_at: float | None = None  # of the newest commits, the ones before, and what they brought
        self._step_before: float | None = None
        self._step_tokens = 0

    def on_follow(self, request_id: str, now: float) -> None:
        """The drafter is told tokens below which it may grow."""
        self._open[request_id] = _Question(now)

    def on_nodes(self, request_id: str, now: float, *, caught_up: bool) -> None:
        """caught_up: whether the drafter knew all committed tokens."""
        self._silent.discard(request_id)
        if caught_up and (question := self._open.pop(request_id, None)) is not None:
            self.reply_s = _mixed(self.reply_s, now - question.at)

    def on_commit(self, tokens: int, now: float) -> None:
        """Commits of one step come one by one, at the same `now`."""
        if now == self._step_at:
            self._step_tokens += tokens
            return
        self._count_step()
        self._step_before, self._step_at, self._step_tokens = self._step_at, now, tokens

    def on_idle(self) -> None:
        """No request decodes: until the next commit no time counts."""
        self._count_step()
        self._step_at = self._step_before = None

    def _count_step(self) -> None:
        if self._step_at is not None and self._step_before is not None and self._step_at > self._step_before:
            self.rate = _mixed(self.rate, self._step_tokens / (self._step_at - self._step_before))

    def on_no_room(self, request_id: str) -> None:
        """Guesses could not be verified now: their answer is nothing to wait for."""
        self._open.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)
        self._silent.discard(request_id)

    def at(self, deciding: Sequence[Request], now: float) -> float:
        """When the target should start if nothing comes before; `now` = at once."""
        if self.reply_s is None or self.rate is None:
            return now
        patience = _PATIENCE * self.reply_s
        gain, newest = 0.0, 0.0
        hoped_for: list[_Question] = []
        for request in deciding:
            question = self._open.get(request.request_id)
            if question is None or request.guesses or request.request_id in self._silent:
                continue
            if question.at + patience > now:
                gain += request.acceptance.rate
                newest = max(newest, question.at) if hoped_for else question.at
                hoped_for.append(question)
            elif question.waited:
                self._silent.add(request.request_id)
                self.reply_s = _mixed(self.reply_s, now - question.at)
        # By what is known now, so that it is not put off again when the time comes.
        latest = newest + _PATIENCE * self.reply_s
        expected_s = max(newest + self.reply_s - now, 0.0)
        if not hoped_for or gain <= self.rate * expected_s:
            return now
        for question in hoped_for:
            question.waited = True
        return latest


def _mixed(before: float | None, new: float) -> float:
    return new if before is None else before + _MEMORY * (new - before)
