"""Drafters for draft workers of tests: the toy target's own rule, and ways to misbehave.

Factories take a DraftGroupSpec and are named "tests.engine.draft_toys:NAME".
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.config import Config
from paceline.core.drafting import DrafterNeeds
from paceline.core.params import SamplingParams
from paceline.core.scheduler import Limits
from paceline.core.token_tree import TokenTree
from paceline.core.work import (
    AdvanceDrafts,
    Announcement,
    DraftDone,
    DraftItem,
    DraftNodes,
    Proposal,
    RunTarget,
    StepDone,
)
from paceline.drafters.base import Drafter
from paceline.engine.draft_messages import DraftGroupSpec
from paceline.engine.draft_worker import DraftWorker
from paceline.errors import ModelError
from tests.cases.drafters import RuleDrafter
from tests.core.toy import VOCAB, ToyExecutor, toy_next

LIMITS = Limits(context_length=256, num_slots=2048, max_num_seqs=8, max_batch_tokens=128)


def spec(ahead: Any = "off", **changes: Any) -> DraftGroupSpec:
    fields = {"config": Config(), "limits": LIMITS, "target_vocab_size": VOCAB, "ahead": ahead, **changes}
    return DraftGroupSpec(**fields)


class ToyTarget:
    """The toy executor's target half. pause_s: what a pass takes."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.toy = ToyExecutor(LIMITS.num_slots, lambda *_: TokenTree())
        self.pause_s = pause_s

    def run(self, work: RunTarget) -> StepDone:
        if self.pause_s:
            time.sleep(self.pause_s)
        done = self.toy.run(work)
        assert isinstance(done, StepDone)
        return done

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.toy.tables.pop(request_id, None)

    def close(self) -> None:
        """Nothing is held."""


def guesses(known: Sequence[int], depth: int) -> list[int]:
    """The toy target's next tokens, every fourth position wrong."""
    tokens = list(known)
    for _ in range(depth):
        token = toy_next(tokens)
        tokens.append(token if len(tokens) % 4 else (token + 1) % VOCAB)
    return tokens[len(known) :]


def mostly_right(_: DraftGroupSpec) -> Drafter:
    return RuleDrafter(lambda known, nodes, depth: TokenTree.chain(guesses(known, min(nodes, depth, 8))))


@dataclass
class Grown:
    """tokens: committed, then guessed. The guesses are a chain below the last committed token."""

    tokens: list[int]
    committed: int
    generation: int
    bound: int = 0
    numbers: list[int] = field(default_factory=list)
    next: int = 0


class ToyAhead:
    """Grows one node per request and pass, below what it knows, as an AheadDrafter does."""

    def __init__(self, pause_s: float = 0.0, reserve: int = 0) -> None:
        """reserve: nodes that it grows beyond what is asked."""
        self.needs = DrafterNeeds("toy-ahead")
        self.reserve = reserve
        self.pause_s = pause_s
        self.passes = 0
        self.texts: dict[str, Grown] = {}

    def grow(self, items: Sequence[DraftItem]) -> list[Proposal]:
        self.advance(items)
        proposals = []
        for item in items:
            text = self.texts[item.request_id]
            count = min(item.max_nodes, item.max_depth)
            while len(text.tokens) - text.committed < count:
                self._grow_one(text)
            chain = text.tokens[text.committed :][:count]
            proposals.append(
                Proposal(item.request_id, text.committed, tuple(chain), tuple(range(-1, len(chain) - 1)))
            )
        return proposals

    def advance(self, items: Sequence[DraftItem]) -> None:
        for item in items:
            if item.announcement is not None:
                self.texts[item.request_id] = Grown([], 0, item.generation)
            text = self.texts[item.request_id]
            assert item.start == text.committed, "the drafter is out of step"
            known = [*text.tokens[: item.start], *item.tokens]
            right = text.tokens[: len(known)] == known
            guessed = text.tokens[len(known) :] if right else []
            text.numbers = text.numbers[len(text.numbers) - len(guessed) :] if guessed else []
            text.tokens, text.committed = [*known, *guessed], len(known)
            text.bound = min(item.max_nodes, item.max_depth)

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.texts.pop(request_id, None)

    def work_ahead(self) -> list[DraftNodes] | None:
        self.passes += 1
        if self.pause_s:
            time.sleep(self.pause_s)
        grown = [
            self._grow_one(text, name)
            for name, text in self.texts.items()
            if len(text.tokens) - text.committed < text.bound + self.reserve
        ]
        return grown or None

    def _grow_one(self, text: Grown, name: str = "") -> DraftNodes:
        parent = text.numbers[-1] if text.numbers else -text.committed
        token = guesses(text.tokens, 1)[0]
        text.tokens.append(token)
        text.numbers.append(text.next)
        text.next += 1
        return DraftNodes(name, text.generation, text.committed, text.next - 1, (token,), (parent,), (-0.1,))


