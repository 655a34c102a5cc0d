"""What is to be traced: a JSONL file of prompts, each with a name of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.engine.intake import Intake
from paceline.errors import ConfigError, RequestError, shown
from paceline.train.prompts import prompt_of, read_objects

_NAMES = ("id", "task_id", "question_id")
_IDS = "prompt_token_ids"


@dataclass(frozen=True, slots=True)
class TracePrompt:
    """request_id: as the file names it, or the file and the line.  number: from 0, in the file's order."""

    request_id: str
    number: int
    token_ids: tuple[int, ...]


def read_trace_prompts(path: Path, intake: Intake, *, raw: bool, limit: int | None) -> list[TracePrompt]:
    """The first `limit` prompts of a JSONL file, `.gz` or not, as token ids.

    A line has `prompt_token_ids`, or what a line of training prompts has (`train.prompts.read_prompts`). raw:
    texts are continued as they are, without the chat template.

    Raises ConfigError naming file and line.
    """
    prompts: list[TracePrompt] = []
    lines: dict[str, int] = {}
    for number, (line, record) in enumerate(read_objects(path)[:limit]):
        where = f"{path}, line {line}"
        name = _name(record, path, line, where)
        if name in lines:
            raise ConfigError(
                f"{where} has the id {shown(name)} of line {lines[name]}: give each prompt its own, or none."
            )
        lines[name] = line
        try:
            ids = _token_ids(record, path, where, intake, raw=raw)
        except RequestError as error:
            raise ConfigError(f"{where}: {error} Mend or delete the line.") from None
        prompts.append(TracePrompt(name, number, tuple(ids)))
    return prompts


def _name(record: dict[str, Any], path: Path, line: int, where: str) -> str:
    field = next((name for name in _NAMES if name in record), None)
    if field is None:
        return f"{path.name.removesuffix('.gz').removesuffix('.jsonl')}/{line}"
    value = record[field]
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise ConfigError(
            f"{where}: {field} is {shown(value)}: give a text or a whole number, or leave it out."
        )
    return str(value)


def _token_ids(record: dict[str, Any], path: Path, where: str, intake: Intake, *, raw: bool) -> list[int]:
    if _IDS in record:
        return intake.prompt_ids(record[_IDS])
    messages = prompt_of(record, path.name, where).messages
    if raw:
        return intake.prompt_ids("\n".join(message["content"] for message in messages))
    return intake.prompt_ids(intake.chat_ids(messages))
