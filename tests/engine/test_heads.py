"""Heads in whole engines: the target's own tokens come out, in every mode, with whatever head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.core.stats import SpeculationStats
from paceline.errors import ConfigError, ModelError
from tests.cases.lab import assert_no_slot_lost, random_prompt
from tests.loading.heads import LAYERS, eagle, write_head
from tests.loading.mtp import modules, write_target
from tests.tiny import ENGINE, write_random

SHARED = [7, 8, 9, 10, 11, 12, 13, 14]
PROMPTS = [[5], random_prompt(1, 40), SHARED + random_prompt(2, 5), SHARED + random_prompt(3, 30)]
PARAMS = [
    [SamplingParams(max_tokens=30) for _ in PROMPTS],
    [SamplingParams(max_tokens=30, temperature=0.8, seed=seed) for seed in range(4)],
    [
        SamplingParams(max_tokens=30, temperature=0.8, seed=9, top_k=40, repetition_penalty=1.2),
        SamplingParams(max_tokens=30, temperature=0.0, frequency_penalty=0.5),
        SamplingParams(max_tokens=30, temperature=1.5, seed=3, logit_bias={9: 3.0}),
        SamplingParams(max_tokens=30, num_speculative_tokens=0),
    ],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return write_random(folder / "target", layers=LAYERS)


@pytest.fixture(scope="module")
def head(folder: Path) -> Path:
    return write_head(folder / "head")


def decoded(target: Path, dtype: str) -> list[list[list[int]]]:
    """Token ids without a drafter, one request at a time."""
    with LLM(target, draft="none", max_num_seqs=1, **{**ENGINE, "dtype": dtype}) as llm:
        return [
            [llm.generate([prompt], one)[0].token_ids for prompt, one in zip(PROMPTS, params, strict=True)]
            for params in PARAMS
        ]


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[list[int]]]:
    return decoded(target, "float32")


def check(plain: list[list[list[int]]], llm: LLM) -> SpeculationStats:
    """All at once, and one at a time; what was speculated."""
    for params, expected in zip(PARAMS, plain, strict=True):
        together = llm.generate(PROMPTS, params)
        assert [output.token_ids for output in together] == expected
        for at, prompt in enumerate(PROMPTS[:2]):
            (alone,) = llm.generate([prompt], params[at])
            assert alone.token_ids == expected[at]
    assert_no_slot_lost(llm)
    assert llm.speculation.num_failed_drafts == 0
    assert llm.speculation.num_accepted_tokens > 0, "without guesses that count equality would prove little"
    return llm.speculation


@pytest.mark.parametrize("growth", ["chain", "fixed-shape", "best-first", "layers", "calibrated"])
@pytest.mark.parametrize("batch", [1, 4])
def test_in_turn(target: Path, head: Path, plain: list[list[list[int]]], growth: str, batch: int) -> None:
    with LLM(
        target, draft=head, growth=growth, max_num_seqs=batch, num_speculative_tokens=6, **ENGINE
    ) as llm:
        check(plain, llm)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_tokens": 90, "max_batch_tokens": 16},
        {"prefix_cache": False},
        {"dtype": "bfloat16", "draft_dtype": "float32"},
        {"length_by_batch_size": [(1, 4), (3, 0)]},
        {"draft": "ngram+"},
        {"exact": True},
    ],
    ids=str,
)
def test_in_turn_under_every_condition(
    target: Path, head: Path, plain: list[list[list[int]]], options: dict[str, Any]
) -> None:
    merged = {**ENGINE, "max_num_seqs": 4, "draft": "", **options}
    merged["draft"] += str(head)
    if "dtype" in options:
        plain = decoded(target, options["dtype"])
    with LLM(target, **merged) as llm:
        check(plain, llm)


def test_a_head_of_the_whole_vocabulary_and_of_31(target: Path, tmp_path: Path, plain: Any) -> None:
    weights = eagle(draft_vocab_size=320, fc_norm=True, norm_output=True)
    head = write_head(
        tmp_path / "head", "speculators", weights, draft_vocab_size=320, fc_norm=True, norm_output=True
    )
    with LLM(target, draft=head, mode="serial-tree", max_num_seqs=4, **ENGINE) as llm:
        check(plain, llm)


@pytest.mark.parametrize("layout", ["deepseek", "mimo"])
def test_the_targets_own_modules(tmp_path: Path, layout: str) -> None:
    target = write_target(tmp_path / "target", modules(layout, 2))
    plain = decoded(target, "float32")
    with LLM(target, draft="mtp", mode="serial-tree", max_num_seqs=4, **ENGINE) as llm:
        check(plain, llm)


def test_a_target_without_modules(target: Path) -> None:
    with pytest.raises(ModelError, match="holds no multi-token prediction modules"):
        LLM(target, draft="mtp", **ENGINE)


def test_a_target_that_forgets_is_refused(tmp_path: Path, head: Path) -> None:
    windowed = write_random(tmp_path / "windowed", layers=LAYERS, window=16)
    with pytest.raises(ConfigError, match="forgets what is behind its window: choose a drafter"):
        LLM(windowed, draft=head, **ENGINE)


def test_a_shipped_head_that_is_not_there(target: Path) -> None:
    with pytest.raises(ConfigError, match=r"no head is shipped for .*: give the folder"):
        LLM(target, draft="eagle3", **ENGINE)
