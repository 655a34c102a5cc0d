"""H. Streams: text joins to the whole, whatever a round commits; and options that are obeyed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, SamplingParams
from paceline.config import OPTION_PATHS
from paceline.loading.tokenizer import BYTE_OF_CHAR
from tests.cases.drafters import half_right
from tests.cases.lab import Lab, assert_same, random_prompt, stream_all
from tests.tiny import ENGINE, VOCAB, successor_logits, write_markov
from tests.tiny_checkpoints import tiny_tokenizer

EMOJI = "\U0001f600"


@pytest.fixture(scope="module")
def smiling(models: Path) -> Lab:
    """Says "abc", an emoji in four byte tokens, "d", and again."""
    order = [*byte_tokens("abc"), *byte_tokens(EMOJI), *byte_tokens("d")]
    logits = successor_logits(VOCAB, dict(zip(order, [*order[1:], order[0]], strict=True)), 0)
    return Lab(write_markov(models / "smiling", logits, tokenizer=tiny_tokenizer()))


def byte_tokens(text: str) -> list[int]:
    vocabulary = tiny_tokenizer().get_vocab()
    char_of = {byte: char for char, byte in BYTE_OF_CHAR.items()}
    return [vocabulary[char_of[byte]] for byte in text.encode()]


@pytest.mark.parametrize("k", [0, 1, 4, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stream_joins_to_the_whole(lab: Lab, k: int, temperature: float) -> None:
    """H01 Text, ids and usage of a stream are those of the blocking call, however large the rounds."""
    params = SamplingParams(
        max_tokens=40, temperature=temperature, seed=3, num_speculative_tokens=k, stop=["zq", "\x05t"]
    )
    for seed in range(4):
        prompt = random_prompt(seed, 8)
        lab.teach(prompt, params)
        lab.drafter.rule = half_right(lab.script, lab.vocab)
        pieces, output = stream_all(lab.fast, prompt, params)
        assert_same(output, lab.baseline(prompt, params))
        assert k > 0 or len(pieces) == len(output.token_ids)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("before", [1, 2, 3])
def test_character_split_over_rounds(smiling: Lab, k: int, before: int) -> None:
    """H05 A character whose bytes come in different rounds is emitted once, whole."""
    prompt = byte_tokens("abc")[: 4 - before]
    text = ("abc" + EMOJI + "d")[4 - before :] + "abc"
    whole = SamplingParams(max_tokens=len(text.encode()))
    assert smiling.check(prompt, whole, k).text == text
    streamed = replace(whole, num_speculative_tokens=k)
    pieces, output = stream_all(smiling.fast, prompt, streamed)
    assert output.text == text
    assert sum(EMOJI in piece for piece in pieces) == 1
    for ending in ({"stop": EMOJI, "include_stop_in_output": True}, {"stop": "d"}):
        cut = text[: text.index("d")]
        params = SamplingParams(max_tokens=40, **ending)  # type: ignore[arg-type]
        assert smiling.check(prompt, params, k).text == cut
        pieces, _ = stream_all(smiling.fast, prompt, replace(params, num_speculative_tokens=k))
        assert "\ufffd" not in "".join(pieces)


def test_character_cut_by_the_length_limit(smiling: Lab) -> None:
    """H05 A character cut short by max_tokens ends the text with one replacement character, never more."""
    for count in (4, 5, 6):
        output = smiling.check(byte_tokens("a"), SamplingParams(max_tokens=count - 1), 3)
        assert output.text == "bc\ufffd"
    prompt = byte_tokens("a")
    assert smiling.check(prompt, SamplingParams(max_tokens=6), 3).text == "bc" + EMOJI


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft": "ngram"},
        {"draft": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
        {"draft": "model"},
        {"draft": "model", "draft_dtype": "bfloat16"},
        {"draft": "model", "max_num_seqs": 1, "max_batch_tokens": 8},
        {"draft": "model", "prefix_cache": False, "context_length": 128, "kv_tokens": 128},
        {"draft": "model", "length_by_batch_size": [(1, 2)]},
    ],
)
def test_a_drafter_that_is_given_drafts(smiling: Lab, options: dict[str, Any]) -> None:
    """H07 Under every combination of start options a drafter that was asked for really drafts."""
    own = options.get("draft") == "model"
    if own:
        options = options | {"draft": smiling.model}
    llm = LLM(smiling.model, **(dict(ENGINE) | {"num_speculative_tokens": 3} | options))
    prompt, params = byte_tokens("abc" + EMOJI + "da"), SamplingParams(max_tokens=20)
    (output,) = llm.generate(prompt, params)
    assert_same(output, smiling.baseline(prompt, params))
    assert output.speculation.num_draft_tokens > 0
    assert output.drafter == ("draft_model" if own else "ngram")


def test_no_drafter_means_no_drafts(lab: Lab) -> None:
    """H07 Speculation that is switched off, by drafter or by length, drafts nothing and says so."""
    for options in ({"draft": "none"}, {"draft": "ngram", "num_speculative_tokens": 0}):
        llm = LLM(lab.model, **(dict(ENGINE) | options))  # type: ignore[arg-type]
        (output,) = llm.generate([[5, 6, 5, 6, 5]], SamplingParams(max_tokens=12))
        assert output.speculation.acceptance_rate is None
        assert output.drafter == options["draft"]


OPTIONS: dict[str, object] = {
    "threads": 2,
    "dtype": "bfloat16",
    "exact": True,
    "seed": 5,
    "draft": "none",
    "num_speculative_tokens": 7,
    "draft_dtype": "bfloat16",
    "length_by_batch_size": ((1, 2), (4, 0)),
    "prompt_lookup_max": 5,
    "prompt_lookup_min": 2,
    "prompt_lookup_branches": 3,
    "selector": "reactive",
    "draft_layers": 1,
    "suffix_cache": "shared",
    "suffix_max_cached_requests": 5,
    "suffix_max_memory": 2,
    "suffix_cache_file": "outputs.npz",
    "suffix_max_depth": 7,
    "suffix_factor": 2.0,
    "suffix_offset": 1.0,
    "suffix_min_token_prob": 0.5,
    "suffix_tree": False,
    "max_num_seqs": 3,
    "max_batch_tokens": 77,
    "kv_tokens": 500,
    "context_length": 99,
    "prefix_cache": False,
    "placement": "disaggregated",
    "mode": "serial-tree",
    "target_devices": "0",
    "draft_devices": "0",
    "draft_timeout": 5.0,
    "growth": "best-first",
    "tree_width": 3,
    "tree_passes": 3,
    "tree_shape": (2, 1),
    "fan_out": 2,
}
COMPANIONS: dict[str, dict[str, Any]] = {
    "draft_devices": {"placement": "disaggregated", "target_devices": "0"},
    "draft_timeout": {"placement": "disaggregated"},
    "growth": {"draft": "model"},
    "tree_width": {"draft": "model", "mode": "serial-tree"},
    "tree_passes": {"draft": "model", "mode": "serial-tree"},
    "tree_shape": {"draft": "model", "growth": "fixed-shape"},
    "fan_out": {"draft": "model", "mode": "outcome-cache"},
    "draft_dtype": {"draft": "model"},
    "selector": {"draft": "ngram+suffix"},
    "draft_layers": {"draft": "layers"},
    "suffix_cache": {"draft": "suffix"},
    "suffix_max_cached_requests": {"draft": "suffix", "suffix_cache": "shared"},
    "suffix_max_memory": {"draft": "suffix", "suffix_cache": "shared"},
    "suffix_cache_file": {"draft": "suffix", "suffix_cache": "shared"},
    "suffix_max_depth": {"draft": "suffix"},
    "suffix_factor": {"draft": "suffix"},
    "suffix_offset": {"draft": "suffix"},
    "suffix_min_token_prob": {"draft": "suffix"},
    "suffix_tree": {"draft": "suffix"},
    "mode": {"draft": "model"},
}
"""Without which an option would be refused."""
ELSEWHERE = {"model", "device", "draft_address", "draft_key_file", "unpickle_head"}
"""Options that every other test gives, or that need another host or a head (tests/engine)."""


@pytest.mark.parametrize("name", sorted(set(OPTION_PATHS) - ELSEWHERE))
def test_every_option_reaches_the_configuration(
    lab: Lab, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H08 Every option of the engine takes effect in the configuration in force."""
    monkeypatch.chdir(tmp_path)
    others = COMPANIONS.get(name, {})
    if others.get("draft") == "model":
        others = others | {"draft": lab.model}
    with LLM(lab.model, **(dict(ENGINE) | others | {name: OPTIONS[name]})) as llm:
        _check_reached(llm, name)


def _check_reached(llm: LLM, name: str) -> None:
    place: Any = llm.config
    for part in OPTION_PATHS[name]:
        place = getattr(place, part)
    assert place == OPTIONS[name]
    limits = llm.engine.core.config.limits
    reached = {
        "max_num_seqs": limits.max_num_seqs,
        "max_batch_tokens": limits.max_batch_tokens,
        "kv_tokens": limits.num_slots,
        "context_length": limits.context_length,
        "prefix_cache": llm.engine.core.config.prefix_cache,
        "dtype": llm.precision,
    }
    assert reached.get(name, OPTIONS[name]) == OPTIONS[name]
