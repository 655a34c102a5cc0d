"""Every way to draft, on the embedded model: the tokens are those of plain decoding.

One engine per way, all temperatures and batches in it. Float32, so that equality is exact by arithmetic and
not by luck.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.model

TEXTS = [
    "Repeat after me: one two three four, one two three four.",
    "What is the capital of France?",
    "Count from 1 to 20.",
    "Say hello to the sea.",
]
TEMPERATURES = (0.0, 0.8)
NEW_TOKENS = 24
GROWTHS = ["chain", "fixed-shape", "best-first", "layers", "calibrated"]
MODES = [
    "autoregressive",
    "serial-chain",
    "serial-tree",
    "swiftspec",
    "discard",
    "outcome-cache",
    "overlapped",
]
Tokens = dict[float, list[list[int]]]


def ask(llm: LLM, texts: list[str], temperature: float) -> list[RequestOutput]:
    prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in texts]
    params = [
        SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature, seed=TEXTS.index(text))
        for text in texts
    ]
    return llm.generate(prompts, params)


@pytest.fixture(scope="module")
def plain() -> Iterator[Tokens]:
    """Token ids without a drafter, one request at a time."""
    with LLM(model="embedded", draft="none", dtype="float32", max_num_seqs=1, context_length=256) as llm:
        yield {t: [output.token_ids for output in ask(llm, TEXTS, t)] for t in TEMPERATURES}


def check(plain: Tokens, *, guesses: bool = True, **options: Any) -> None:
    accepted = 0
    if options["draft"] == "embedded":
        options["draft_dtype"] = "int8"
    with LLM(model="embedded", dtype="float32", max_num_seqs=4, context_length=256, **options) as llm:
        for temperature, expected in plain.items():
            together = ask(llm, TEXTS, temperature)
            assert [output.token_ids for output in together] == expected
            (alone,) = ask(llm, TEXTS[:1], temperature)
            assert alone.token_ids == expected[0]
            accepted += sum(output.speculation.num_accepted_tokens for output in (*together, alone))
            assert not any(output.speculation.num_failed_drafts for output in together)
    assert (accepted > 0) == guesses, "without guesses that count equality would prove little"


@pytest.mark.parametrize("placement", ["serial", "disaggregated"])
@pytest.mark.parametrize("growth", GROWTHS)
def test_every_growth_rule_gives_plain_decodings_tokens(plain: Tokens, growth: str, placement: str) -> None:
    check(plain, draft="embedded", growth=growth, placement=placement, num_speculative_tokens=5)


@pytest.mark.parametrize("placement", ["serial", "disaggregated"])
def test_lookup_gives_plain_decodings_tokens(plain: Tokens, placement: str) -> None:
    check(plain, draft="ngram", placement=placement, num_speculative_tokens=5)


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_plain_decodings_tokens(plain: Tokens, mode: str) -> None:
    check(plain, draft="embedded", mode=mode, guesses=mode != "autoregressive")
