"""Outputs of the past, the latest of them, for whoever may learn from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.suffix_index import GRAMS, SuffixIndex

_BYTES_PER_TEXT = 200
"""Of what Python keeps of one: its place and its owner's."""


class SuffixCache:
    """At most `max_texts` outputs in at most `max_bytes` of memory: first in, first out.

    Texts are kept apart by `tenant`: what is looked up for one is found in its own only. A tenant without
    texts is forgotten.
    """

    def __init__(self, depth: int, max_texts: int, max_bytes: int) -> None:
        self._limits = depth, max_texts, max_bytes
        self._max_texts = max_texts
        self.num_added = 0
        """Texts, since the beginning."""
        levels = sum(gram <= depth for gram in GRAMS)
        # A sixth for the hash tables, down to a power of two.
        buckets = 1 << max(4, (max_bytes // (6 * 4 * levels)).bit_length() - 1)
        rest = max_bytes - buckets * 4 * levels - max_texts * _BYTES_PER_TEXT
        capacity = rest // SuffixIndex.bytes_per_token(depth, owned=True)
        self.index = SuffixIndex(max(capacity, 4 * depth + 16), depth, buckets, owned=True)
        self._texts: deque[tuple[int, int, str]] = deque()
        self._owners: dict[str, list[int]] = {}  # number, texts
        self._next_owner = 0

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def num_tokens(self) -> int:
        return sum(end - start for start, end, _ in self._texts)

    @property
    def max_bytes(self) -> int:
        """What it takes up once it is full. Until then memory is that of what was written."""
        return self.index.nbytes + self._max_texts * _BYTES_PER_TEXT

    def owner(self, tenant: str) -> int | None:
        """By which the index tells the tenant's texts from others; None if there are none."""
        entry = self._owners.get(tenant)
        return entry[0] if entry is not None else None

    def add(self, tokens: Sequence[int] | npt.NDArray[np.int32], tenant: str = "") -> None:
        """Makes room and writes the text; of one that leaves no room for others, its latest part. It is found
        once `catch_up` has come to it."""
        index = self.index
        tokens = tokens[-(index.capacity // 2) :]
        if len(tokens) < 2:
            return  # nothing follows anything
        while self._texts and (len(self._texts) >= self._max_texts or index.room <= len(tokens)):
            self._drop_oldest()
        owner = self._owners.get(tenant)
        if owner is None:
            self._next_owner = (self._next_owner + 1) % 2**31
            owner = self._owners[tenant] = [self._next_owner, 0]
        owner[1] += 1
        index.begin(owner[0])
        start = index.end
        index.write(tokens)
        self._texts.append((start, index.end, tenant))
        self.num_added += 1

    def catch_up(self, most: int) -> bool:
        """A share of the work that texts added before have left; whether some is still to be done."""
        return self.index.catch_up(most) > 0

    def emptied(self) -> SuffixCache:
        """One of the same limits that holds nothing."""
        return SuffixCache(*self._limits)

    def texts(self) -> Iterator[tuple[npt.NDArray[np.int32], str]]:
        """Each with its tenant, the oldest first."""
        for start, end, tenant in self._texts:
            yield self.index.text(start, end), tenant

    def _drop_oldest(self) -> None:
        _, end, tenant = self._texts.popleft()
        self.index.forget(self._texts[0][0] if self._texts else end)
        owner = self._owners[tenant]
        owner[1] -= 1
        if owner[1] == 0:
            del self._owners[tenant]