def ahead(_: DraftGroupSpec) -> Drafter:
    return ToyAhead()


def slow_ahead(_: DraftGroupSpec) -> Drafter:
    return ToyAhead(pause_s=0.002)


# ---------------------------------------------------------------- ways to misbehave


class Spoiled(ToyAhead):
    """Streams and answers what `spoil` makes of it."""

    def __init__(
        self,
        spoil_nodes: Callable[[DraftNodes], list[DraftNodes]],
        spoil_proposal: Callable[[Proposal], Proposal] = lambda proposal: proposal,
    ) -> None:
        super().__init__()
        self.spoil_nodes, self.spoil_proposal = spoil_nodes, spoil_proposal

    def work_ahead(self) -> list[DraftNodes] | None:
        grown = super().work_ahead()
        return None if grown is None else [bad for nodes in grown for bad in self.spoil_nodes(nodes)]

    def grow(self, items: Sequence[DraftItem]) -> list[Proposal]:
        return [self.spoil_proposal(proposal) for proposal in super().grow(items)]


def junk_ids(_: DraftGroupSpec) -> Drafter:
    return Spoiled(
        lambda nodes: [replace(nodes, tokens=(VOCAB + 5,)), replace(nodes, tokens=(-1,))],
        lambda proposal: replace(proposal, tokens=tuple(2**40 for _ in proposal.tokens)),
    )


def junk_parents(_: DraftGroupSpec) -> Drafter:
    return Spoiled(
        lambda nodes: [replace(nodes, parents=(10**9,)), replace(nodes, parents=(-(10**9),))],
        lambda proposal: replace(proposal, parents=tuple(7 for _ in proposal.parents)),
    )


def nan_scores(_: DraftGroupSpec) -> Drafter:
    return Spoiled(
        lambda nodes: [replace(nodes, scores=(float("nan"),)), replace(nodes, scores=(float("inf"),))],
        lambda proposal: replace(proposal, scores=tuple(float("nan") for _ in proposal.tokens)),
    )


def stale_generations(_: DraftGroupSpec) -> Drafter:
    return Spoiled(lambda nodes: [replace(nodes, generation=nodes.generation - 1), nodes])


def strangers(_: DraftGroupSpec) -> Drafter:
    """Nodes for requests that nobody has heard of, and the right ones."""
    return Spoiled(lambda nodes: [replace(nodes, request_id="nobody's"), nodes])


def uneven_lists(_: DraftGroupSpec) -> Drafter:
    return Spoiled(
        lambda nodes: [replace(nodes, parents=()), replace(nodes, scores=(-0.1, -0.1))],
        lambda proposal: replace(proposal, parents=proposal.parents[1:]),
    )


