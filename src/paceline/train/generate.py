"""The answers stage: the target answers the given prompts, and prompts that it thinks up itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from paceline.core.params import SamplingParams
from paceline.engine.llm import LLM
from paceline.errors import ConfigError, EngineError, ModelError, RequestError
from paceline.loading import LoadedModel
from paceline.train.prompts import TrainingPrompt

_MARK = "\u2402user\u2403"
"""Stands for a user's turn, in a text that no template has."""

_ROUNDS_OF_A_BATCH = 4
"""Prompts given to the engine at once, in full batches: at their end it runs half empty."""

_SHORTEST_PROMPT = 15
"""Characters."""

_ROUNDS_OF_INVENTION = 20
"""How often the target is asked for the prompts that are still missing, before it is given up."""


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """temperature, max_tokens: of prompts that do not say. invented: prompts that the target writes itself,
    after the given ones. raw: prompts are continued as they are, without the chat template. seed: of all
    sampling."""

    temperature: float = 0.0
    max_tokens: int = 256
    invented: int = 0
    raw: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or self.max_tokens < 3 or self.invented < 0:
            raise ConfigError(
                "temperature and the number of invented prompts must not be negative, answers need 3 tokens."
            )
        if self.raw and self.invented:
            raise ConfigError("prompts are invented in the chat template, which raw leaves out: choose one.")


class _Made(msgspec.Struct, frozen=True):
    """What an answers' file was made of, beside it."""

    target: str
    fingerprint: str
    prompts: str
    plan: str


