"""Where an engine's time went: drafting, verifying, sampling."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter

from paceline import LLM, SamplingParams
from tests.tiny import DRAFTED, ENGINE, write_random

PARAMS = SamplingParams(max_tokens=24, temperature=0.0)


def test_shares_of_a_draft_model(tmp_path: Path) -> None:
    target, draft = write_random(tmp_path / "target"), write_random(tmp_path / "draft", layers=1)
    with LLM(target, draft=draft, num_speculative_tokens=3, mode="serial-chain", **DRAFTED) as llm:
        began = perf_counter()
        llm.generate("hello hello hello", PARAMS)
        wall = perf_counter() - began
        lanes = llm.lanes
    assert 0 < lanes.sample_s < lanes.target_busy_s
    assert lanes.draft_busy_s > 0
    assert lanes.draft_advance_s > 0  # the prompt, taken in
    assert lanes.target_busy_s + lanes.draft_busy_s + lanes.draft_advance_s < wall


def test_memory_of_the_target(tmp_path: Path) -> None:
    """Keys and values of two layers, two heads of twelve numbers, four bytes each."""
    with LLM(write_random(tmp_path / "target"), draft="none", **ENGINE) as llm:
        llm.generate("hello", PARAMS)
        lanes = llm.lanes
    assert lanes.target_memory.kv_bytes_per_token == 2 * 2 * 2 * 12 * 4
    assert lanes.target_memory.weight_bytes > 0
    assert (lanes.draft_busy_s, lanes.draft_advance_s) == (0.0, 0.0)