def too_many_nodes(_: DraftGroupSpec) -> Drafter:
    many = 3000
    return Spoiled(
        lambda nodes: [
            replace(
                nodes,
                tokens=tuple(at % VOCAB for at in range(many)),
                parents=tuple(nodes.first + at - 1 if at else nodes.parents[0] for at in range(many)),
                scores=(-0.1,) * many,
            )
        ],
        lambda proposal: replace(
            proposal, tokens=(3,) * many, parents=tuple(range(-1, many - 1)), scores=(-0.1,) * many
        ),
    )


def unprintable(_: DraftGroupSpec) -> Drafter:
    """Nodes that msgpack cannot write: the drafter is lost, nothing else."""
    return Spoiled(lambda nodes: [replace(nodes, tokens=(object(),))])  # type: ignore[arg-type]


class Flooding(ToyAhead):
    """Never has enough."""

    def work_ahead(self) -> list[DraftNodes] | None:
        return [
            DraftNodes(name, text.generation, text.committed, 0, (1,), (-text.committed,), (-0.1,))
            for name, text in self.texts.items()
            for _ in range(4)
        ] or [DraftNodes("nobody's", 0, 1, 0, (1,), (-1,), (-0.1,))]


def flooding(_: DraftGroupSpec) -> Drafter:
    return Flooding()


class Raising(ToyAhead):
    """Fails at the fifth message about a request, in its first life as in every other."""

    calls = 0

    def advance(self, items: Sequence[DraftItem]) -> None:
        self.calls += len(items)
        if self.calls >= 5:
            raise RuntimeError("a hole in the drafter")
        super().advance(items)


def raising(_: DraftGroupSpec) -> Drafter:
    return Raising()


class SlowReader(ToyAhead):
    """Reads a long prompt for longer than a worker may be silent: at once, or in passes of its own."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.at_once, self.unread = at_once, 0

    def advance(self, items: Sequence[DraftItem]) -> None:
        super().advance(items)
        if sum(len(item.tokens) for item in items) > 100:
            self.unread = 2
        while self.at_once and self.unread:
            self.read()

    def read(self) -> None:
        time.sleep(0.8)
        self.unread -= 1

    def work_ahead(self) -> list[DraftNodes] | None:
        if self.unread:
            self.read()
            return []
        return super().work_ahead()


def slow_reader(_: DraftGroupSpec) -> Drafter:
    return SlowReader(at_once=True)


def slow_reader_in_passes(_: DraftGroupSpec) -> Drafter:
    return SlowReader(at_once=False)


class Stuck(ToyAhead):
    """Never comes back from its twentieth pass. Its process is alive and well."""

    def work_ahead(self) -> list[DraftNodes] | None:
        if self.passes == 20:
            time.sleep(3600)
        return super().work_ahead()


def stuck(_: DraftGroupSpec) -> Drafter:
    return Stuck()


def slow_to_load(_: DraftGroupSpec) -> Drafter:
    time.sleep(1.5)
    return ToyAhead()


def cannot_load(_: DraftGroupSpec) -> Drafter:
    raise ModelError("the draft model is not there: put it there.")


def dies_while_loading(_: DraftGroupSpec) -> Drafter:
    os.kill(os.getpid(), 9)
    raise AssertionError


class WrongRounds(DraftWorker):
    """Every answer is to a round that nobody asked for."""

    def _answer(self, attachment: Any, message: object) -> None:
        if isinstance(message, DraftDone):
            message = replace(message, round=message.round + 1000)
        super()._answer(attachment, message)


class NeverAnswers(DraftWorker):
    """Takes rounds in, gives every sign of life, and keeps its guesses to itself."""

    def _answer(self, attachment: Any, message: object) -> None:
        if not isinstance(message, DraftDone):
            super()._answer(attachment, message)


def advance_of(name: str, tokens: Sequence[int], **changes: Any) -> AdvanceDrafts:
    """A first message about a request."""
    told = Announcement(len(tokens), SamplingParams())
    return AdvanceDrafts((replace(DraftItem(name, 0, tuple(tokens), 8, 8, told, 1), **changes),))
