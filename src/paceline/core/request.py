"""One request from arrival to its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from paceline.core.lookup import Lookup
from paceline.core.mirror import DraftMirror
from paceline.core.params import SamplingParams
from paceline.core.planner import Acceptance
from paceline.core.prefix_cache import CacheNode
from paceline.core.stats import SpeculationStats
from paceline.core.token_tree import TokenTree
from paceline.core.work import RequestSummary


class Phase(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


_NOTHING = TokenTree()


@dataclass(slots=True)
class Told:
    """What one drafter knows of one request: how many tokens, and by which announcement it follows."""

    num_tokens: int = 0
    generation: int = 0


@dataclass(slots=True)
class Request:
    """Invariants: `slots[p]` holds the KV of `tokens[p]` for every `p < num_computed`; while running, the
    slots of positions from `num_cached_slots` on are the request's own, those before belong to the prefix
    cache (held through `cache_node`). The last token's KV is never computed yet: it is the next root.
    Positions below `num_forgotten` lie behind the attention window: their entries in `slots` are stale, held
    by nobody and seen by nobody.
    """

    request_id: str
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    arrived_at: float
    phase: Phase = Phase.WAITING
    row: int = -1
    slots: list[int] = field(default_factory=list)
    num_computed: int = 0
    cache_node: CacheNode | None = None
    num_cached_slots: int = 0
    num_forgotten: int = 0
    # How far the executor's copy of `slots` is right; a step sends the rest.
    num_mirrored: int = 0
    # Whether the executor (and the drafter) must first be told the whole request, as after preemption.
    announced: bool = False
    # What each drafter that follows it has been told.
    told: dict[int, Told] = field(default_factory=dict)
    # What the drafter has grown below the root, where it works ahead; None until it follows this request.
    mirror: DraftMirror | None = None
    lookup: Lookup | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)
    # What the next pass verifies; None = not decided yet.
    proposal: TokenTree | None = None
    in_flight: bool = False
    ended: FinishReason | None = None
    prefix_hit: int | None = None
    num_preemptions: int = 0
    first_token_at: float | None = None
    last_token_at: float | None = None
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def guesses(self) -> TokenTree:
        return self.proposal if self.proposal is not None else _NOTHING

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> Sequence[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose KV is missing: 1 while decoding (the root), more while prefilling."""
        return len(self.tokens) - self.num_computed

    @property
    def decoding(self) -> bool:
        return self.num_computed == len(self.tokens) - 1 and self.num_output > 0

    def tokens_left(self, context_length: int) -> int:
        """How many tokens may still be emitted."""
        left = context_length - len(self.tokens)
        if self.params.max_tokens is not None:
            left = min(left, self.params.max_tokens - self.num_output)
        return left

    def summary(self) -> RequestSummary:
        first, last = self.first_token_at, self.last_token_at
        return RequestSummary(
            num_cached_tokens=self.prefix_hit or 0,
            num_preemptions=self.num_preemptions,
            speculation=self.speculation,
            ttft_s=None if first is None else first - self.arrived_at,
            decode_s=None if first is None or last is None else last - first,
        )
