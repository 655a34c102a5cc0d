"""What was seen of one cell, as it is kept in `cells.jsonl`."""

from __future__ import annotations

from msgspec import Struct

from paceline.core.stats import SpeculationStats
from paceline.sim.metrics import RequestTimes

STOOD_STILL_S = 1.0
"""A cell whose process stood still for longer has measured that."""
Place = tuple[str, int | None, float | None, float]
"""A workload and a load: everything of a cell but who and when."""


class RequestRecord(Struct, forbid_unknown_fields=True, kw_only=True):
    """One request. Times are seconds since the cell's start; see `RequestTimes`.

    prompt: its name.  token_ids: of the output; None = a server told no ids.  error: why it failed.
    speculation: of this request; None = a server told none.  overlap: `bench.overlap.overlap` of its prompt
    and output.
    """

    prompt: str
    arrival_s: float
    first_token_s: float | None = None
    end_s: float = 0.0
    tokens: int | None = None
    prompt_tokens: int | None = None
    chunk_times_s: list[float] = []
    chunk_tokens: list[int] = []
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    error: str | None = None
    speculation: SpeculationStats | None = None
    overlap: float | None = None

    @property
    def times(self) -> RequestTimes:
        return RequestTimes(
            self.arrival_s,
            self.first_token_s,
            self.end_s,
            self.tokens,
            self.chunk_times_s,
            self.chunk_tokens,
        )


class TimeShares(Struct, forbid_unknown_fields=True, kw_only=True):
    """Where the seconds of a cell went. draft: the drafter, where the target waits for it.  verify: target
    passes, those of prompts included, but for sample: tokens chosen from logits.  idle: no request was there.
    draft_beside: the drafter, while the target worked; no part of the sum. Everything else is overhead."""

    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    idle_s: float = 0.0
    draft_beside_s: float = 0.0

    @property
    def sum_s(self) -> float:
        return self.draft_s + self.verify_s + self.sample_s + self.idle_s


class Memory(Struct, forbid_unknown_fields=True, kw_only=True):
    """Bytes. name: "target", or the drafter's."""

    name: str
    weight_bytes: int
    kv_bytes_per_token: int
    feature_bytes_per_token: int = 0


class Cell(Struct, forbid_unknown_fields=True, kw_only=True):
    """key: of everything its figures depend on.  duration_s: from the first request's arrival to the last
    one's end.  shares, memory, rss: None or empty where a server tells nothing.  rss_before, rss_peak: bytes
    of this process and its children before the engine was made, and the most while the cell ran.
    stood_still_s: longest time in which this process did not run at all, as after a SIGSTOP.
    speculation: of the whole cell, where requests have none.  max_guesses: per verification, as configured.
    """

    key: str
    contender: str
    workload: str
    batch: int | None
    rate: float | None
    burstiness: float
    repeat: int
    duration_s: float
    requests: list[RequestRecord]
    shares: TimeShares | None = None
    memory: list[Memory] = []
    rss_before: int | None = None
    rss_peak: int | None = None
    stood_still_s: float | None = None
    speculation: SpeculationStats | None = None
    max_guesses: int | None = None
    load_s: float | None = None
    mode: str | None = None
    placement: str | None = None

    @property
    def disturbed(self) -> bool:
        return self.stood_still_s is not None and self.stood_still_s > STOOD_STILL_S

    @property
    def failed(self) -> bool:
        """Whether a request of it did."""
        return len(self.ended) < len(self.requests)

    @property
    def ended(self) -> list[RequestRecord]:
        """Those that ended well."""
        return [request for request in self.requests if request.error is None]

    @property
    def place(self) -> Place:
        return self.workload, self.batch, self.rate, self.burstiness

    def total_speculation(self) -> SpeculationStats | None:
        """None where nothing is known of guesses."""
        if self.speculation is not None:
            return self.speculation
        told = [request.speculation for request in self.ended if request.speculation is not None]
        if not told:
            return None
        total = SpeculationStats()
        for each in told:
            total.add(each)
        return total
