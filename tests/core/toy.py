"""An executor without a model: the next token is a hash of the prefix as read back *through the slots*,
so that a leaked, aliased or stale slot changes the output."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.core.engine_core import EngineCore
from paceline.core.token_tree import ROOT, TokenTree
from paceline.core.work import (
    AdvanceDrafts,
    DraftDone,
    DrafterLost,
    DraftItem,
    Event,
    GrowDrafts,
    Proposal,
    Release,
    RequestDelta,
    RunTarget,
    StepDone,
    TargetItem,
    Verdict,
    Work,
)

VOCAB = 17


def toy_next(prefix: Sequence[int], vocab: int = VOCAB) -> int:
    """The toy target: any change anywhere in the prefix changes the token."""
    return zlib.crc32(np.asarray(prefix, dtype=np.int32).tobytes()) % vocab


def toy_generate(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(toy_next(tokens))
    return tokens[len(prompt) :]


class Failed(Exception):
    """A drafter's end."""


DraftRule = Callable[[list[int], DraftItem], TokenTree]


@dataclass
class ToyExecutor:
    """Runs work at once. kv[slot] is (position, token); an unwritten or foreign slot shows at once.

    draft: of the first drafter; `others` of the next. What each was told is checked.  seconds: of a question,
    by drafter, requests and guesses in a row.  pass_s: what a token adds to the second of a pass."""

    num_slots: int
    draft: DraftRule
    others: Sequence[DraftRule] = ()
    seconds: Callable[[int, int, int], float] = lambda *_: 0.0
    pass_s: float = 0.0
    kv: dict[int, tuple[int, int]] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    seen: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    steps: int = 0

    def run(self, work: Work) -> Event | None:
        match work:
            case RunTarget():
                self.steps += 1
                self._check_owners(work)
                verdicts = tuple(v for item in work.items if (v := self._target(item)))
                size = sum(len(item.tokens) + len(item.tree_tokens) for item in work.items)
                return StepDone(work.step, verdicts, self.pass_s and 1.0 + self.pass_s * size)
            case GrowDrafts():
                return self._answer(work)
            case AdvanceDrafts():
                for item in work.items:
                    self._note(work.drafter, item)
            case Release():
                for request_id in work.request_ids:
                    self.tables.pop(request_id, None)
                    for drafter in range(1 + len(self.others)):
                        self.seen.pop((drafter, request_id), None)
        return None

    def _check_owners(self, work: RunTarget) -> None:
        written = [slot for item in work.items for slot in item.slots[item.start - item.slots_from :]]
        written += [slot for item in work.items for slot in item.tree_slots]
        assert len(written) == len(set(written)), "two tokens of one pass share a slot"
        assert all(0 <= slot < self.num_slots for slot in written)

    def _target(self, item: TargetItem) -> Verdict | None:
        if item.announcement is not None:
            self.tables[item.request_id] = []
        table = self.tables[item.request_id]
        assert item.slots_from <= len(table)
        table[item.slots_from :] = item.slots
        assert len(table) == item.start + len(item.tokens)
        for offset, token in enumerate(item.tokens):
            self.kv[table[item.start + offset]] = (item.start + offset, token)
        tree = TokenTree.build(item.tree_tokens, item.tree_parents)
        assert len(tree) == len(item.tree_slots), "equal siblings reached the target"
        for node, slot in enumerate(item.tree_slots):
            self.kv[slot] = (len(table) - 1 + tree.depths[node], tree.tokens[node])
        if not item.sample:
            return None
        path, tokens = tree.walk(lambda node: self._token_after(table, item, tree, node))
        return Verdict(item.request_id, tuple(path), tuple(tokens))

    def _token_after(self, table: list[int], item: TargetItem, tree: TokenTree, node: int) -> int:
        slots = table + [item.tree_slots[n] for n in (tree.path(node) if node != ROOT else [])]
        entries = [self.kv[slot] for slot in slots]
        assert [position for position, _ in entries] == list(range(len(slots)))
        return toy_next([token for _, token in entries])

    def lose(self, drafter: int) -> DrafterLost:
        """It knows nothing any more, and answers nothing."""
        self.lost.add(drafter)
        self.seen = {key: known for key, known in self.seen.items() if key[0] != drafter}
        return DrafterLost("it failed", drafter)

    def _note(self, drafter: int, item: DraftItem) -> list[int]:
        known = self.seen.setdefault((drafter, item.request_id), [])
        assert item.start == len(known), "the drafter is out of step"
        assert (item.announcement is not None) == (item.start == 0)
        known.extend(item.tokens)
        return known

    def _answer(self, work: GrowDrafts) -> Event:
        try:
            rule = [self.draft, *self.others][work.drafter]
            made = tuple(self._grow(work.drafter, rule, item) for item in work.items)
        except Failed:
            return self.lose(work.drafter)
        deepest = max(item.max_depth for item in work.items)
        seconds = self.seconds(work.drafter, len(work.items), deepest)
        return DraftDone(work.round, made, seconds, work.drafter)

    def _grow(self, drafter: int, rule: DraftRule, item: DraftItem) -> Proposal:
        known = self._note(drafter, item)
        tree = rule(known, item)
        return Proposal(
            item.request_id, len(known), tuple(tree.tokens), tuple(tree.parents), tuple(tree.scores)
        )


@dataclass
class Drive:
    """Feeds a core until it is idle, as an engine does. `interrupt` may inject events between steps."""

    core: EngineCore
    executor: ToyExecutor
    pending: deque[Work] = field(default_factory=deque)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, RequestDelta] = field(default_factory=dict)
    log: list[tuple[Event, list[Work]]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def feed(self, event: Event) -> None:
        took = getattr(event, "seconds", 0.0) or 1.0
        self.times.append(took + (self.times[-1] if self.times else 0.0))
        work = self.core.handle(event, self.times[-1])
        self.log.append((event, work))
        self.pending.extend(work)
        for delta in self.core.take_outputs():
            assert delta.request_id not in self.finished, "output after the end"
            self.tokens.setdefault(delta.request_id, []).extend(delta.tokens)
            if delta.finish_reason is not None:
                self.finished[delta.request_id] = delta

    def step(self) -> bool:
        if not self.pending:
            return False
        event = self.executor.run(self.pending.popleft())
        if event is not None:
            self.feed(event)
        return True

    def run(self) -> None:
        for _ in range(100_000):
            if not self.step():
                break
        assert self.core.idle, "the core stalled"
