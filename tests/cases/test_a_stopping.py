"""A. Where an output ends: stop strings, stop tokens, EOS, length limits, and what is counted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from tests.cases.drafters import constant
from tests.cases.lab import Lab, assert_same, random_prompt, stream_all
from tests.tiny import DRAFTED, ENGINE, edit_config, successor_logits, write_markov

LETTERS = 26
A, B, C, D = range(4)


@pytest.fixture(scope="module")
def alphabet(models: Path) -> Lab:
    """Says the alphabet, over and over: after "a" comes "bcdef"."""
    logits = successor_logits(LETTERS, {i: (i + 1) % LETTERS for i in range(LETTERS)}, 0)
    return Lab(write_markov(models / "alphabet", logits))


def with_eos(model: Path, folder: Path, *eos: int) -> Path:
    """The same weights with other end tokens."""
    shutil.copytree(model, folder)
    edit_config(folder, eos_token_id=list(eos))
    return folder


@pytest.mark.parametrize("k", [0, 1, 3, 8])
@pytest.mark.parametrize(("include", "text"), [(False, "b"), (True, "bcd")])
def test_stop_string_early_in_a_long_round(alphabet: Lab, k: int, include: bool, text: str) -> None:
    """A01 A stop string is found wherever in a round it falls, and ends text, ids and stream there."""
    params = SamplingParams(max_tokens=30, stop="cd", include_stop_in_output=include)
    output = alphabet.check([A], params, k)
    assert (output.text, output.finish_reason) == (text, "stop")
    assert output.token_ids == [1, 2, 3]
    pieces, streamed = stream_all(alphabet.fast, [A], params)
    assert_same(streamed, output)
    assert "".join(pieces) == text


@pytest.mark.parametrize("stop", [{"stop": "d"}, {"stop_token_ids": [D]}, {"stop": ["xy", "cd", "d"]}])
@pytest.mark.parametrize("max_tokens", [3, 4, 5])
def test_stop_before_the_length_limit_in_one_round(
    alphabet: Lab, stop: dict[str, object], max_tokens: int
) -> None:
    """A02 Of a stop and a length limit in one round the earlier token decides, and the stop wins a draw."""
    params = SamplingParams(max_tokens=max_tokens, **stop)  # type: ignore[arg-type]
    output = alphabet.check([A], params, 6)
    assert (output.finish_reason, output.token_ids) == ("stop", [1, 2, 3])
    assert "d" not in output.text


@pytest.mark.parametrize("stop", [{"stop": "g"}, {"stop_token_ids": [6]}])
def test_length_limit_before_the_stop_in_one_round(alphabet: Lab, stop: dict[str, object]) -> None:
    """A03 A stop just behind the length limit is as if it were not there."""
    output = alphabet.check([A], SamplingParams(max_tokens=5, **stop), 6)  # type: ignore[arg-type]
    assert (output.finish_reason, output.text) == ("length", "bcdef")


def test_text_ids_logprobs_and_usage_end_together(alphabet: Lab) -> None:
    """A04 After a stop in the middle of a looked-up phrase, ids, logprobs and usage have one length."""
    prompt = [*range(LETTERS), *range(LETTERS), A]
    params = SamplingParams(max_tokens=30, stop="mno", logprobs=2)
    llm = LLM(alphabet.model, draft="ngram", num_speculative_tokens=6, **ENGINE)
    (output,) = llm.generate(prompt, params)
    assert_same(output, alphabet.baseline(prompt, params))
    assert output.logprobs is not None
    assert len(output.token_ids) == len(output.logprobs) == output.usage.completion_tokens == 14
    assert output.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("place", [0, 1, 4, 7])
def test_end_token_inside_an_accepted_run(lab: Lab, tmp_path: Path, place: int) -> None:
    """A05 An end token accepted anywhere in a round is the last token of output and stream."""
    prompt = random_prompt(1, 12)
    free = lab.baseline(prompt, SamplingParams(max_tokens=40)).token_ids
    ends = Lab(with_eos(lab.model, tmp_path / "eos", free[place]))
    first = free.index(free[place])
    output = ends.check(prompt, SamplingParams(max_tokens=40), 8)
    assert (output.token_ids, output.finish_reason) == (free[: first + 1], "stop")
    _, streamed = stream_all(ends.fast, prompt, SamplingParams(max_tokens=40))
    assert_same(streamed, output)
    assert ends.check(prompt, SamplingParams(max_tokens=40, ignore_eos=True), 8).token_ids == free


def test_looked_up_span_contains_the_end_token(alphabet: Lab, tmp_path: Path) -> None:
    """A06 A guess copied from an earlier turn, end token included, does not carry the output past it."""
    eos = 3
    model = with_eos(alphabet.model, tmp_path / "eos", eos)
    turn = list(range(8))
    params = SamplingParams(max_tokens=30)
    llm = LLM(model, draft="ngram", num_speculative_tokens=6, prompt_lookup_max=2, **ENGINE)
    (output,) = llm.generate([*turn, *turn, A], params)
    assert (output.token_ids, output.finish_reason, output.text) == ([1, 2, eos], "stop", "bc")
    assert output.speculation.num_accepted_tokens == 2


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
def test_lookup_keeps_to_the_remaining_budget(alphabet: Lab, max_tokens: int) -> None:
    """A07 However repetitive the text, never more than max_tokens tokens come back."""
    prompt = [*range(LETTERS), *range(LETTERS), A]
    params = SamplingParams(max_tokens=max_tokens)
    llm = LLM(alphabet.model, draft="ngram", num_speculative_tokens=4, **ENGINE)
    (output,) = llm.generate(prompt, params)
    assert_same(output, alphabet.baseline(prompt, params))
    assert (len(output.token_ids), output.finish_reason) == (max_tokens, "length")


@pytest.mark.parametrize("k", [1, 4])
def test_min_tokens_counts_tokens(lab: Lab, tmp_path: Path, k: int) -> None:
    """A08 min_tokens is a number of tokens, however many of them a round commits."""
    prompt = random_prompt(2, 10)
    free = lab.baseline(prompt, SamplingParams(max_tokens=20)).token_ids
    place = next(at for at in range(6, 20) if free[at] not in free[:at])
    ends = Lab(with_eos(lab.model, tmp_path / "eos", free[place]))
    output = ends.check(prompt, SamplingParams(max_tokens=20, min_tokens=place), k)
    assert (output.token_ids, output.finish_reason) == (free[: place + 1], "stop")
    longer = ends.check(prompt, SamplingParams(max_tokens=20, min_tokens=place + 1), k)
    assert longer.token_ids[:place] == free[:place]
    assert longer.token_ids[place] != free[place]


@pytest.mark.parametrize("end", [{}, {"stop_token_ids": [25], "ignore_eos": True}])
def test_min_tokens_binds_guesses_too(models: Path, end: dict[str, object]) -> None:
    """A09 A guessed end token is refused below min_tokens at every place of a round."""
    eos = LETTERS - 1
    folder = models / f"always-eos-{len(end)}"
    lab = Lab(write_markov(folder, successor_logits(LETTERS, {}, eos), eos=[eos]))
    params = SamplingParams(max_tokens=20, min_tokens=8, **end)  # type: ignore[arg-type]
    output = lab.check([A], params, 3, constant(eos))
    assert len(output.token_ids) == 9
    assert output.token_ids.index(eos) == 8
    assert lab.drafter.asked


@pytest.mark.parametrize("stop", [{"stop": "c"}, {"stop_token_ids": [C]}, {"max_tokens": 2}])
def test_usage_is_counted_after_truncation(alphabet: Lab, stop: dict[str, object]) -> None:
    """A10 No counter of a request knows of tokens that were cut off."""
    params = SamplingParams(**{"max_tokens": 30, **stop})  # type: ignore[arg-type]
    output = alphabet.check([A], params, 8)
    _, streamed = stream_all(alphabet.fast, [A], params)
    for each in (output, streamed):
        assert each.usage.completion_tokens == len(each.token_ids) == 2
        assert each.usage.total_tokens == 3
        stats = each.speculation
        assert stats.num_emitted_tokens == 1
        assert stats.num_accepted_tokens == sum(stats.accepted_by_depth) <= 1


@pytest.mark.parametrize(("extra", "drafted"), [(1, 9), (2, 9), (3, 10)])
def test_last_slots_are_not_drafted_for(lab: Lab, extra: int, drafted: int) -> None:
    """A12 With one place left nothing is drafted, with two a single token."""
    params = SamplingParams(max_tokens=4 * 3 + extra)
    llm = LLM(lab.model, draft=lab.model, num_speculative_tokens=3, **DRAFTED)
    prompt = random_prompt(3, 9)
    (output,) = llm.generate(prompt, params)
    assert_same(output, lab.baseline(prompt, params))
    assert output.speculation.num_draft_tokens == drafted
    assert output.speculation.acceptance_rate == 1.0