def answer(
    model: LoadedModel,
    engine: Callable[[], LLM],
    prompts: Sequence[TrainingPrompt],
    path: Path,
    plan: AnswerPlan,
    *,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> int:
    """Writes the answers that the file does not have yet, and gives their number in all.

    engine: makes the engine of `model`; called only if something is left to do. A prompt that the target
    refuses, being too long, is passed over. progress: called with prompts done and tokens generated.
    Raises ModelError for a file made of something else, ConfigError for a target without a chat template.
    """
    if model.chat_template is None and not plan.raw:
        raise ConfigError(
            f"the target {model.name} has no chat template: use an instruction-tuned model, or let it "
            "continue the prompts as they are with --raw."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_made(model, prompts, path, plan)
    lines, done = _begun(path)
    total = len(prompts) + plan.invented
    progress(min(done, total), 0)
    if done >= total:
        return lines
    with engine() as llm, path.open("ab") as file:
        return lines + _write_rest(llm, prompts, plan, done, file, progress)


def _write_rest(
    llm: LLM,
    prompts: Sequence[TrainingPrompt],
    plan: AnswerPlan,
    done: int,
    file: BinaryIO,
    progress: Callable[[int, int], None],
) -> int:
    inventor = _Inventor(llm, plan) if plan.invented else None
    total, lines, tokens = len(prompts) + plan.invented, 0, 0
    at_once = _ROUNDS_OF_A_BATCH * llm.config.scheduler.max_num_seqs
    for first in range(done, total, at_once):
        numbers = range(first, min(total, first + at_once))
        given = list(prompts[first : numbers.stop])
        invented = inventor.prompts(len(numbers) - len(given), first) if inventor else []
        written, count = _answered(llm, list(zip(numbers, [*given, *invented], strict=False)), plan)
        file.write(b"".join(written))
        file.flush()
        lines, tokens = lines + len(written), tokens + count
        progress(numbers.stop, tokens)
    return lines


def _ids(llm: LLM, prompt: TrainingPrompt, *, raw: bool) -> list[int]:
    if raw:
        return llm.intake.prompt_ids("\n".join(message["content"] for message in prompt.messages))
    return llm.intake.prompt_ids(llm.chat_prompt(prompt.messages))


def _answered(
    llm: LLM, chosen: Sequence[tuple[int, TrainingPrompt]], plan: AnswerPlan
) -> tuple[list[bytes], int]:
    """Lines, and the number of tokens in them."""
    usable, ids, params = [], [], []
    for number, prompt in chosen:
        try:
            ids.append(_ids(llm, prompt, raw=plan.raw))
        except RequestError:
            continue
        temperature = plan.temperature if prompt.temperature is None else prompt.temperature
        most = prompt.max_tokens or plan.max_tokens
        seed = plan.seed * 1_000_003 + number
        params.append(SamplingParams(max_tokens=most, temperature=temperature, seed=seed))
        usable.append((number, prompt, temperature))
    lines, tokens = [], 0
    for (number, prompt, temperature), output in zip(usable, llm.generate(ids, params), strict=True):
        if output.engine_fault:
            raise EngineError(f"the engine failed while it generated answers: {output.error}")
        if output.finish_reason == "error" or not output.token_ids:
            continue
        record = {
            "prompt": number,
            "category": prompt.category,
            "source": prompt.source,
            "temperature": temperature,
            "prompt_token_ids": list(output.prompt_token_ids),
            "token_ids": list(output.token_ids),
        }
        lines.append(json.dumps(record).encode() + b"\n")
        tokens += len(output.token_ids)
    return lines, tokens


class _Inventor:
    """Lets the target write user turns: it goes on from where its template begins one (Magpie,
    arXiv 2406.08464)."""

    def __init__(self, llm: LLM, plan: AnswerPlan) -> None:
        self._llm, self._plan = llm, plan
        text = llm.model.apply_chat_template([{"role": "user", "content": _MARK}])
        head, mark, _ = text.partition(_MARK)
        if not mark or not head:
            raise ConfigError(
                f"the chat template of {llm.model.name} puts nothing before a user's turn, so that the "
                "target cannot invent prompts: give some with --data."
            )
        self._start = llm.tokenizer.encode(head, add_special_tokens=False)

    def prompts(self, count: int, number: int) -> list[TrainingPrompt]:
        """number: of the first, which decides the noise."""
        found: list[TrainingPrompt] = []
        if not count:
            return found
        for again in range(_ROUNDS_OF_INVENTION):
            wanted = count - len(found)
            if not wanted:
                return found
            seed = self._plan.seed * 7919 + number * 31 + again * 104_729 + 1
            params = [
                SamplingParams(max_tokens=160, temperature=1.0, top_p=0.95, seed=seed + index)
                for index in range(wanted)
            ]
            for output in self._llm.generate([self._start] * wanted, params):
                text = output.text.strip()
                if output.finish_reason == "stop" and len(text) >= _SHORTEST_PROMPT:
                    message = {"role": "user", "content": text}
                    found.append(TrainingPrompt((message,), source="invented"))
        if not found:
            raise ModelError(
                f"{self._llm.model.name} writes no user turns of its own: give prompts with --data instead."
            )
        return found


def _check_made(model: LoadedModel, prompts: Sequence[TrainingPrompt], path: Path, plan: AnswerPlan) -> None:
    text = json.dumps([asdict(prompt) for prompt in prompts])
    made = _Made(
        target=model.name,
        fingerprint=model.provenance.fingerprint,
        prompts=hashlib.sha256(text.encode()).hexdigest(),
        plan=json.dumps(asdict(plan)),
    )
    beside = path.with_suffix(".meta.json")
    if not beside.exists() or not path.exists():
        if path.exists() and path.stat().st_size:
            raise ModelError(
                f"{path} was not begun by this command: leave out --data to use it as it is, or delete it."
            )
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(made)))
        return
    try:
        found = msgspec.json.decode(beside.read_bytes(), type=_Made)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{beside} is damaged ({error}): delete it and {path.name}.") from None
    changed = [name for name in made.__struct_fields__ if getattr(made, name) != getattr(found, name)]
    if changed:
        raise ModelError(
            f"{path} was begun with another {' and another '.join(changed)}: delete it to start anew, or "
            "give another --out."
        )


def _begun(path: Path) -> tuple[int, int]:
    """Whole lines, and the number of the prompt to go on with. What follows the last one is cut off."""
    if not path.exists():
        return 0, 0
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
    lines = content[:end].splitlines()
    if not lines:
        return 0, 0
    try:
        return len(lines), int(json.loads(lines[-1])["prompt"]) + 1
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{path}: the last line is no answer of this command ({error}): delete it."
        ) from None
