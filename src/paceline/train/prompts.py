"""Prompts to train on: JSONL files of several shapes, and what must not be trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, shown
from paceline.jsonl import numbered_lines

_FIELDS = ("messages", "turns", "prompt", "question")


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """A conversation up to where the target answers. temperature, max_tokens: None = as the command says."""

    messages: tuple[Mapping[str, str], ...]
    category: str = "general"
    source: str = ""
    temperature: float | None = None
    max_tokens: int | None = None

    @property
    def text(self) -> str:
        """What tells one prompt from another: the first thing that the user says, without spaces at the ends
        and in the case it is compared in."""
        return next((m["content"] for m in self.messages if m["role"] == "user"), "").strip().casefold()


def read_prompts(path: Path) -> list[TrainingPrompt]:
    """The prompts of a JSONL file, `.gz` or not.

    Each line has `prompt` or `question` (a text), `turns` (texts of which the first is asked), or `messages`
    (role and content; an answer at the end is left off), and may have `category`, `source`, `temperature` and
    `max_tokens`.

    Raises ConfigError naming file and line of what cannot be read.
    """
    return [prompt_of(record, path.name, f"{path}, line {number}") for number, record in read_objects(path)]


def read_objects(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file, one at least, `.gz` or not, each with the number of its line.

    Raises ConfigError naming file and line of what cannot be read.
    """
    objects = []
    for number, line in numbered_lines(path, "prompts"):
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where} is not JSON ({error}): mend or delete it.") from None
        if not isinstance(record, dict):
            raise ConfigError(f"{where} is {shown(record)}: each line must be an object.")
        objects.append((number, record))
    if not objects:
        raise ConfigError(f"{path} holds no prompt: give a file with one JSON object per line.")
    return objects


def without(prompts: list[TrainingPrompt], excluded: list[TrainingPrompt]) -> list[TrainingPrompt]:
    """Those whose first user turn is none of the excluded ones' (spaces at the ends and case apart)."""
    texts = {prompt.text for prompt in excluded}
    return [prompt for prompt in prompts if prompt.text not in texts]


def prompt_of(record: dict[str, Any], source: str, where: str) -> TrainingPrompt:
    """where: of the record, for the ConfigError about it."""
    most = _number(record, "max_tokens", where)
    return TrainingPrompt(
        messages=_messages(record, where),
        category=str(record.get("category", "general")),
        source=str(record.get("source", source)),
        temperature=_number(record, "temperature", where),
        max_tokens=None if most is None else max(1, int(most)),
    )


def _messages(record: dict[str, Any], where: str) -> tuple[Mapping[str, str], ...]:
    name = next((name for name in _FIELDS if record.get(name)), None)
    if name is None:
        raise ConfigError(f"{where} has none of {', '.join(_FIELDS)}: it must have one of them.")
    value = record[name]
    if name != "messages":
        text = value[0] if name == "turns" and isinstance(value, list) else value
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{where}: {name} is {shown(value)}: give a text that is not empty.")
        return ({"role": "user", "content": text},)
    if not isinstance(value, list) or not all(_is_message(each) for each in value):
        raise ConfigError(f"{where}: messages must be a list of objects with role and content, both texts.")
    messages = [{"role": each["role"], "content": each["content"]} for each in value]
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise ConfigError(f"{where}: messages hold nothing to answer: add a user's.")
    return tuple(messages)


def _is_message(each: object) -> bool:
    return isinstance(each, dict) and all(isinstance(each.get(key), str) for key in ("role", "content"))


def _number(record: dict[str, Any], name: str, where: str) -> float | None:
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise ConfigError(f"{where}: {name} is {shown(value)}: give a number that is not negative.")
    return value
