"""Where the shared data lies, if it does, and traces made up for tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.sim.acceptance import DrafterTrace, RequestTrace

_TRACES = Path("shared") / "data" / "traces"
_PLACES = [folder / _TRACES for start in (Path(__file__).resolve(), Path.cwd()) for folder in start.parents]
SHARED = next((place for place in [*_PLACES, Path.cwd() / _TRACES] if place.is_dir()), None)

needs_traces = pytest.mark.skipif(
    SHARED is None, reason="the published acceptance traces are not in shared/data/traces"
)


def published(dataset: str) -> Path:
    assert SHARED is not None
    return SHARED / f"acceptance_llama3.1-8b_{dataset}.jsonl"


def request(request_id: str, prompt: list[int], output: list[int], **accepted: list[int]) -> RequestTrace:
    drafters = {name: DrafterTrace(tuple(lengths)) for name, lengths in accepted.items()}
    return RequestTrace(request_id, tuple(prompt), tuple(output), drafters)
