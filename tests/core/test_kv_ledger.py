"""Random lives of sequences in one ledger: what is read through the slots is what was written for them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.kv_ledger import KVLedger
from paceline.core.prefix_cache import CacheNode

Entry = tuple[int, ...]


@dataclass(eq=False)
class Holder:
    """A sequence whose first `computed` tokens have KV, and nodes that hang below the last of them."""

    tokens: list[int]
    slots: list[int] = field(default_factory=list)
    cache_node: CacheNode | None = None
    num_cached_slots: int = 0
    num_forgotten: int = 0
    nodes: list[int] = field(default_factory=list)

    @property
    def own(self) -> list[int]:
        return self.slots[max(self.num_cached_slots, self.num_forgotten) :]


class Life:
    """`kv[slot]` is the text whose last token was computed into it: a foreign or stale slot shows at once."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ledger = KVLedger(self.rng.randrange(20, 60), prefix_cache=self.rng.random() < 0.9)
        self.holders: list[Holder] = []
        self.kv: dict[int, Entry] = {}

    def live(self, count: int) -> None:
        moves = [self.open, self.compute, self.compute, self.guess, self.accept, self.share, self.close]
        moves += [self.forget] if self.rng.random() < 0.5 else []
        for _ in range(count):
            self.rng.choice(moves)()
            self.check()
        while self.holders:
            self.close()
            self.check()
        self.ledger.cache.clear()
        assert self.ledger.pool.num_free == self.ledger.pool.num_slots

    def pick(self) -> Holder | None:
        return self.rng.choice(self.holders) if self.holders else None

    # ------------------------------------------------------------ moves

    def open(self) -> None:
        if len(self.holders) == 4:
            return
        text = [self.rng.randrange(2) for _ in range(self.rng.randrange(1, 15))]
        holder = Holder(text)
        self.ledger.open(holder, text[:-1])
        assert len(holder.slots) < len(text)
        self.holders.append(holder)

    def compute(self) -> None:
        holder = self.pick()
        if holder is None or holder.nodes:
            return
        if len(holder.slots) == len(holder.tokens):
            holder.tokens.append(self.rng.randrange(2))
        count = self.rng.randint(1, len(holder.tokens) - len(holder.slots))
        available = self.ledger.num_available
        slots = self.ledger.take(count)
        assert (slots is None) == (count > available)
        for slot in slots or []:
            holder.slots.append(slot)
            self.kv[slot] = tuple(holder.tokens[: len(holder.slots)])

    def guess(self) -> None:
        """Nodes, each below the one before, where all that is known is computed."""
        holder = self.pick()
        if holder is None or len(holder.slots) < len(holder.tokens):
            return
        for slot in self.ledger.take(self.rng.randint(1, 3)) or []:
            holder.nodes.append(slot)
            self.kv[slot] = (*holder.tokens, *(0 for _ in holder.nodes))

    def accept(self) -> None:
        """Some of the nodes become the holder's own, the others are nobody's."""
        holder = self.pick()
        if holder is None:
            return
        taken = self.rng.randint(0, len(holder.nodes))
        holder.slots += holder.nodes[:taken]
        holder.tokens += [0] * taken
        self.ledger.pool.release(holder.nodes[taken:])
        holder.nodes = []

    def share(self) -> None:
        holder = self.pick()
        if holder is not None:
            length = self.rng.randint(0, len(holder.slots))
            before, held = list(holder.slots), holder.num_cached_slots
            changed = self.ledger.share(holder, holder.tokens, length)
            assert holder.slots[:held] == before[:held]
            assert changed == (holder.slots != before)

    def forget(self) -> None:
        holder = self.pick()
        if holder is not None:
            self.ledger.forget(holder, self.rng.randint(0, len(holder.slots)))

    def close(self) -> None:
        holder = self.pick()
        if holder is None:
            return
        self.holders.remove(holder)
        self.ledger.pool.release(holder.nodes)
        self.ledger.close(holder, holder.tokens, self.rng.randint(0, len(holder.slots)))
        assert (holder.slots, holder.cache_node) == ([], None)

    # ------------------------------------------------------------ laws

    def check(self) -> None:
        pool, cache = self.ledger.pool, self.ledger.cache
        own = [slot for holder in self.holders for slot in holder.own + holder.nodes]
        cached = cached_slots(self.ledger)
        assert len(cached) == cache.size
        assert sorted(own + cached + pool._free) == list(range(pool.num_slots))
        for holder in self.holders:
            borrowed = holder.slots[: holder.num_cached_slots]
            assert set(borrowed) <= set(cached)
            for position in range(holder.num_forgotten, len(holder.slots)):
                assert self.kv[holder.slots[position]] == tuple(holder.tokens[: position + 1])


def cached_slots(ledger: KVLedger) -> list[int]:
    found, stack = [], [ledger.cache._root]
    while stack:
        node = stack.pop()
        found += node.slots
        stack += node.children.values()
    return found


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_every_slot_has_one_owner_and_holds_what_it_is_read_for(seed: int) -> None:
    Life(seed).live(80)


def test_a_shared_prefix_outlives_its_holder_and_is_evicted_for_those_in_need() -> None:
    ledger = KVLedger(6)
    first = Holder([1, 2, 3, 4])
    ledger.open(first, first.tokens[:-1])
    first.slots = ledger.take(4) or []
    ledger.close(first, first.tokens, 4)
    second = Holder([1, 2, 9])
    ledger.open(second, second.tokens[:-1])
    assert len(second.slots) == 2
    assert ledger.take(5) is None, "two are in use"
    assert len(ledger.take(4) or []) == 4
    assert ledger.num_available == 0


def test_what_lies_behind_the_window_is_let_go_once() -> None:
    ledger = KVLedger(8)
    holder = Holder([1, 2, 3, 4, 5])
    ledger.open(holder, [])
    holder.slots = ledger.take(5) or []
    ledger.forget(holder, 2)
    ledger.forget(holder, 1)
    ledger.forget(holder, 2)
    assert ledger.pool.num_free == 5
    assert not ledger.share(holder, holder.tokens, 5), "what is not whole is not shared"
    ledger.close(holder, holder.tokens, 5)
    assert ledger.pool.num_free == 8
