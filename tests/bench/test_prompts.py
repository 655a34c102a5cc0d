"""Workloads: built in, from the public prompt files, from files of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench.prompts import HELD_OUT, workloads_of
from paceline.errors import ConfigError

NAMES = ["chat", "code", "edit", "maths", "summary"]
_PROMPTS = Path("shared") / "data" / "prompts"
_PLACES = [folder / _PROMPTS for start in (Path(__file__).resolve(), Path.cwd()) for folder in start.parents]
DATA = next((place for place in _PLACES if place.is_dir()), None)


def test_our_own_prompts_need_nothing() -> None:
    found = workloads_of([], None, [])
    assert [each.name for each in found] == NAMES
    assert all(len(each.prompts) >= 4 for each in found)
    texts = [prompt.text for each in found for prompt in each.prompts]
    assert len(set(texts)) == len(texts)


@pytest.mark.skipif(DATA is None, reason="the public prompt files are not in shared/data/prompts")
def test_the_public_prompt_files() -> None:
    found = {each.name: each for each in workloads_of(NAMES, DATA, [])}
    assert len(found["code"].prompts) == 164
    assert len(found["edit"].prompts) == 194
    for name in ("chat", "maths", "summary"):
        numbers = [int(prompt.name.partition("/")[2]) for prompt in found[name].prompts]
        assert len(numbers) == 20
        assert all(number % HELD_OUT == 0 for number in numbers)


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    lines = [
        {"prompt": "Hello"},
        {"turns": ["First", "Second"]},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
    ]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    (mine,) = workloads_of([], None, [path])
    assert mine.name == "mine"
    assert [prompt.text for prompt in mine.prompts] == ["Hello", "First", "Be brief.\n\nHi"]
    path.write_text(path.read_text().replace("Hello", "Hello!"))
    assert workloads_of([], None, [path])[0].digest != mine.digest


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": \n', "mine.jsonl, line 2 is not JSON"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "mine.jsonl, line 2 has none of messages, turns, prompt"),
        ('{"prompt": "a", "temperature": NaN}\n', "line 1: temperature is nan"),
        ("\n", "holds no prompt"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        workloads_of([], None, [path])


def test_names_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean `maths`"):
        workloads_of(["math"], None, [])
    with pytest.raises(ConfigError, match="the known ones are chat, code"):
        workloads_of(["poetry"], None, [])
    with pytest.raises(ConfigError, match="two workloads are called chat"):
        workloads_of(["chat", "chat"], None, [])
    with pytest.raises(ConfigError, match=r"there is no edit_eval.jsonl in"):
        workloads_of(["edit"], tmp_path, [])


def test_a_broken_public_file_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "edit_eval.jsonl").write_text(
        '{"task_id": "a", "instruction": "b", "input": "c"}\n{"x": 1}\n'
    )
    with pytest.raises(ConfigError, match=r"edit_eval.jsonl, line 2 has no task_id"):
        workloads_of(["edit"], tmp_path, [])
