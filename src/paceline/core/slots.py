"""The ledger of KV slots: one token per slot, ids only."""

from __future__ import annotations

from collections.abc import Iterable


class SlotPool:
    """Every slot is either free or owned by exactly one of: a request, a tree node, the prefix cache.

    Frees and allocations that would break this raise instead of spreading.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._owned = bytearray(num_slots)
        # Popped from the end, so kept descending: requests get ascending runs and reads stay contiguous.
        self._free = list(range(num_slots - 1, -1, -1))
        self._scattered = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` slots, ascending where the pool allows it; None (and nothing taken) if too few are free."""
        if count > len(self._free):
            return None
        if self._scattered > 256:
            self._free.sort(reverse=True)
            self._scattered = 0
        cut = len(self._free) - count
        slots = self._free[cut:][::-1]
        del self._free[cut:]
        for slot in slots:
            self._owned[slot] = 1
        return slots

    def release(self, slots: Iterable[int]) -> None:
        """Raises ValueError on a slot that is free already or out of range."""
        before = len(self._free)
        for slot in slots:
            if not 0 <= slot < self.num_slots or not self._owned[slot]:
                raise ValueError(f"slot {slot} is not owned")
            self._owned[slot] = 0
            self._free.append(slot)
        freed = len(self._free) - before
        # Short frees (rejected nodes) go back in order, so that the next round reuses the same run.
        self._free[before:] = self._free[before:][::-1]
        self._scattered += freed if freed > 8 else 1
