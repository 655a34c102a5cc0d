"""What it takes that somebody listens: the same requests through `LLM.generate` and as streams of `AsyncLLM`,
whose readers want the processor while the next pass runs."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from paceline.config import Config
from paceline.core.params import SamplingParams
from paceline.engine.async_llm import AsyncLLM
from paceline.engine.llm import LLM
from paceline.profiling.nnls import nonnegative
from paceline.profiling.rig import GREEDY

_LONGEST_PROMPT = 32
_RUNS = 3
_TURNS = 2
"""Both are started so often, one after the other, so that a machine that changes its pace favours none."""


def streaming_s(
    config: Config, tokens: Sequence[int], batches: Sequence[int], length: int, tell: Callable[[], None]
) -> tuple[float, float]:
    """Seconds per step, and per request that takes part in it, by which streams are slower.

    config: without a drafter, and without a cache of prefixes.  length: of each output.
    """
    params = replace(GREEDY, max_tokens=length)
    alone: dict[int, list[float]] = {batch: [] for batch in batches}
    streamed: dict[int, list[float]] = {batch: [] for batch in batches}
    for _ in range(_TURNS):
        with LLM(config=config) as llm:
            _measure(llm, partial(llm.generate, params=params), tokens, alone, tell)
        engine = AsyncLLM(config=config)
        try:
            _measure(engine.llm, partial(_stream, engine, params), tokens, streamed, tell)
        finally:
            engine.close()
    # Relative to the step, as it counts: those of large batches vary by more than streams take.
    usual = np.array([statistics.median(alone[batch]) for batch in batches])
    slower = np.array([statistics.median(streamed[batch]) for batch in batches]) - usual
    rows = np.array([[1.0, batch] for batch in batches]) / usual[:, None]
    step, request = nonnegative(rows, np.maximum(slower, 0.0) / usual).tolist()
    return step, request


def _measure(
    llm: LLM,
    run: Callable[[list[list[int]]], object],
    tokens: Sequence[int],
    found: dict[int, list[float]],
    tell: Callable[[], None],
) -> None:
    """Seconds of a step, in the mean over a run."""
    run([list(tokens[:_LONGEST_PROMPT])])  # whoever comes first makes room
    passes = llm.engine.timeline.target
    for batch, seconds in found.items():
        prompts = [list(tokens[row : row + _LONGEST_PROMPT]) for row in range(batch)]
        for _ in range(_RUNS):
            tell()
            before, began = passes.count, time.perf_counter()
            run(prompts)
            seconds.append((time.perf_counter() - began) / max(passes.count - before, 1))


def _stream(engine: AsyncLLM, params: SamplingParams, prompts: Sequence[list[int]]) -> None:
    asyncio.run(_all(engine, prompts, params))


async def _all(engine: AsyncLLM, prompts: Sequence[list[int]], params: SamplingParams) -> None:
    async def drained(prompt: list[int]) -> None:
        async for _ in engine.stream(prompt, params):
            pass

    await asyncio.gather(*(drained(prompt) for prompt in prompts))
