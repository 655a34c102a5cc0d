"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.stats import SpeculationStats
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
class Chunk:
    """A piece of a stream. `output` is set on the last one."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    output: RequestOutput | None = None
