"""Texts in one ring of tokens, and where each of their n-grams ended: chains through the ring, as a
compressor's window has (RFC 1951, section 4), for n-grams of a few lengths.

A suffix tree answers "how often did this context occur, and what came next" from its nodes. The same counts
are had here from the places themselves: the chain of the longest n-gram at hand names them, the latest first,
and comparing backwards from each says how much more than the n-gram it shares with the context. Adding a
token writes one number per length, dropping the oldest text moves a floor, and memory is that of the arrays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

GRAMS = (1, 4, 16)
"""Lengths with a chain of their own: powers of two, so that hashes add up."""
NO_TOKEN = -1
"""Between texts, and after the last one."""

_MULTIPLIER = 0xD6E8FEB86659FD93
_SPREAD = 0x9E3779B97F4A7C15
_OWNER = 0xA0761D6478BD642F
_WORD = 2**64 - 1
_HALF = 2**32 - 1
_FEW = 24
"""Tokens up to which one after the other is faster than all at once."""
_COST_OF_ONE, _COST_OF_MANY = 16, 384
"""By themselves, and of beginning with many at once: in tokens of many at once, as measured."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Context:
    """The end of a text: what is looked for. reversed: its last tokens, the last first, to the depth looked
    at, and beyond them one that no text has.  hashes: of its last n-grams of the lengths that it has."""

    reversed: npt.NDArray[np.int32]
    hashes: list[int]

    @classmethod
    def of(cls, tokens: Sequence[int], depth: int) -> Context:
        tail = list(tokens[-depth:])[::-1]
        return cls(np.array([*tail, *[-2] * (depth + 1 - len(tail))], dtype=np.int32), hashes_of(tail))


def tokens_of(row: bytes) -> list[int]:
    return memoryview(row).cast("i").tolist()


def hashes_of(tail: Sequence[int]) -> list[int]:
    """Of the first so many of `tail`, the last token of a text first, for each of `GRAMS`."""
    hashes, value, weight = [], 0, 1
    for count, token in enumerate(tail[: GRAMS[-1]], 1):
        value = (value + (token + 1) * weight) & _WORD
        weight = weight * _MULTIPLIER & _WORD
        if count in GRAMS:
            hashes.append(value)
    return hashes


@dataclass(frozen=True, slots=True)
class Places:
    """Where something followed the end of a context, the latest first: at places[i] stands the token next[i],
    and matched[i] of those before it are the context's."""

    places: Ints
    matched: list[int]
    next: list[int]


@dataclass(slots=True)
class _Text:
    """start: of its first token.  indexed: how far its n-grams are known."""

    start: int
    indexed: int
    end: int
    owner: int


