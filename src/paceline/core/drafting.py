"""How much to draft, per request and step. Every rule is lossless: it sees only committed tokens."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class DrafterNeeds:
    """What a drafter declares of itself.

    context_length: longest prefix it can extend, None = any.
    ingests_prompts: whether reading a prompt costs it a pass, so that it wants prompts chunk by chunk
    while the target prefills.
    learns_outputs: whether it is told the whole output of each request that ends well.
    """

    name: str
    context_length: int | None = None
    ingests_prompts: bool = False
    learns_outputs: bool = False


class DraftLength(Protocol):
    """Number of guesses wanted for one request, given how many requests decode in this step."""

    def wanted(self, batch_size: int) -> int: ...


@dataclass(frozen=True, slots=True)
class FixedLength:
    num_speculative_tokens: int

    def wanted(self, batch_size: int) -> int:  # noqa: ARG002 - fixed is the point
        return self.num_speculative_tokens


@dataclass(frozen=True, slots=True)
class LengthByBatchSize:
    """A table of (smallest batch size, length), ascending, as vLLM's `num_speculative_tokens_per_batch_size`;
    0 below its first row."""

    table: tuple[tuple[int, int], ...]

    def wanted(self, batch_size: int) -> int:
        place = bisect_right(self.table, batch_size, key=lambda row: row[0])
        return self.table[place - 1][1] if place else 0
