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


DraftRule = Callable[[list[int], DraftItem], TokenTree]


@dataclass
class ToyExecutor:
    """Runs work at once. kv[slot] is (position, token); an unwritten or foreign slot shows at once."""

    num_slots: int
    draft: DraftRule
    kv: dict[int, tuple[int, int]] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    seen: dict[str, list[int]] = field(default_factory=dict)
    steps: int = 0

    def run(self, work: Work) -> Event | None:
        match work:
            case RunTarget():
                self.steps += 1
                self._check_owners(work)
                return StepDone(work.step, tuple(v for item in work.items if (v := self._target(item))))
            case GrowDrafts():
                return DraftDone(work.round, tuple(self._grow(item) for item in work.items))
            case AdvanceDrafts():
                for item in work.items:
                    self._note(item)
            case Release():
                for request_id in work.request_ids:
                    self.tables.pop(request_id, None)
                    self.seen.pop(request_id, None)
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

    def _note(self, item: DraftItem) -> list[int]:
        known = self.seen.setdefault(item.request_id, [])
        assert item.start == len(known), "the drafter is out of step"
        assert (item.announcement is not None) == (item.start == 0)
        known.extend(item.tokens)
        return known

    def _grow(self, item: DraftItem) -> Proposal:
        known = self._note(item)
        tree = self.draft(known, item)
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

    def feed(self, event: Event) -> None:
        work = self.core.handle(event, now=float(len(self.log)))
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
