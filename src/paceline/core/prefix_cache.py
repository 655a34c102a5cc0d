"""Prefix sharing: a radix tree over committed tokens. Rejected guesses never enter it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from paceline.core.slots import SlotPool


class CacheNode:
    """An edge of the radix tree: `tokens` below `parent`, with the slots that hold their KV.

    users: requests whose prefix ends at this node or below. Only nodes without users may be evicted.
    """

    __slots__ = ("children", "last_use", "parent", "serial", "slots", "tokens", "users")

    def __init__(self, tokens: list[int], slots: list[int], parent: CacheNode | None, serial: int) -> None:
        self.tokens = tokens
        self.slots = slots
        self.parent = parent
        self.children: dict[int, CacheNode] = {}
        self.users = 0
        self.last_use = 0
        self.serial = serial  # breaks ties, so that eviction replays identically


class PrefixCache:
    """Owns the slots of every token sequence it holds; requests borrow them by locking a node."""

    def __init__(self, pool: SlotPool, *, enabled: bool = True) -> None:
        self._pool = pool
        self._enabled = enabled
        self._root = CacheNode([], [], None, 0)
        self._clock = 0
        self._serial = 0
        self._idle = 0
        self.size = 0

    @property
    def num_evictable(self) -> int:
        """Slots held by nodes without users."""
        return self._idle

    def match(self, tokens: Sequence[int]) -> tuple[CacheNode, list[int]]:
        """Locks the longest cached prefix of `tokens`; returns its node and its slots.

        The caller unlocks the node when its request lets go.
        """
        node, slots, at = self._root, [], 0
        while at < len(tokens) and (child := node.children.get(tokens[at])) is not None:
            shared = _common(child.tokens, tokens, at)
            if shared < len(child.tokens):
                child = self._split(child, shared)
            slots.extend(child.slots)
            at += shared
            node = child
        self.lock(node)
        return node, slots

    def insert(
        self, tokens: Sequence[int], slots: Sequence[int], held: CacheNode, held_len: int
    ) -> tuple[CacheNode, list[int], int]:
        """Hands the caller's own slots `slots[held_len:]` over to the cache.

        held: the node the caller has locked, covering `tokens[:held_len]`; the lock moves to the returned
        node. Returns it, the slots that now stand for `tokens` (where the cache already had a token, its
        slot replaces the caller's, which goes back to the pool), and how many of them the cache owns:
        all, or the `held_len` of before when the cache is switched off.
        """
        if not self._enabled:
            return held, list(slots), held_len
        node, at = held, held_len
        result = list(slots)
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                child = self._attach(node, list(tokens[at:]), list(slots[at:]))
                at = len(tokens)
            else:
                shared = _common(child.tokens, tokens, at)
                if shared < len(child.tokens):
                    child = self._split(child, shared)
                self._pool.release(result[at : at + shared])
                result[at : at + shared] = child.slots
                at += shared
            node = child
        self.lock(node)
        self.unlock(held)
        return node, result, len(tokens)

    def lock(self, node: CacheNode) -> None:
        self._clock += 1
        walk: CacheNode | None = node
        while walk is not None:
            if walk.users == 0:
                self._idle -= len(walk.slots)
            walk.users += 1
            walk.last_use = self._clock
            walk = walk.parent

    def unlock(self, node: CacheNode) -> None:
        walk: CacheNode | None = node
        while walk is not None:
            walk.users -= 1
            if walk.users == 0:
                self._idle += len(walk.slots)
            walk = walk.parent

    def evict(self, count: int) -> None:
        """Returns at least `count` slots to the pool if that many are evictable, oldest leaves first."""
        leaves = [(node.last_use, node.serial, node) for node in self._leaves()]
        heapq.heapify(leaves)
        freed = 0
        while freed < count and leaves:
            _, _, node = heapq.heappop(leaves)
            parent = node.parent
            assert parent is not None
            freed += len(node.slots)
            self._pool.release(node.slots)
            self.size -= len(node.slots)
            self._idle -= len(node.slots)
            del parent.children[node.tokens[0]]
            if not parent.children and parent.users == 0 and parent is not self._root:
                heapq.heappush(leaves, (parent.last_use, parent.serial, parent))

    def clear(self) -> None:
        """Drops everything no request uses."""
        self.evict(self._idle)

    def _leaves(self) -> list[CacheNode]:
        found, stack = [], list(self._root.children.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            elif node.users == 0:
                found.append(node)
        return found

    def _make(self, tokens: list[int], slots: list[int], parent: CacheNode) -> CacheNode:
        self._serial += 1
        return CacheNode(tokens, slots, parent, self._serial)

    def _attach(self, parent: CacheNode, tokens: list[int], slots: list[int]) -> CacheNode:
        node = self._make(tokens, slots, parent)
        parent.children[tokens[0]] = node
        self.size += len(slots)
        self._idle += len(slots)
        return node

    def _split(self, node: CacheNode, at: int) -> CacheNode:
        """Cuts an edge in two; returns the upper part. Users of the old node use both parts."""
        parent = node.parent
        assert parent is not None
        upper = self._make(node.tokens[:at], node.slots[:at], parent)
        upper.users, upper.last_use = node.users, node.last_use
        parent.children[upper.tokens[0]] = upper
        node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], upper
        upper.children[node.tokens[0]] = node
        return upper


def _common(edge: list[int], tokens: Sequence[int], at: int) -> int:
    """Length of the common prefix of `edge` and `tokens[at:]`."""
    length = min(len(edge), len(tokens) - at)
    if edge[:length] == list(tokens[at : at + length]):
        return length
    low, high = 0, length  # edge[:low] agrees, edge[:high] does not
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == list(tokens[at + low : at + middle]):
            low = middle
        else:
            high = middle
    return low
