"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.stats import DrafterReport, SpeculationStats
from paceline.core.work import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. cached_tokens: prompt tokens whose KV came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. load_s: from the engine's start to ready.  ttft_s: arrival to first token.  decode_s: first
    token to last.  tpot_s: `decode_s` per token after the first; None with fewer than two tokens."""

    load_s: float
    ttft_s: float | None = None
    decode_s: float | None = None
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One completion. `finish_reason` is stop, length, abort or error (then `error` says why and what
    helps; `engine_fault` that the cause is the engine's, not the request's); `index` counts the completions
    of one prompt; `seed` replays a sampled one."""

    request_id: str
    index: int
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    error: str | None
    usage: Usage
    timing: Timing
    drafter: str
    speculation: SpeculationStats
    model: str
    seed: int | None
    logprobs: list[TokenLogprobs] | None = None
    engine_fault: bool = False


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Bytes, of the target or of a drafter; see `DrafterReport`."""

    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    feature_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class LaneStats:
    """How target and drafter shared the time of an engine, all its requests together; `None` where there is
    nothing to tell yet.

    mode, placement: those in force (`paceline.config.GroupsConfig`).  target_passes, draft_passes: passes,
    the drafter's as far as the engine was told of them.  target_busy_s, draft_busy_s: seconds in them.
    sample_s: those of target_busy_s in which tokens were chosen from logits.  draft_advance_s: seconds, not
    part of draft_busy_s, in which drafters in the target's process took in tokens without guessing.
    target_gap_median_s, target_gap_p99_s: seconds from the end of a target pass to the start of the next,
    while requests ran.  draft_idle_share: share of the time with requests, in [0, 1], in which the drafter
    did nothing; in modes that keep guesses until they are asked for (swiftspec, discard, outcome-cache), of
    the time since it was there.  drafter_losses, drafter_joins: how often it was lost and came back.
    drafter_away: whether it is lost now; decoding goes on without it.  drafter_loss_reason: of the last loss.
    target_memory: the target's own.
    drafters: of each, how often it was asked, how far its confidence can be trusted, what it costs.
    drafted_by_distance: of a head beside the target, by how many of its own outputs in a row stood for hidden
    states of the target's: guesses judged, and right.
    """

    mode: str
    placement: str
    target_passes: int = 0
    target_busy_s: float = 0.0
    target_gap_median_s: float | None = None
    target_gap_p99_s: float | None = None
    draft_passes: int = 0
    draft_busy_s: float = 0.0
    draft_idle_share: float | None = None
    drafter_losses: int = 0
    drafter_joins: int = 0
    drafter_away: bool = False
    drafter_loss_reason: str | None = None
    drafters: tuple[DrafterReport, ...] = ()
    sample_s: float = 0.0
    draft_advance_s: float = 0.0
    target_memory: ModelMemory = field(default_factory=ModelMemory)
    drafted_by_distance: dict[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream. `output` is set on the last one."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    output: RequestOutput | None = None
