"""A served engine whose executor is asked by hand: target passes and drafters' questions of chosen sizes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.params import SamplingParams
from paceline.core.token_tree import depths_of
from paceline.core.work import (
    AdvanceDrafts,
    Announcement,
    DraftDone,
    DrafterLost,
    DraftItem,
    GrowDrafts,
    Release,
    RunTarget,
    StepDone,
    TargetItem,
    Work,
)
from paceline.engine.engine import Engine
from paceline.errors import EngineError

GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True).resolved()
"""Resolved, as requests that are served are: filters left open would keep drafters off their fast way."""


@dataclass(slots=True)
class Text:
    """One request of the rig's own. Texts of one row are beginnings of the same tokens, and hold the same
    slots: whatever is written at a position is what was there."""

    name: str
    row: int
    tokens: Sequence[int]
    announced: bool = False
    computed: int = 0
    told: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """To a question. seconds: what it took.  levels, guesses: of what was answered, all requests together."""

    seconds: float
    levels: int = 0
    guesses: int = 0


class Rig:
    """row_tokens: slots of each row. Beyond those of all rows there is room for one pass's guesses."""

    def __init__(self, engine: Engine, row_tokens: int) -> None:
        self._engine = engine
        self._row_tokens = row_tokens
        self._spare = engine.core.config.limits.max_num_seqs * row_tokens
        self._asked = 0
        self.drafters = [needs.name for needs in engine.core.config.drafting.drafters]
        self._texts: dict[str, Text] = {}

    def text(self, name: str, row: int, tokens: Sequence[int]) -> Text:
        return self._texts.setdefault(name, Text(name, row, tokens))

    def release(self) -> None:
        self._do(Release(tuple(self._texts)))
        self._texts.clear()

    # ------------------------------------------------------------ the target

    def verify(self, texts: Sequence[Text], context: int, guesses: int) -> float:
        """Seconds of a pass over each text's token at `context` and a chain of guesses below it."""
        spare = iter(range(self._spare, self._spare + len(texts) * guesses))
        items = [
            self._item(text, context, 1, guesses=tuple(next(spare) for _ in range(guesses))) for text in texts
        ]
        return self._target(items)

    def read(self, texts: Sequence[Text], start: int, count: int, *, sample: bool = True) -> float:
        """Seconds of a pass over `count` tokens of each text from `start` on."""
        return self._target([self._item(text, start, count, sample=sample) for text in texts])

    def _item(
        self, text: Text, start: int, count: int, *, guesses: tuple[int, ...] = (), sample: bool = True
    ) -> TargetItem:
        announcement = None
        base = text.row * self._row_tokens
        first = start
        if not text.announced:
            announcement = Announcement(len(text.tokens), GREEDY, tuple(text.tokens))
            text.announced, first = True, 0
        text.computed = start + count
        return TargetItem(
            text.name,
            text.row,
            start,
            tuple(text.tokens[start : start + count]),
            first,
            tuple(range(base + first, base + start + count)),
            sample,
            tuple(text.tokens[start + count : start + count + len(guesses)]),
            tuple(range(-1, len(guesses) - 1)),
            guesses,
            announcement,
        )

    def _target(self, items: list[TargetItem]) -> float:
        self._asked += 1
        done = self._do(RunTarget(self._asked, tuple(items)))
        assert isinstance(done, StepDone)
        return done.seconds

    # ------------------------------------------------------------ drafters

    def ask(self, drafter: int, texts: Sequence[Text], guesses: int) -> Answer:
        """Tells each text's tokens up to the one after what the target has computed, and asks for guesses."""
        self._asked += 1
        items = tuple(self._draft_item(drafter, text, text.computed + 1, guesses) for text in texts)
        done = self._do(GrowDrafts(self._asked, items, drafter))
        self._check(drafter, done)
        assert isinstance(done, DraftDone)
        levels = [max(depths_of(each.parents), default=0) for each in done.proposals]
        made = sum(len(each.tokens) for each in done.proposals)
        return Answer(done.seconds, max(levels, default=0), made)

    def tell(self, drafter: int, texts: Sequence[Text]) -> Answer:
        """Tells what the target has computed; nothing is asked."""
        items = tuple(self._draft_item(drafter, text, text.computed, 0) for text in texts)
        began = time.perf_counter()
        self._check(drafter, self._do(AdvanceDrafts(items, drafter)))
        return Answer(time.perf_counter() - began)

    def unread(self, drafter: int, texts: Sequence[Text]) -> int:
        """What the next question tells it."""
        return sum(text.computed + 1 - text.told.get(drafter, 0) for text in texts)

    def _draft_item(self, drafter: int, text: Text, upto: int, guesses: int) -> DraftItem:
        start = text.told.get(drafter, 0)
        announcement = None if start else Announcement(len(text.tokens), GREEDY)
        text.told[drafter] = upto
        return DraftItem(
            text.name, start, tuple(text.tokens[start:upto]), guesses, guesses, announcement, text.row + 1
        )

    def _check(self, drafter: int, event: object) -> None:
        """Raises EngineError where it failed."""
        if isinstance(event, DrafterLost):
            name = self.drafters[drafter]
            raise EngineError(f"the drafter {name} failed while it was measured: {event.reason}")

    def _do(self, work: Work) -> object:
        executor = self._engine.executor
        executor.submit(work)
        return executor.poll()
