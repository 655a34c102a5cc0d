"""The answers stage, on a tiny target with a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline import LLM
from paceline.errors import ConfigError, ModelError
from paceline.loading import LoadedModel, load
from paceline.train.generate import AnswerPlan, answer
from paceline.train.prompts import TrainingPrompt
from tests import tiny

TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
PLAN = AnswerPlan(max_tokens=6, temperature=0.8, seed=3)


def target(folder: Path, template: str = TEMPLATE) -> LoadedModel:
    path = tiny.write_random(folder / "target", context=96)
    if template:
        (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return load(str(path))


def prompts(count: int) -> list[TrainingPrompt]:
    texts = [f"the {'quick ' * n}fox" for n in range(count)]
    return [
        TrainingPrompt(({"role": "user", "content": text},), temperature=None if n % 2 else 0.0)
        for n, text in enumerate(texts)
    ]


def engine(model: LoadedModel) -> LLM:
    return LLM(model.name, draft="none", max_num_seqs=1, **tiny.ENGINE)


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_answers_are_the_targets_own(tmp_path: Path) -> None:
    model = target(tmp_path)
    path = tmp_path / "answers.jsonl"
    seen: list[int] = []
    count = answer(
        model, lambda: engine(model), prompts(9), path, PLAN, progress=lambda done, _: seen.append(done)
    )
    assert count == 9
    assert seen[0] == 0
    assert seen[-1] == 9
    with engine(model) as llm:
        for record, prompt in zip(records(path), prompts(9), strict=True):
            assert record["prompt_token_ids"] == llm.chat_prompt(prompt.messages)
            assert record["temperature"] == (PLAN.temperature if prompt.temperature is None else 0.0)
            assert len(record["token_ids"]) == 6  # type: ignore[arg-type]


def test_it_goes_on_where_it_was_killed_and_does_nothing_twice(tmp_path: Path) -> None:
    model = target(tmp_path)
    whole, parts = tmp_path / "a" / "whole.jsonl", tmp_path / "b" / "parts.jsonl"
    answer(model, lambda: engine(model), prompts(9), whole, PLAN)
    answer(model, lambda: engine(model), prompts(9), parts, PLAN)
    lines = parts.read_bytes().splitlines(keepends=True)
    parts.write_bytes(b"".join(lines[:4]) + lines[4][:30])
    assert answer(model, lambda: engine(model), prompts(9), parts, PLAN) == 9
    assert parts.read_bytes() == whole.read_bytes()

    def never() -> LLM:
        raise AssertionError("nothing is left to do")

    assert answer(model, never, prompts(9), parts, PLAN) == 9


def test_other_prompts_or_another_plan_are_refused(tmp_path: Path) -> None:
    model = target(tmp_path)
    path = tmp_path / "answers.jsonl"
    answer(model, lambda: engine(model), prompts(2), path, PLAN)
    with pytest.raises(ModelError, match="begun with another prompts: delete it"):
        answer(model, lambda: engine(model), prompts(3), path, PLAN)
    with pytest.raises(ModelError, match="begun with another plan"):
        answer(model, lambda: engine(model), prompts(2), path, AnswerPlan(max_tokens=7))


def test_a_file_of_somebody_elses_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text("{}\n")
    model = target(tmp_path)
    with pytest.raises(ModelError, match="was not begun by this command"):
        answer(model, lambda: engine(model), prompts(2), path, PLAN)
    assert path.read_text() == "{}\n"


def test_a_prompt_that_is_too_long_is_passed_over(tmp_path: Path) -> None:
    model = target(tmp_path)
    long = TrainingPrompt(({"role": "user", "content": "fox " * 200},))
    path = tmp_path / "answers.jsonl"
    some = prompts(3)
    assert answer(model, lambda: engine(model), [some[0], long, some[1]], path, PLAN) == 2
    assert [record["prompt"] for record in records(path)] == [0, 2]


def test_a_target_without_a_template(tmp_path: Path) -> None:
    model = target(tmp_path, template="")
    path = tmp_path / "answers.jsonl"
    with pytest.raises(ConfigError, match=r"no chat template: use an instruction-tuned model, or .* --raw"):
        answer(model, lambda: engine(model), prompts(2), path, PLAN)
    raw = AnswerPlan(max_tokens=6, raw=True)
    assert answer(model, lambda: engine(model), prompts(2), path, raw) == 2
    with pytest.raises(ConfigError, match="which raw leaves out"):
        AnswerPlan(raw=True, invented=2)


def test_the_target_invents_prompts(tmp_path: Path) -> None:
    """A model that says the letters in turn and ends after the last."""
    letters = 26
    size = letters + 1
    logits = tiny.successor_logits(size, {n: n + 1 for n in range(letters)}, 0)
    folder = tiny.write_markov(tmp_path / "target", logits, eos=[letters], context=256)
    template = "a{% for m in messages %}{{ m['content'] }}{% endfor %}b"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    model = load(str(folder))
    path = tmp_path / "answers.jsonl"
    plan = AnswerPlan(max_tokens=5, invented=3)
    assert answer(model, lambda: engine(model), [], path, plan) == 3
    for record in records(path):
        text = model.tokenizer.decode(record["prompt_token_ids"])  # type: ignore[arg-type]
        assert "cdefghij" in text
        assert record["source"] == "invented"
