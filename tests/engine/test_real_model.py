"""The main path on the embedded model: speculation changes the speed and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import LLM, RequestOutput, SamplingParams
from paceline.engine.replay import replay

pytestmark = pytest.mark.model

EDIT = (
    "Add a docstring to this function and return all of it.\n\n"
    "def moving_average(values, width):\n    total = sum(values[:width])\n    averages = [total / width]\n"
    "    for i in range(width, len(values)):\n        total += values[i] - values[i - width]\n"
    "        averages.append(total / width)\n    return averages\n"
)
QUESTIONS = [
    EDIT,
    "What is the capital of France, and what is it known for?",
    "Tom has 3 boxes with 12 apples each and gives away 7 apples. How many are left? Think step by step.",
    "Write three sentences about the sea.",
]
NEW_TOKENS = 32


def run(llm: LLM, temperature: float, k: int | None, **more: object) -> list[RequestOutput]:
    prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in QUESTIONS]
    params = [
        SamplingParams(
            max_tokens=NEW_TOKENS, temperature=temperature, seed=index, num_speculative_tokens=k, **more
        )  # type: ignore[arg-type]
        for index in range(len(prompts))
    ]
    return llm.generate(prompts, params)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(dtype: str) -> dict[float, list[list[int]]]:
    """Token ids without a drafter, one request at a time."""
    with LLM(draft="none", dtype=dtype, max_num_seqs=1) as llm:
        return {t: [output.token_ids for output in run(llm, t, None)] for t in (0.0, 0.8)}


@pytest.fixture(scope="module", params=itertools.product(["ngram", "embedded"], [1, 4]), ids=str)
def speculative(request: pytest.FixtureRequest, dtype: str) -> Iterator[LLM]:
    draft, batch = request.param
    weights = {"draft_dtype": "int8"} if draft == "embedded" else {}
    with LLM(draft=draft, dtype=dtype, max_num_seqs=batch, **weights) as llm:
        yield llm


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("k", [1, 3, 5, 8])
def test_tokens_equal_plain_decoding(
    speculative: LLM, plain: dict[float, list[list[int]]], temperature: float, k: int
) -> None:
    outputs = run(speculative, temperature, k)
    assert [output.token_ids for output in outputs] == plain[temperature]
    accepted = [output.speculation.num_accepted_tokens for output in outputs]
    assert sum(accepted) > 0, "nothing was ever accepted: equality would prove little"


def test_processors_act_along_every_path() -> None:
    """Penalties, bias, bad words, minimum length and filters give the same tokens for every k."""
    more = {
        "frequency_penalty": 0.7,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.02,
        "logit_bias": {253: 2.0},
        "bad_words": ["the", "is"],
        "min_tokens": 20,
    }
    with LLM(draft="ngram", dtype="float32") as llm:
        texts = {
            k: [output.token_ids for output in run(llm, temperature, k, **more)]
            for temperature in (0.0, 0.8)
            for k in (0, 2, 6)
        }
        assert texts[0] == texts[2] == texts[6]
        words = [llm.tokenizer.decode(ids) for ids in texts[6]]
    assert not any(" the " in text or " is " in text for text in words)


def test_a_recorded_run_replays_to_identical_work(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    with LLM(draft="ngram", dtype="bfloat16", max_num_seqs=2, record=log) as llm:
        run(llm, 0.8, 5, stop=["apples", "sea"])
    assert replay(log) > 20


def test_prompts_cut_into_chunks_give_the_same_tokens() -> None:
    outputs = {}
    for budget in (8, 64, 512):
        with LLM(draft="ngram", dtype="bfloat16", max_batch_tokens=budget, max_num_seqs=4) as llm:
            outputs[budget] = [output.token_ids for output in run(llm, 0.8, 3)]
    assert outputs[8] == outputs[64] == outputs[512]


def test_preemption_and_prefix_hits_change_nothing() -> None:
    with LLM(draft="embedded", draft_dtype="int8", dtype="bfloat16") as roomy:
        expected = [output.token_ids for output in run(roomy, 0.8, 4)]
        again = run(roomy, 0.8, 4)
    assert [output.token_ids for output in again] == expected
    assert all(output.usage.cached_tokens >= output.usage.prompt_tokens - 1 for output in again)
    with LLM(draft="embedded", draft_dtype="int8", dtype="bfloat16", kv_tokens=260) as tight:
        assert [output.token_ids for output in run(tight, 0.8, 4)] == expected


def test_n_completions_have_seeds_of_their_own() -> None:
    with LLM(draft="ngram", dtype="bfloat16") as llm:
        params = SamplingParams(max_tokens=16, temperature=1.0, seed=5, n=3)
        outputs = llm.generate("Once upon a time", params)
        alone = llm.generate("Once upon a time", SamplingParams(max_tokens=16, temperature=1.0, seed=5))
    assert [output.index for output in outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in outputs}) > 1
    assert outputs[0].token_ids == alone[0].token_ids


def test_stream_joins_to_the_output_and_leaving_it_aborts() -> None:
    with LLM(draft="ngram", dtype="bfloat16") as llm:
        chunks = list(llm.stream("The quick brown fox", SamplingParams(max_tokens=24)))
        output = chunks[-1].output
        assert output is not None
        assert "".join(chunk.text for chunk in chunks) == output.text
        assert [token for chunk in chunks for token in chunk.token_ids] == output.token_ids
        stream = llm.stream("The quick brown fox", SamplingParams(max_tokens=200))
        next(stream)
        stream.close()
        llm.generate("Another", SamplingParams(max_tokens=2))
        core = llm.engine.core
        assert core.idle
        assert core.ledger.pool.num_free + core.ledger.cache.size == core.ledger.pool.num_slots
