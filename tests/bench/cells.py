"""Cells made up for tests."""

from __future__ import annotations

from typing import Any

from paceline.bench.records import Cell, Memory, RequestRecord, TimeShares
from paceline.core.stats import SpeculationStats


def request(
    prompt: str = "p/0", *, step_s: float = 0.1, chunks: tuple[int, ...] = (1, 3, 2), **more: Any
) -> RequestRecord:
    """A request whose first token comes after 0.5 s and whose steps take `step_s`."""
    times = [0.5 + step_s * at for at in range(len(chunks))]
    steps = len(chunks) - 1
    accepted = sum(chunks) - 1 - steps
    depths = [sum(1 for count in chunks[1:] if count > depth + 1) for depth in range(max(chunks) - 1)]
    fields: dict[str, Any] = {
        "arrival_s": 0.0,
        "first_token_s": times[0],
        "end_s": times[-1],
        "tokens": sum(chunks),
        "prompt_tokens": 9,
        "chunk_times_s": times,
        "chunk_tokens": list(chunks),
        "text": "text",
        "token_ids": list(range(sum(chunks))),
        "finish_reason": "length",
        "speculation": SpeculationStats(
            num_steps=steps,
            num_emitted_tokens=sum(chunks) - 1,
            num_drafts=steps,
            num_draft_tokens=3 * steps,
            num_accepted_tokens=accepted,
            accepted_by_depth=depths,
        ),
        "overlap": 0.3,
    }
    return RequestRecord(prompt=prompt, **(fields | more))


def plain_request(prompt: str = "p/0", *, step_s: float = 0.1, tokens: int = 6, **more: Any) -> RequestRecord:
    told = SpeculationStats(num_steps=tokens - 1, num_emitted_tokens=tokens - 1)
    return request(prompt, step_s=step_s, chunks=(1,) * tokens, **({"speculation": told} | more))


def cell(contender: str = "ngram", requests: list[RequestRecord] | None = None, **more: Any) -> Cell:
    fields: dict[str, Any] = {
        "key": "k",
        "contender": contender,
        "workload": "chat",
        "batch": 1,
        "rate": None,
        "burstiness": 1.0,
        "repeat": 0,
        "duration_s": 2.0,
        "requests": [request()] if requests is None else requests,
        "shares": TimeShares(draft_s=0.2, verify_s=1.0, sample_s=0.1, idle_s=0.2),
        "memory": [Memory(name="target", weight_bytes=1000, kv_bytes_per_token=8)],
        "rss_before": 100,
        "rss_peak": 300,
        "stood_still_s": 0.06,
        "max_guesses": 3,
    }
    return Cell(**(fields | more))
