"""The head that is shipped for the embedded model."""

from __future__ import annotations

import pytest

from paceline import LLM, RequestOutput, SamplingParams

pytestmark = pytest.mark.model

QUESTION = "A box has 3 rows of 4 eggs. How many eggs are there in 5 boxes?"


def answered(temperature: float, **options: object) -> RequestOutput:
    with LLM(max_num_seqs=2, context_length=1024, **options) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": QUESTION}])
        (output,) = llm.generate([prompt], SamplingParams(max_tokens=40, temperature=temperature, seed=3))
        return output


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_its_guesses_are_right_far_more_often_than_chance(temperature: float) -> None:
    plain = answered(temperature, draft="none", dtype="float32")
    drafted = answered(temperature, draft="eagle3", dtype="float32", num_speculative_tokens=3)
    assert drafted.token_ids == plain.token_ids
    length = drafted.speculation.mean_acceptance_length
    assert length is not None
    assert length > 1.2


@pytest.mark.parametrize("mode", ["serial-tree", "overlapped"])
def test_it_grows_trees_in_turn_and_beside_the_target(mode: str) -> None:
    plain = answered(0.0, draft="none", dtype="float32")
    assert answered(0.0, draft="eagle3", dtype="float32", mode=mode).token_ids == plain.token_ids


def test_it_works_with_lookup() -> None:
    plain = answered(0.8, draft="none", dtype="float32")
    both = answered(0.8, draft="ngram+suffix+eagle3", dtype="float32")
    assert both.token_ids == plain.token_ids
