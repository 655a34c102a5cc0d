"""What is asked: workloads by name, from public prompt files or our own few, and prompt files of yours."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from paceline.bench.builtin_prompts import PROMPTS
from paceline.errors import ConfigError, shown
from paceline.train.prompts import read_objects, read_prompts

Messages = tuple[Mapping[str, str], ...]

HELD_OUT = 4
"""Of Spec-Bench one question in so many, by its id: no head of ours was trained on those."""
_CHAT = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """name: what it is called in the report.  messages: a conversation up to the answer."""

    name: str
    messages: Messages

    @property
    def text(self) -> str:
        """Without a chat template: what the messages say."""
        return "\n\n".join(message["content"] for message in self.messages)


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    prompts: tuple[BenchPrompt, ...]

    @property
    def digest(self) -> str:
        """Of every word of it."""
        said = [[prompt.name, [dict(message) for message in prompt.messages]] for prompt in self.prompts]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def workloads_of(names: Sequence[str], data: Path | None, files: Sequence[Path]) -> list[Workload]:
    """The named ones, from the prompt files in `data` or our own where it is None, and one for each of
    `files`, called as the file. Neither = all names. Raises ConfigError."""
    chosen = [_named(name, data) for name in names or (() if files else PROMPTS)]
    chosen += [_from_file(path) for path in files]
    twice = next((each.name for each in chosen if [one.name for one in chosen].count(each.name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two workloads are called {twice}: name each once, or rename the prompt file.")
    return chosen


def _named(name: str, data: Path | None) -> Workload:
    if name not in PROMPTS:
        near = difflib.get_close_matches(name, PROMPTS, n=1, cutoff=0.5)
        help_ = f"did you mean `{near[0]}`?" if near else f"the known ones are {', '.join(PROMPTS)}."
        raise ConfigError(f"there is no workload {shown(name)}: {help_} Your own prompts go into --prompts.")
    if data is None:
        return Workload(name, tuple(_asked(f"{name}/{at}", text) for at, text in enumerate(PROMPTS[name])))
    prompts = tuple(_SOURCES[name](data))
    if not prompts:
        raise ConfigError(f"{data} has no prompt for the workload {name}: give another --data.")
    return Workload(name, prompts)


def _from_file(path: Path) -> Workload:
    name = path.name.partition(".")[0]
    found = read_prompts(path)
    return Workload(name, tuple(BenchPrompt(f"{name}/{at}", each.messages) for at, each in enumerate(found)))


def _asked(name: str, text: str) -> BenchPrompt:
    return BenchPrompt(name, ({"role": "user", "content": text},))


# ---------------------------------------------------------------- the public prompt files


def _chat(data: Path) -> Iterator[BenchPrompt]:
    """Spec-Bench's part from MT-Bench, its first turns; one category after the other."""
    kinds = [list(_spec_bench(data, kind)) for kind in _CHAT]
    return (prompt for prompt in chain.from_iterable(zip_longest(*kinds)) if prompt is not None)


def _code(data: Path) -> Iterator[BenchPrompt]:
    for entry in _entries(data / "humaneval.jsonl.gz", "task_id", "prompt"):
        text = f"Complete this Python function.\n\n```python\n{entry['prompt'].strip()}\n```"
        yield _asked(entry["task_id"], text)


def _edit(data: Path) -> Iterator[BenchPrompt]:
    for entry in _entries(data / "edit_eval.jsonl", "task_id", "instruction", "input"):
        text = f"{entry['instruction'].strip()}\n\n```python\n{entry['input'].strip()}\n```"
        yield _asked(entry["task_id"], f"{text}\n\nReturn the whole changed code.")


def _spec_bench(data: Path, category: str) -> Iterator[BenchPrompt]:
    for entry in _entries(data / "spec_bench.jsonl", "question_id", "category", "turns"):
        if entry["category"] == category and entry["question_id"] % HELD_OUT == 0:
            yield _asked(f"spec_bench/{entry['question_id']}", entry["turns"][0])


_SOURCES: dict[str, Callable[[Path], Iterator[BenchPrompt]]] = {
    "chat": _chat,
    "code": _code,
    "edit": _edit,
    "maths": partial(_spec_bench, category="math_reasoning"),
    "summary": partial(_spec_bench, category="summarization"),
}


def _entries(path: Path, *needed: str) -> Iterator[dict[str, Any]]:
    """Raises ConfigError naming file and line of what is none."""
    if not path.is_file():
        raise ConfigError(
            f"there is no {path.name} in {path.parent}: --data is the folder of spec_bench.jsonl, "
            "edit_eval.jsonl and humaneval.jsonl.gz; without it a few prompts of our own serve."
        )
    for number, entry in read_objects(path):
        missing = next((name for name in needed if name not in entry), None)
        if missing is not None:
            raise ConfigError(f"{path}, line {number} has no {missing}: it is no line of that file.")
        yield entry
