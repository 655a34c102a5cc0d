"""Which KV slots a sequence holds: one ledger for the target's requests and a draft model's sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.core.prefix_cache import CacheNode, PrefixCache
from paceline.core.slots import SlotPool


class SlotHolder(Protocol):
    """A sequence with KV. `slots[p]` is position p's; those below `num_cached_slots` belong to the prefix
    cache (held through `cache_node`), those below `num_forgotten` to nobody, the others are its own."""

    slots: list[int]
    cache_node: CacheNode | None
    num_cached_slots: int
    num_forgotten: int


class KVLedger:
    """Accepting, re-rooting and rejecting move slot ids between holders and pool; no key or value moves."""

    def __init__(self, num_slots: int, *, prefix_cache: bool = True) -> None:
        self.pool = SlotPool(num_slots)
        self.cache = PrefixCache(self.pool, enabled=prefix_cache)

    @property
    def num_available(self) -> int:
        """Free slots and those of cached prefixes that nobody uses."""
        return self.pool.num_free + self.cache.num_evictable

    def take(self, count: int) -> list[int] | None:
        """`count` slots, for which cached prefixes that nobody uses are evicted; None (and nothing taken) if
        that is not enough."""
        if count > self.pool.num_free:
            self.cache.evict(count - self.pool.num_free)
        return self.pool.allocate(count)

    def open(self, holder: SlotHolder, tokens: Sequence[int]) -> None:
        """Gives a holder of nothing the longest cached prefix of `tokens`."""
        holder.cache_node, holder.slots = self.cache.match(tokens)
        holder.num_cached_slots, holder.num_forgotten = len(holder.slots), 0

    def share(self, holder: SlotHolder, tokens: Sequence[int], length: int) -> bool:
        """Hands the first `length` computed tokens over to the prefix cache, unless some are forgotten.

        True when slots from `num_cached_slots` (as it was) on may have changed: equal tokens that the cache
        had already replace the holder's.
        """
        held = holder.num_cached_slots
        if length <= held or holder.num_forgotten:
            return False
        assert holder.cache_node is not None
        before = holder.slots[held:length]
        holder.cache_node, holder.slots[:length], holder.num_cached_slots = self.cache.insert(
            tokens[:length], holder.slots[:length], holder.cache_node, held
        )
        return holder.slots[held:length] != before

    def forget(self, holder: SlotHolder, unseen: int) -> None:
        """Lets go of the positions below `unseen`: own slots return to the pool, a cached prefix may be
        evicted once none of it is seen."""
        if unseen <= max(holder.num_forgotten, holder.num_cached_slots):
            return
        self.pool.release(holder.slots[max(holder.num_forgotten, holder.num_cached_slots) : unseen])
        if holder.num_cached_slots:
            assert holder.cache_node is not None
            self.cache.unlock(holder.cache_node)
            holder.cache_node, holder.num_cached_slots = self.cache.match(())[0], 0
        holder.num_forgotten = unseen

    def close(self, holder: SlotHolder, tokens: Sequence[int], num_shared: int) -> None:
        """Takes everything from the holder; its first `num_shared` tokens stay in the prefix cache."""
        self.share(holder, tokens, num_shared)
        assert holder.cache_node is not None
        self.cache.unlock(holder.cache_node)
        self.pool.release(holder.slots[max(holder.num_cached_slots, holder.num_forgotten) :])
        holder.slots, holder.cache_node = [], None
        holder.num_cached_slots = holder.num_forgotten = 0
