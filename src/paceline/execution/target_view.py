"""What a drafter in the target's process may read of it: features and KV of the tokens it has computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from paceline.core.work import TargetItem
from paceline.execution.model_runner import ModelRunner
from paceline.execution.rows import taken
from paceline.kernels.batch import IntArray

Span = tuple[str, int, int]
"""Positions of a request: its id, the first of them, and their end."""


class TargetView(Protocol):
    """Between two passes of the target, on its thread. Slots are the target's: they are read, never kept."""

    @property
    def runner(self) -> ModelRunner: ...

    @property
    def capture(self) -> tuple[int, ...]:
        """The places in the residual stream that features hold, in the order of their columns."""
        ...

    def computed(self, request_id: str) -> int:
        """How many of the request's committed tokens can be read, from the first one on: all but the last
        known one. 0 for a request whose slots may be another's by now, until the target has it in a pass
        again."""
        ...

    def row(self, request_id: str) -> int:
        """The request's row of the runner's slot tables, right for the positions below `computed`."""
        ...

    def features(self, spans: Sequence[Span]) -> Tensor:
        """`[positions, num_captured, hidden]` in the KV dtype of all spans, one after the other, a copy.
        Raises ValueError for positions not below `computed`, or where the target captures nothing."""
        ...


@dataclass(slots=True)
class _Place:
    row: int
    computed: int
    step: int


class ComputedTokens:
    """Implements `TargetView` from the items of the passes alone.

    A request that is preempted leaves without a word: its slots may be evicted and written by others before
    the executor hears of it again. So a request's slots are its own for as long as no later pass has written
    one of them.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._places: dict[str, _Place] = {}
        self._users: dict[int, str] = {}
        self._known: dict[str, int] = {}  # what `computed` said since anything changed
        self._steps = 0
        self._written = np.zeros(runner.kv.num_slots, dtype=np.int64)  # by which step, of each slot
        windows = [layer.window for layer in runner.decoder.spec.layers]
        self._window = max(windows) if all(windows) else 0

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    @property
    def capture(self) -> tuple[int, ...]:
        return self._runner.decoder.capture

    def begin(self) -> None:
        """A pass begins; what the items of earlier ones wrote is older from now on."""
        self._steps += 1
        self._known.clear()

    def note(self, item: TargetItem) -> None:
        """The pass computes this item, whose slots are in the tables."""
        self._known.clear()
        end = item.start + len(item.tokens)
        self._places[item.request_id] = _Place(item.row, end, self._steps)
        self._users[item.row] = item.request_id
        self._written[self._runner.tables.rows[item.row, item.start : end]] = self._steps
        self._written[list(item.tree_slots)] = self._steps

    def accept(self, item: TargetItem, path: list[int]) -> None:
        """Nodes of the item's tree are committed: their slots are those of the positions that follow."""
        self._known.clear()
        place = self._places[item.request_id]
        self._runner.tables.write(place.row, place.computed, [item.tree_slots[node] for node in path])
        place.computed += len(path)

    def forget(self, request_id: str) -> None:
        self._known.clear()
        self._places.pop(request_id, None)

    def computed(self, request_id: str) -> int:
        known = self._known.get(request_id)
        if known is None:
            known = self._known[request_id] = self._count(request_id)
        return known

    def _count(self, request_id: str) -> int:
        place = self._places.get(request_id)
        if place is None or self._users[place.row] != request_id:
            return 0
        # What lies behind the window of every token to come may be anybody's.
        first = max(0, place.computed + 1 - self._window) if self._window else 0
        slots = self._runner.tables.rows[place.row, first : place.computed]
        return place.computed if (self._written[slots] <= place.step).all() else 0

    def row(self, request_id: str) -> int:
        return self._places[request_id].row

    def features(self, spans: Sequence[Span]) -> Tensor:
        kept = self._runner.kv.features
        for request_id, start, end in spans:
            if kept is None or not 0 <= start <= end <= self.computed(request_id):
                raise ValueError(
                    f"features of positions {start} to {end} of {request_id!r}: the target has computed "
                    f"{self.computed(request_id)} and captures {len(self.capture)} places"
                )
        assert kept is not None
        return taken(kept, np.concatenate([self._slots(*span) for span in spans]))

    def _slots(self, request_id: str, start: int, end: int) -> IntArray:
        return self._runner.tables.rows[self._places[request_id].row, start:end]
