"""Suffix decoding through the public face: plain decoding's tokens, and who learns from whom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from paceline import LLM, ConfigError, SamplingParams
from paceline.config import SuffixCache
from tests.tiny import ENGINE, write_random

PROMPTS = [[5, 9, 7, 5, 9, 7, 5, 9], [3, 1, 4, 1, 5], [3, 1, 4, 1, 5, 9], [8] * 12]
NEW_TOKENS = 40
SHARING = get_args(SuffixCache)
Tokens = dict[float, list[list[int]]]


def params(temperature: float, tenant: str = "", count: int = NEW_TOKENS) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=count, temperature=temperature, seed=seed, tenant=tenant)
        for seed in range(len(PROMPTS))
    ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("suffix"), layers=1)


@pytest.fixture(scope="module")
def plain(tiny: Path) -> Tokens:
    with LLM(model=tiny, draft="none", max_num_seqs=1, **ENGINE) as llm:
        return {t: [o.token_ids for o in llm.generate(PROMPTS, params(t))] for t in (0.0, 0.8)}


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chain"])
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("batch", [1, 4])
def test_tokens_are_plain_decodings(tiny: Path, plain: Tokens, sharing: str, batch: int, tree: bool) -> None:
    """Twice, so that the second time answers are known where they may be."""
    options: dict[str, Any] = {"suffix_cache": sharing, "suffix_tree": tree, "num_speculative_tokens": 6}
    with LLM(model=tiny, draft="suffix", max_num_seqs=batch, prefix_cache=False, **options, **ENGINE) as llm:
        for temperature, expected in plain.items():
            accepted = []
            for _ in range(2):
                outputs = llm.generate(PROMPTS, params(temperature, "me"))
                assert [output.token_ids for output in outputs] == expected
                assert not any(output.speculation.num_failed_drafts for output in outputs)
                accepted.append(sum(output.speculation.num_accepted_tokens for output in outputs))
            if sharing != "off":
                assert accepted[1] > accepted[0]
                assert accepted[1] > len(PROMPTS) * NEW_TOKENS // 2


def test_a_process_of_its_own_learns_too(tiny: Path, plain: Tokens) -> None:
    options: dict[str, Any] = {"suffix_cache": "shared", "num_speculative_tokens": 6, "mode": "overlapped"}
    with LLM(model=tiny, draft="suffix", **options, **ENGINE) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, params(0.0))
            assert [output.token_ids for output in outputs] == plain[0.0]
            assert not any(output.speculation.num_failed_drafts for output in outputs)
        assert sum(output.speculation.num_accepted_tokens for output in outputs) > 0


def accepted_by(llm: LLM, tenant: str) -> int:
    outputs = llm.generate(PROMPTS, params(0.8, tenant))
    return sum(output.speculation.num_accepted_tokens for output in outputs)


def test_a_tenant_gains_from_its_own_outputs_only(tiny: Path) -> None:
    with LLM(
        model=tiny, draft="suffix", suffix_cache="tenant", num_speculative_tokens=6, max_num_seqs=4, **ENGINE
    ) as llm:
        alone = accepted_by(llm, "")
        assert accepted_by(llm, "") == alone, "nobody's outputs are not learnt"
        assert accepted_by(llm, "one") == alone, "nobody's outputs are not learnt"
        assert accepted_by(llm, "one") > alone
        assert accepted_by(llm, "other") == alone


def test_what_was_learnt_outlives_the_engine_if_asked(tiny: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "draft": "suffix",
        "suffix_cache": "tenant",
        "suffix_cache_file": str(tmp_path / "past"),
        "num_speculative_tokens": 6,
    }
    with LLM(model=tiny, **options, **ENGINE) as llm:
        first = accepted_by(llm, "one")
    with LLM(model=tiny, **options, **ENGINE) as llm:
        assert accepted_by(llm, "other") == first
        assert accepted_by(llm, "one") > first
    (tmp_path / "past").write_bytes(b"PK broken")
    with pytest.raises(ConfigError, match="remove it"):
        LLM(model=tiny, **options, **ENGINE)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"suffix_max_memory": 8}, "suffix_max_memory is 8 but speculation.suffix_cache is off"),
        ({"draft": "ngram", "suffix_cache": "shared"}, "the drafter is ngram, which looks at no suffixes"),
        ({"draft": "ngram", "suffix_factor": 2.0}, "looks at no suffixes"),
        ({"prompt_lookup_branches": 2}, "the drafter is suffix, which looks up no n-grams"),
        (
            {"suffix_cache": "shared", "suffix_cache_file": "past", "placement": "disaggregated"},
            "a process of its own, which keeps no files",
        ),
        ({"mode": "serial-tree"}, "grows no trees"),
    ],
    ids=str,
)
def test_options_that_nobody_would_look_at_are_refused(options: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        LLM(model="/nowhere", **{"draft": "suffix", **options})


@pytest.fixture(scope="module")
def embedded() -> Iterator[dict[float, list[list[int]]]]:
    with LLM(model="embedded", draft="none", dtype="float32", max_num_seqs=1, context_length=256) as llm:
        yield {t: [o.token_ids for o in llm.generate(chats(llm), params(t, count=24))] for t in (0.0, 0.8)}


def chats(llm: LLM) -> list[list[int]]:
    texts = ["Repeat after me: one two three, one two three.", "Count from 1 to 20.", "Say hello.", "Why?"]
    return [llm.chat_prompt([{"role": "user", "content": text}]) for text in texts]


@pytest.mark.model
@pytest.mark.parametrize("sharing", SHARING)
def test_tokens_of_a_real_model_are_plain_decodings(embedded: Tokens, sharing: str) -> None:
    options: dict[str, Any] = {"suffix_cache": sharing, "num_speculative_tokens": 6, "max_num_seqs": 4}
    with LLM(model="embedded", draft="suffix", dtype="float32", context_length=256, **options) as llm:
        for temperature, expected in embedded.items():
            asked = params(temperature, "me", 24)
            for _ in range(2):
                outputs = llm.generate(chats(llm), asked)
                assert [output.token_ids for output in outputs] == expected
            (alone,) = llm.generate(chats(llm)[:1], asked[:1])
            assert alone.token_ids == expected[0]
            assert alone.speculation.num_accepted_tokens > 0
