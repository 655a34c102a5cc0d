"""Traces of the embedded model say what an engine on it would have accepted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.config import load_config
from paceline.core.work import Announcement, DraftItem
from paceline.drafters.ngram import NgramDrafter
from paceline.sim.acceptance import RequestTrace, TraceSet, read_traces
from paceline.tracing.pipeline import TracePlan, trace
from paceline.tracing.replayed import replayed
from tests.tracing.support import assert_recorded, steps_of

pytestmark = pytest.mark.model

TEXTS = (
    "What is the capital of France?",
    "Repeat this: def f(x):\n    return x + 1\n\ndef g(x):\n    return x + 2\n",
    "A box has 3 rows of 4 eggs. How many eggs are there in 5 boxes?",
)
OPTIONS = {"model": "embedded", "dtype": "int8", "threads": 1, "context_length": 512}
PARAMS = SamplingParams(max_tokens=40)
DRAFTERS = ("eagle3", "suffix", "ngram", "layers")


@pytest.fixture(scope="module", params=[0.0, 0.7], ids=["greedy", "sampled"])
def params(request: pytest.FixtureRequest) -> SamplingParams:
    return replace(PARAMS, temperature=request.param)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, params: SamplingParams) -> TraceSet:
    folder = tmp_path_factory.mktemp("real")
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS), encoding="utf-8")
    config = load_config(options={**OPTIONS, "draft": "+".join(DRAFTERS)})
    trace(TracePlan(config, data, params), folder / "traces.jsonl")
    return read_traces(folder / "traces.jsonl")


@pytest.mark.parametrize("name", ["eagle3", "ngram", "layers"])
def test_a_trace_says_what_a_run_accepts(
    tmp_path: Path, found: TraceSet, params: SamplingParams, name: str
) -> None:
    prompts = [each.prompt for each in found.requests]
    seeded = [replace(params, seed=number) for number in range(len(prompts))]
    texts, steps = steps_of(tmp_path, prompts, seeded, draft=name, num_speculative_tokens=4, **OPTIONS)
    accepted = [
        assert_recorded(each, name, 4, text, visited)
        for each, text, visited in zip(found.requests, texts, steps, strict=True)
    ]
    assert sum(accepted) > 0 or (name, params.temperature) == ("layers", 0.7)


def test_lookup_is_replayed_from_token_ids(found: TraceSet) -> None:
    for request in found.requests:
        assert request.drafters["ngram"].accepted == looked_up(request)


def looked_up(request: RequestTrace) -> tuple[int, ...]:
    drafter, text = NgramDrafter(), (*request.prompt, *request.output)
    told, start, accepted = Announcement(len(request.prompt), SamplingParams()), 0, [1]
    for known in range(len(request.prompt) + 1, len(text)):
        item = DraftItem("r", start, text[start:known], 20, 20, told if start == 0 else None)
        (proposal,) = drafter.grow([item])
        start, right = known, 0
        for guess, token in zip(proposal.tokens, text[known:], strict=False):
            if guess != token:
                break
            right += 1
        accepted.append(min(right + 1, len(text) - known))
    return tuple(accepted)


def test_its_event_log_is_simulated_to_identical_work(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    with LLM(draft="ngram+eagle3", record=log, max_num_seqs=2, **OPTIONS) as llm:
        prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in TEXTS]
        outputs = llm.generate(prompts, PARAMS)
    times = [each.times for each in replayed(log).requests]
    assert sorted(each.tokens or 0 for each in times) == sorted(len(each.token_ids) for each in outputs)
