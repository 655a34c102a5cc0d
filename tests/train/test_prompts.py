"""Prompt files."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.train.prompts import read_prompts, without


def write(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": "Why?"}',
        '{"question": "Why?", "answer": "So."}',
        '{"turns": ["Why?", "And then?"]}',
        '{"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}',
    ],
)
def test_every_shape_is_one_user_turn(tmp_path: Path, line: str) -> None:
    (prompt,) = read_prompts(write(tmp_path, line))
    assert list(prompt.messages) == [{"role": "user", "content": "Why?"}]


def test_what_a_line_may_say_beside(tmp_path: Path) -> None:
    line = '{"prompt": "Why?", "category": "qa", "source": "me", "temperature": 0.7, "max_tokens": 9}'
    (prompt,) = read_prompts(write(tmp_path, line))
    assert (prompt.category, prompt.source, prompt.temperature, prompt.max_tokens) == ("qa", "me", 0.7, 9)


def test_compressed(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}\n\n{"prompt": "b"}\n'))
    assert [prompt.text for prompt in read_prompts(path)] == ["a", "b"]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="is it whole"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is .1.: each line must be an object"),
        ('{"text": "x"}', "line 2 has none of messages, turns, prompt, question"),
        ('{"prompt": "  "}', "line 2: prompt is"),
        ('{"turns": [1]}', r"line 2: turns is \[1\]"),
        ('{"messages": ["x"]}', "line 2: messages must be a list of objects"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "line 2: messages hold nothing to answer"),
        ('{"prompt": "x", "temperature": "warm"}', "line 2: temperature is 'warm'"),
        ('{"prompt": "x", "max_tokens": -1}', "line 2: max_tokens is -1"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_prompts(write(tmp_path, '{"prompt": "x"}', line))


def test_no_file_and_no_prompt(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="holds no prompt"):
        read_prompts(write(tmp_path, ""))


def test_evaluation_prompts_are_left_out(tmp_path: Path) -> None:
    prompts = read_prompts(write(tmp_path, '{"prompt": "One"}', '{"prompt": "Two"}', '{"prompt": "three"}'))
    (tmp_path / "other").mkdir()
    excluded = read_prompts(write(tmp_path / "other", '{"turns": [" two ", "x"]}', '{"question": "Three"}'))
    assert [prompt.text for prompt in without(prompts, excluded)] == ["one"]
