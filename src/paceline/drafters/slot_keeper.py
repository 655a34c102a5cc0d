"""The KV slots of a drafter's sequences, kept by the rules of the target's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.core.growth import DraftTree
from paceline.core.kv_ledger import KVLedger
from paceline.core.token_tree import ROOT
from paceline.drafters.tree_drafter import DraftSequence
from paceline.execution.forward_batch import SlotTables


class SlotKeeper:
    """One token per slot, ids only, a radix cache of its own, for candidate models of every kind.

    A sequence that holds KV has a row of `tables` and is in `_holding`. `busy` are always the sequences of
    the current pass, which nothing is taken from.
    """

    lag = 0
    """How many positions a text has less than tokens."""

    def __init__(self, tables: SlotTables, num_slots: int) -> None:
        self._tables = tables
        self._ledger = KVLedger(num_slots)
        self._rows = list(range(len(tables.rows)))
        self._holding: dict[str, DraftSequence] = {}

    def _key(self, tokens: Sequence[int]) -> Sequence[int]:
        """What the radix cache knows the positions of a text by: equal keys, equal keys and values."""
        return tokens

    def _open(self, sequence: DraftSequence, busy: Sequence[DraftSequence], upto: int) -> None:
        """Gives a sequence that holds nothing a row and what is cached of its first `upto` positions."""
        if sequence.cache_node is not None:
            return
        if not self._rows:
            self._drop_kv(next(self._idle(busy)))
        sequence.row = self._rows.pop()
        self._ledger.open(sequence, self._key(sequence.tokens)[:upto])
        sequence.num_held = len(sequence.slots)
        self._tables.write(sequence.row, 0, sequence.slots)
        self._holding[sequence.request_id] = sequence

    def _take_known(self, sequence: DraftSequence, count: int, busy: Sequence[DraftSequence]) -> bool:
        slots = self._take(count, busy)
        self._append(sequence, slots or [])
        return slots is not None

    def _append(self, sequence: DraftSequence, slots: list[int]) -> None:
        self._tables.write(sequence.row, len(sequence.slots), slots)
        sequence.slots.extend(slots)

    def _take(self, count: int, busy: Sequence[DraftSequence]) -> list[int] | None:
        """Evicts cached prefixes first, then the KV of the request that was idle longest."""
        while (slots := self._ledger.take(count)) is None:
            idle = next(self._idle(busy), None)
            if idle is None:
                return None
            self._drop_kv(idle)
        return slots

    def _idle(self, busy: Sequence[DraftSequence]) -> Iterator[DraftSequence]:
        """Those that hold KV and take no part in the current pass, the longest idle first."""
        names = {sequence.request_id for sequence in busy}
        idle = [each for name, each in self._holding.items() if name not in names]
        return iter(sorted(idle, key=lambda each: each.last_use))

    def _share_prompt(self, sequence: DraftSequence) -> None:
        """Hands a prompt that is computed to the cache, for others to use while this request runs."""
        length = sequence.num_prompt - self.lag
        if sequence.num_cached_slots < length <= sequence.num_held:
            self._ledger.share(sequence, self._key(sequence.tokens), length)
            self._tables.write(sequence.row, 0, sequence.slots[:length])

    def _drop_kv(self, sequence: DraftSequence) -> None:
        """Without its KV a tree cannot grow on: it starts anew, below the next root. Below this one it would
        only take the KV back from who needs it now, and so on without end."""
        if sequence.cache_node is None:
            return
        self._ledger.pool.release(sequence.node_slots.values())
        self._ledger.close(sequence, self._key(sequence.tokens), sequence.num_held)
        self._rows.append(sequence.row)
        sequence.row, sequence.num_held, sequence.node_slots = -1, 0, {}
        sequence.draft, sequence.numbers = DraftTree(closed={ROOT}), []
        del self._holding[sequence.request_id]
