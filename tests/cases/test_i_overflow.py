"""I. Activations that are not finite belong to the request that has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from tests.cases.drafters import RuleDrafter, constant
from tests.cases.lab import Lab, assert_same
from tests.tiny import ENGINE, write_random

BROKEN = 7
FEW = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def broken(models: Path) -> Path:
    """The random model, but for one token whose embedding is infinite."""
    return write_random(models / "broken", broken_token=BROKEN)


def test_broken_logits_are_an_error_of_their_request(broken: Path) -> None:
    """I08 A request whose logits are not finite ends with an error that says so, at its first token."""
    (output,) = LLM(broken, draft="none", **ENGINE).generate([[4, BROKEN, 9]], FEW)
    assert (output.finish_reason, output.token_ids) == ("error", [])
    assert "not finite" in (output.error or "")


def test_broken_activations_stay_where_they_are(broken: Path, lab: Lab) -> None:
    """I08 Requests beside and after one with infinite activations say what they always say."""
    llm = LLM(broken, draft="none", max_num_seqs=2, **ENGINE)
    prompts = [[4, 5, 6], [4, BROKEN, 9], [20, 21, 22], [30] * 20]
    outputs = llm.generate(prompts, FEW)
    assert outputs[1].finish_reason == "error"
    for place in (0, 2, 3):
        assert_same(outputs[place], lab.baseline(prompts[place], FEW))


def test_a_broken_guess_changes_nothing(broken: Path, lab: Lab) -> None:
    """I08 A guess whose activations are infinite is refused like any other and leaves no trace."""
    llm = LLM(broken, draft=RuleDrafter(constant(BROKEN)), num_speculative_tokens=2, **ENGINE)
    assert_same(llm.generate([[4, 5, 6]], FEW)[0], lab.baseline([4, 5, 6], FEW))