class SuffixIndex:
    """Positions count all tokens ever written; the ring keeps the latest `capacity` of them, from `floor` on.

    depth: tokens of a context that are compared.  buckets: of each length's hash table, a power of two.
    growing: the ring grows instead of going round, for a single text.  owned: texts are told apart by owner.
    """

    def __init__(
        self, capacity: int, depth: int, buckets: int, *, growing: bool = False, owned: bool = False
    ) -> None:
        self.depth = depth
        self.grams = tuple(gram for gram in GRAMS if gram <= depth)
        self._shift = 64 - (buckets.bit_length() - 1)
        self._growing = growing
        # Zeros that nobody has touched take no memory.
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._owners = np.zeros(capacity if owned else 0, dtype=np.int32)
        self._back = [np.zeros(capacity, dtype=np.uint32) for _ in self.grams]
        self._heads = [np.zeros(buckets, dtype=np.uint32) for _ in self.grams]
        # Before the first token lie some that are none, so that comparing ends there.
        self.floor = self.end = depth + 1
        self._tokens[: self.end + 1] = NO_TOKEN
        self._pending: deque[_Text] = deque()
        self._offsets = np.arange(depth + 2)

    @staticmethod
    def bytes_per_token(depth: int, *, owned: bool) -> int:
        return 4 * (1 + owned + sum(gram <= depth for gram in GRAMS))

    @property
    def capacity(self) -> int:
        return len(self._tokens)

    @property
    def nbytes(self) -> int:
        """Of all arrays at their full length."""
        arrays = (self._tokens, self._owners, *self._back, *self._heads)
        return sum(array.nbytes for array in arrays)

    @property
    def room(self) -> int:
        """Tokens of a text that can be written before others must be dropped."""
        return len(self._tokens) - (self.end - self.floor) - self.depth - 3

    def begin(self, owner: int = 0) -> None:
        """A new text: what is written from here on does not follow what was written before."""
        self._tokens[self.end % len(self._tokens)] = NO_TOKEN
        self.end += 1
        self._pending.append(_Text(self.end, self.end + 1, self.end, owner))

    def write(self, tokens: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """More of the text begun last. Its n-grams are known once `catch_up` has come to them."""
        count = len(tokens)
        while self._growing and self.room < count:
            self._grow()
        size, at = len(self._tokens), self.end % len(self._tokens)
        if at + count < size:
            self._tokens[at : at + count] = tokens
            self._tokens[at + count] = NO_TOKEN
        else:
            places = np.arange(self.end, self.end + count + 1) % size
            self._tokens[places] = np.append(np.asarray(tokens, dtype=np.int32), NO_TOKEN)
        self.end += count
        self._pending[-1].end = self.end

    def catch_up(self, most: int) -> int:
        """Takes in n-grams of what was written before, at a cost of about `most` tokens of a long text; what
        it came to, 0 = there was nothing left."""
        cost = 0
        while self._pending and cost < most:
            text = self._pending[0]
            upto = min(text.end, text.indexed + most - cost)
            count = upto - text.indexed
            if count > 0:
                few = count <= _FEW
                (self._index_few if few else self._index_many)(text, upto)
                cost += count * _COST_OF_ONE if few else count + _COST_OF_MANY
                text.indexed = upto
            if text.indexed < text.end or len(self._pending) == 1:
                break  # the last one may go on
            self._pending.popleft()
        return cost

    def forget(self, before: int) -> None:
        """Drops all tokens below this position, where a text begins."""
        self.floor = before
        while self._pending and self._pending[0].end <= before:
            self._pending.popleft()

    # ------------------------------------------------------------ looking up

    def longest(self, level: int) -> int:
        """Tokens up to which a match is counted at `level`: there the next level takes over."""
        return self.grams[level + 1] - 1 if level + 1 < len(self.grams) else self.depth

    def places(self, context: Context, level: int, most: int, owner: int = 0) -> Places | None:
        """Where the context's last `grams[level]` tokens stand, of at most `most` places looked at. None if
        nowhere, or if the context is shorter."""
        found = self._chain(level, context.hashes[level], owner, most) if level < len(context.hashes) else []
        if not found:
            return None
        places = np.array(found)
        at = places[:, None] - self._offsets
        if self.end > len(self._tokens):
            at %= len(self._tokens)
        read = self._tokens[at]
        matched = (read[:, 1:] != context.reversed).argmax(axis=1)
        same = matched >= self.grams[level]
        if len(self._owners):
            same &= self._owners[places % len(self._tokens)] == owner
        if not same.all():
            places, matched, read = places[same], matched[same], read[same]
            if not len(places):
                return None
        return Places(places, np.minimum(matched, self.longest(level)).tolist(), read[:, 0].tolist())

    def following(self, places: Ints, count: int) -> list[bytes]:
        """`count` tokens from each place on, for `tokens_of`; after a `NO_TOKEN` nothing is meant."""
        at = (places[:, None] + np.arange(count)) % len(self._tokens)
        read, width = self._tokens[at].tobytes(), 4 * count
        return [read[start : start + width] for start in range(0, len(read), width)]

    def text(self, start: int, end: int) -> npt.NDArray[np.int32]:
        return self._tokens[np.arange(start, end) % len(self._tokens)]

    def _chain(self, level: int, value: int, owner: int, most: int) -> list[int]:
        """Places of all n-grams in one bucket of the hash table, the latest first."""
        bucket = ((value + owner * _OWNER) * _SPREAD & _WORD) >> self._shift
        head = self._heads[level].item(bucket)
        if head == 0:
            return []
        # Heads are positions plus one, of which the lower half is kept.
        place = self.end - ((self.end + 1 - head) & _HALF)
        back, size, floor = self._back[level], len(self._tokens), self.floor
        found: list[int] = []
        while place >= floor and len(found) < most:
            found.append(place)
            step = back.item(place % size)
            if step == 0:
                break
            place -= step
        return found

    # ------------------------------------------------------------ taking in

    def _index_few(self, text: _Text, upto: int) -> None:
        size, tokens = len(self._tokens), self._tokens
        window = range(max(text.start, text.indexed - GRAMS[-1]), upto)
        known = tokens[np.arange(window.start, upto) % size].tolist()
        for place in range(text.indexed, upto):
            stop = place - window.start
            tail = known[max(0, stop - GRAMS[-1]) : stop][::-1]
            if len(self._owners):
                self._owners[place % size] = text.owner
            for value, heads, back in zip(hashes_of(tail), self._heads, self._back, strict=False):
                bucket = ((value + text.owner * _OWNER) * _SPREAD & _WORD) >> self._shift
                head = heads.item(bucket)
                back[place % size] = (place + 1 - head) & _HALF if head else 0
                heads[bucket] = (place + 1) & _HALF

    def _index_many(self, text: _Text, upto: int) -> None:
        size = len(self._tokens)
        start = max(text.start, text.indexed - GRAMS[-1])
        values = self._tokens[np.arange(start, upto - 1) % size].astype(np.uint64) + np.uint64(1)
        if len(self._owners):
            self._owners[np.arange(text.indexed, upto) % size] = text.owner
        owner, weight = np.uint64(text.owner * _OWNER & _WORD), _MULTIPLIER
        length = 1
        for gram, heads, back in zip(self.grams, self._heads, self._back, strict=True):
            while length < gram:
                longer = values.copy()
                longer[length:] += values[:-length] * np.uint64(weight)
                values, weight, length = longer, weight * weight & _WORD, 2 * length
            first = max(text.indexed, text.start + gram)
            if first >= upto:
                return
            buckets = (values[first - 1 - start :] + owner) * np.uint64(_SPREAD) >> np.uint64(self._shift)
            _chained(buckets, np.arange(first, upto), heads, back)

    def _grow(self) -> None:
        assert self.end < len(self._tokens)
        self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._back = [np.concatenate([back, np.zeros_like(back)]) for back in self._back]


def _chained(
    buckets: npt.NDArray[np.uint64],
    places: Ints,
    heads: npt.NDArray[np.uint32],
    back: npt.NDArray[np.uint32],
) -> None:
    """Puts `places`, ascending, at the heads of their buckets' chains."""
    order = np.argsort(buckets, kind="stable")
    buckets, places = buckets[order], places[order]
    marks = (places + 1).astype(np.uint32)
    new = np.empty(len(buckets), dtype=bool)
    new[0] = True
    np.not_equal(buckets[1:], buckets[:-1], out=new[1:])
    before: Any = np.empty_like(marks)
    before[1:] = marks[:-1]
    before[new] = heads[buckets[new]]
    back[places % len(back)] = np.where(before == 0, 0, marks - before)
    last = np.append(new[1:], True)
    heads[buckets[last]] = marks[last]
