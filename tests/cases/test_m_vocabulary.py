"""M. Draft and target must mean the same by a token id, and are refused at start-up where they do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline import LLM, ModelError, SamplingParams
from tests.cases.lab import Lab, assert_same
from tests.tiny import DRAFTED, ENGINE, letters_tokenizer, successor_logits, write_markov, write_random

EIGHT = successor_logits(8, {i: (i + 3) % 8 for i in range(8)}, 0)
ABC = letters_tokenizer("abcdefgh")


def padded(winning: bool) -> np.ndarray:
    """EIGHT with two more rows and columns, which the tokenizer knows nothing of."""
    logits = np.full((10, 10), 50.0 if winning else -50.0, np.float32)
    logits[:8, :8] = EIGHT
    return logits


@pytest.fixture(scope="module")
def letters(models: Path) -> Lab:
    return Lab(write_markov(models / "letters", EIGHT))


@pytest.mark.parametrize(
    ("vocabulary", "first"),
    [("abfdecgh", "id 2 is 'c'"), ("abcdefg", "id 7 is 'h'"), ("abcdefghij", "id 8 is None")],
)
def test_another_vocabulary_is_refused(models: Path, letters: Lab, vocabulary: str, first: str) -> None:
    """M01 M03 A draft model whose ids mean other texts, or which lacks or adds some, is refused at start-up
    with the first id that differs; no mapping of ids is ever guessed."""
    size = len(vocabulary)
    logits = successor_logits(size, {}, 0)
    draft = write_markov(models / vocabulary, logits, tokenizer=letters_tokenizer(vocabulary))
    with pytest.raises(ModelError, match=first):
        LLM(letters.model, draft=draft, **DRAFTED)


def test_an_unrelated_tokenizer_is_refused(letters: Lab, lab: Lab) -> None:
    """M01 Neither model of an unrelated pair can serve as the draft of the other."""
    with pytest.raises(ModelError, match="id 0"):
        LLM(letters.model, draft=lab.model, **DRAFTED)
    with pytest.raises(ModelError, match="id 0"):
        LLM(lab.model, draft=letters.model, **DRAFTED)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("larger", ["target", "draft"])
def test_padding_rows_do_no_harm(models: Path, letters: Lab, larger: str, temperature: float) -> None:
    """M02 Models that differ in padding rows only work together, and padding is never drafted."""
    folder = models / f"padded-{larger}-{temperature}"
    wide = write_markov(folder, padded(winning=larger == "draft"), tokenizer=ABC)
    target, draft = (wide, letters.model) if larger == "target" else (letters.model, wide)
    llm = LLM(target, draft=draft, num_speculative_tokens=4, **DRAFTED)
    params = SamplingParams(max_tokens=41, temperature=temperature, seed=2)
    (output,) = llm.generate([[1, 2]], params)
    assert_same(output, letters.baseline([1, 2], params))
    assert output.speculation.acceptance_rate == 1.0
    assert output.speculation.num_failed_drafts == 0


def test_a_target_that_emits_padding(models: Path) -> None:
    """M02 Even a target that chooses ids without a text is followed exactly, and nothing breaks."""
    wide = Lab(write_markov(models / "wild", padded(winning=True), tokenizer=ABC))
    output = wide.check([1], SamplingParams(max_tokens=9), 3)
    assert (output.token_ids, output.text) == ([8, 0, 8, 0, 8, 0, 8, 0, 8], "aaaa")
    llm = LLM(wide.model, draft=wide.model, num_speculative_tokens=3, **DRAFTED)
    (drafted,) = llm.generate([[1]], SamplingParams(max_tokens=9))
    assert drafted.token_ids == output.token_ids


@pytest.mark.parametrize("prompt", ["ai", [0, 8]])
def test_tokens_without_an_embedding(models: Path, prompt: str | list[int]) -> None:
    """M02 A token that the tokenizer has but the model has no row for is refused in its own request."""
    model = write_markov(models / f"narrow-{type(prompt)}", EIGHT, tokenizer=letters_tokenizer("abcdefghij"))
    llm = LLM(model, draft="ngram", **ENGINE)
    good, bad = llm.generate(["a", prompt], SamplingParams(max_tokens=4))
    assert (good.finish_reason, good.text) == ("length", "dgbe")
    assert bad.finish_reason == "error"
    assert "id 8" in (bad.error or "")


def test_a_missing_draft_is_refused(lab: Lab, tmp_path: Path) -> None:
    """M01 A draft model that cannot be loaded is an error at start-up, not speculation that never begins."""
    folder = write_random(tmp_path / "broken")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="safetensors"):
        LLM(lab.model, draft=folder, **DRAFTED)
    with pytest.raises(ModelError, match="there is no model"):
        LLM(lab.model, draft="no-such-drafter", **ENGINE)
