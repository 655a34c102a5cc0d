"""Build the prompt file of the benchmarks: the same token ids for every engine.

Every set holds eight chat prompts of one kind and about one length, special tokens and generation prompt
included. `python benchmarks/prompts.py --tokenizer DIR --out FILE`; DIR holds a `tokenizer.json` and the chat
template (`chat_template.jinja`, or in `tokenizer_config.json`).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

REPOSITORY = Path(__file__).resolve().parent.parent
DEFAULT_DATA = REPOSITORY.parent / "shared" / "data" / "prompts"
PROMPTS_PER_SET = 8

Question = tuple[str, str]
"""(identity, text of the user's message)"""


@dataclass(frozen=True)
class PromptSet:
    """Questions of one source whose rendered prompt has `low` to `high` tokens."""

    source: Callable[[Path], Iterable[Question]]
    low: int
    high: int


def open_questions(data: Path) -> Iterator[Question]:
    """Open-ended conversation: little overlap between prompt and answer. One category after the other."""
    categories = ("writing", "roleplay", "reasoning", "stem", "humanities")
    by_category: list[list[Question]] = [list(_spec_bench(data, category)) for category in categories]
    for rank in range(max(map(len, by_category))):
        yield from (questions[rank] for questions in by_category if rank < len(questions))


def arithmetic(data: Path) -> Iterator[Question]:
    """Grade-school problems (GSM8K)."""
    for number, entry in enumerate(_json_lines(data / "gsm8k_test.jsonl")):
        yield f"gsm8k/{number}", entry["question"]


def code(data: Path) -> Iterator[Question]:
    """Functions to complete (HumanEval)."""
    for entry in _json_lines(data / "humaneval.jsonl.gz"):
        yield entry["task_id"], f"Complete this Python function.\n\n```python\n{entry['prompt'].strip()}\n```"


def edits(data: Path) -> Iterator[Question]:
    """Functions to change (EditEval): the answer repeats most of the prompt."""
    for entry in _json_lines(data / "edit_eval.jsonl"):
        text = f"{entry['instruction'].strip()}\n\n```python\n{entry['input'].strip()}\n```"
        yield entry["task_id"], f"{text}\n\nReturn the whole changed code."


def articles(data: Path) -> Iterator[Question]:
    """News articles to summarise (Spec-Bench)."""
    return _spec_bench(data, "summarization")


SETS = {
    "chat-100": PromptSet(open_questions, 65, 140),
    "math-100": PromptSet(arithmetic, 85, 115),
    "code-200": PromptSet(code, 130, 230),
    "edit-200": PromptSet(edits, 150, 260),
    "long-1000": PromptSet(articles, 880, 1120),
}


class ChatEncoder:
    """Renders a single-turn conversation with a model's chat template and encodes it."""

    def __init__(self, folder: Path) -> None:
        tokenizer_file = folder / "tokenizer.json"
        self.digest = hashlib.sha256(tokenizer_file.read_bytes()).hexdigest()
        self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)
        self._template = environment.from_string(_template_text(folder))

    def __call__(self, message: str) -> list[int]:
        text = self._template.render(
            messages=[{"role": "user", "content": message}], add_generation_prompt=True
        )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def build(data: Path, encode: ChatEncoder) -> dict[str, Any]:
    """The prompt file's content. Raises ValueError if a source has too few prompts of the wanted length."""
    sets = {name: _choose(name, chosen, data, encode) for name, chosen in SETS.items()}
    return {"tokenizer_sha256": encode.digest, "sets": sets}


def _choose(name: str, chosen: PromptSet, data: Path, encode: ChatEncoder) -> list[dict[str, Any]]:
    prompts: list[dict[str, Any]] = []
    for identity, text in chosen.source(data):
        token_ids = encode(text)
        if chosen.low <= len(token_ids) <= chosen.high:
            prompts.append({"id": identity, "text": text, "token_ids": token_ids})
        if len(prompts) == PROMPTS_PER_SET:
            return prompts
    raise ValueError(f"{name}: only {len(prompts)} prompts of {chosen.low} to {chosen.high} tokens")


def _spec_bench(data: Path, category: str) -> Iterator[Question]:
    for entry in _json_lines(data / "spec_bench.jsonl"):
        if entry["category"] == category:
            yield f"spec_bench/{entry['question_id']}", entry["turns"][0]


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _template_text(folder: Path) -> str:
    own_file = folder / "chat_template.jinja"
    if own_file.exists():
        return own_file.read_text(encoding="utf-8")
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    template: str = config["chat_template"]
    return template


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA, help="folder of the public prompt sets")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    content = build(arguments.data, ChatEncoder(arguments.tokenizer))
    arguments.out.write_text(json.dumps(content, indent=1), encoding="utf-8")
    for name, prompts in content["sets"].items():
        print(f"{name}: {[len(prompt['token_ids']) for prompt in prompts]} tokens")


if __name__ == "__main__":
    main()
