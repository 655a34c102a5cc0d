"""Target and drafter at the same time, driven by chance: every order of their messages may happen."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field, replace

from paceline.core.engine_core import EngineCore
from paceline.core.params import SamplingParams
from paceline.core.work import (
    AdvanceDrafts,
    DrafterJoined,
    DrafterLost,
    DraftItem,
    DraftNodes,
    Event,
    NodesDrafted,
    Release,
    RequestArrived,
    RequestDelta,
    RunTarget,
    StepDone,
    WaitOver,
    WaitUntil,
    Work,
)
from tests.core.test_engine_core import oracle
from tests.core.toy import VOCAB, ToyExecutor, toy_next


@dataclass
class _Followed:
    generation: int
    known: list[int]
    item: DraftItem
    texts: list[tuple[int, ...]] = field(default_factory=list)  # of each node, by number


class StreamingDrafter:
    """Adds a few nodes to its trees whenever it is let, right in a share `skill` of the cases.

    junk: share of the messages that no drafter in its senses would send.
    """

    def __init__(self, rng: random.Random, skill: float, junk: float) -> None:
        self._rng, self._skill, self._junk = rng, skill, junk
        self._followed: dict[str, _Followed] = {}

    def take_in(self, work: AdvanceDrafts | Release) -> None:
        if isinstance(work, Release):
            for name in work.request_ids:
                self._followed.pop(name, None)
            return
        for item in work.items:
            assert (item.announcement is not None) == (item.start == 0)
            if item.announcement is not None:
                self._followed[item.request_id] = _Followed(item.generation, [], item)
            followed = self._followed[item.request_id]
            assert item.start == len(followed.known), "the drafter is out of step"
            assert item.generation == followed.generation
            assert item.tokens
            followed.known += item.tokens
            followed.item = item

    def forget(self) -> None:
        self._followed.clear()

    def draft(self) -> NodesDrafted | None:
        able = [name for name, followed in self._followed.items() if followed.item.max_nodes > 0]
        chosen = self._rng.sample(able, self._rng.randint(0, len(able)))
        grown = tuple(self._nodes(name) for name in chosen)
        return NodesDrafted(grown, self._rng.random() / 100) if grown else None

    def _nodes(self, name: str) -> DraftNodes:
        rng, followed = self._rng, self._followed[name]
        known, first = tuple(followed.known), len(followed.texts)
        tokens, parents = [], []
        for _ in range(rng.randint(1, 6)):
            below = [
                number
                for number, text in enumerate(followed.texts)
                if text[: len(known)] == known and 0 < len(text) - len(known) < followed.item.max_depth
            ]
            parent = rng.choice([-len(known), *below, *below[-2:]])
            above = followed.texts[parent] if parent >= 0 else known
            right = rng.random() < self._skill
            token = toy_next(above) if right else rng.randrange(VOCAB)
            followed.texts.append((*above, token))
            tokens.append(token)
            parents.append(parent)
        scores = tuple(-rng.random() for _ in tokens)
        nodes = DraftNodes(
            name, followed.generation, len(known), first, tuple(tokens), tuple(parents), scores
        )
        return self._spoilt(nodes) if rng.random() < self._junk else nodes

    def _spoilt(self, nodes: DraftNodes) -> DraftNodes:
        """Refused as a whole, but its numbers count."""
        size = len(nodes.tokens)
        return self._rng.choice(
            [
                replace(nodes, tokens=(VOCAB,) * size),
                replace(nodes, scores=(math.nan,) * size),
                replace(nodes, scores=(-math.inf,) * size),
                replace(nodes, parents=(nodes.first + size,) * size),
                replace(nodes, scores=()),
            ]
        )


class OverlappedDrive:
    """What an engine does with both lanes, one thing at a time, in an order and at times drawn by chance.

    A pass of the target is computed when it is over, so that whatever happens to its slots meanwhile shows.
    """

    def __init__(
        self, core: EngineCore, rng: random.Random, skill: float = 0.6, junk: float = 0.0, pace: int = 6
    ) -> None:
        """pace: how often the drafter and its messages move, for one move of the target."""
        self.core, self.rng, self.pace = core, rng, pace
        self.target = ToyExecutor(core.config.limits.num_slots, oracle)
        self.drafter = StreamingDrafter(rng, skill, junk)
        self.now = 0.0
        self.running: RunTarget | None = None
        self.wait_until: float | None = None
        self.to_drafter: deque[AdvanceDrafts | Release] = deque()
        self.to_core: deque[NodesDrafted] = deque()
        self.present = True
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, RequestDelta] = {}
        self.log: list[tuple[float, Event, list[Work]]] = []
        self.passes: list[RunTarget] = []
        self.num_waits = 0

    # ------------------------------------------------------------ the engine

    def feed(self, event: Event) -> None:
        self.now += self.rng.random() / 1000
        work = self.core.handle(event, self.now)
        self.log.append((self.now, event, work))
        for item in work:
            self._submit(item)
        for delta in self.core.take_outputs():
            assert delta.request_id not in self.finished, "output after the end"
            self.tokens.setdefault(delta.request_id, []).extend(delta.tokens)
            if delta.finish_reason is not None:
                self.finished[delta.request_id] = delta
        self._check_that_the_target_is_busy(event, work)

    def _submit(self, work: Work) -> None:
        match work:
            case RunTarget():
                assert self.running is None, "the target has one pass at a time"
                self.running = work
                self.passes.append(work)
            case WaitUntil():
                assert work.at > self.now
                self.wait_until = work.at
            case Release():
                self.target.run(work)
                self.to_drafter.append(work)
            case AdvanceDrafts():
                assert self.present, "work for a drafter that is not there"
                self.to_drafter.append(work)
            case _:
                raise AssertionError(f"{work} is not asked for where nothing waits")

    def _check_that_the_target_is_busy(self, event: Event, work: list[Work]) -> None:
        """Idle with something to do only until a moment that was promised, once per moment."""
        assert self.core.target_busy == (self.running is not None)
        decoding = [request for request in self.core.scheduler.running if request.decoding]
        if not decoding or self.running is not None:
            return
        self.num_waits += 1
        assert any(isinstance(item, WaitUntil) for item in work), "the target is idle for no reason"
        assert not isinstance(event, WaitOver), "it waited already"

    # ------------------------------------------------------------ chance

    def step(self) -> bool:
        """One thing that may happen next; False when nothing is left to happen by itself."""
        moves = []
        if self.running is not None:
            moves += [self._target_is_done]
        if self.to_drafter:
            moves += [self._drafter_reads] * self.pace
        if self.to_core:
            moves += [self._nodes_arrive] * self.pace
        if self.wait_until is not None:
            moves += [self._wait_is_over]
        if not moves:
            return False
        if self.present:
            moves += [self._drafter_works] * self.pace
        self.rng.choice(moves)()
        return True

    def _target_is_done(self) -> None:
        assert self.running is not None
        work, self.running = self.running, None
        done = self.target.run(work)
        assert isinstance(done, StepDone)
        size = sum(len(item.tokens) + len(item.tree_tokens) for item in work.items)
        seconds = 0.01 * (1 + size / 20) * (0.5 + self.rng.random())
        self.now += seconds * self.rng.random()
        self.feed(replace(done, seconds=seconds))

    def _drafter_reads(self) -> None:
        self.drafter.take_in(self.to_drafter.popleft())

    def _drafter_works(self) -> None:
        if (nodes := self.drafter.draft()) is not None:
            self.to_core.append(nodes)

    def _nodes_arrive(self) -> None:
        self.feed(self.to_core.popleft())

    def _wait_is_over(self) -> None:
        assert self.wait_until is not None
        self.now, self.wait_until = max(self.now, self.wait_until), None
        self.feed(WaitOver())

    def lose_drafter(self) -> None:
        self.present = False
        self.drafter.forget()
        self.to_drafter.clear()
        self.to_core.clear()
        self.feed(DrafterLost("killed"))

    def find_drafter(self) -> None:
        self.to_drafter.clear()
        self.present = True
        self.feed(DrafterJoined())

    def arrive(self, name: str, prompt: list[int], **params: object) -> None:
        self.feed(RequestArrived(name, tuple(prompt), SamplingParams(**params).resolved()))  # type: ignore[arg-type]

    def run(self) -> None:
        for _ in range(100_000):
            if not self.step():
                break
        assert self.core.idle, "the core stalled"
