"""From what a caller asks to what the core can take: token ids, resolved defaults, or a refusal."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from operator import index
from typing import Any

from paceline.core.params import SamplingParams
from paceline.errors import RequestError, shown
from paceline.loading import LoadedModel

Prompt = str | Sequence[int]

_SEED_STEP = 0x9E3779B97F4A7C15
"""Odd, so that the seeds of one request's completions never meet (Weyl sequence)."""


class Intake:
    """Checks requests against one model. Everything here concerns a single request: RequestError."""

    def __init__(self, model: LoadedModel, context_length: int, default_seed: int | None) -> None:
        self._model = model
        self._context_length = context_length
        self._default_seed = default_seed
        # Some checkpoints have tokens that their embedding lacks.
        self._vocab_size = model.vocab_size
        self._defaults = {
            name: value for name, value in asdict(model.generation).items() if value is not None
        }

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a raw text, or the ids themselves, checked for length and range."""
        ids = self._encode("the prompt", prompt) if isinstance(prompt, str) else _token_ids(prompt)
        self._check_ids("the prompt", ids)
        if not ids:
            raise RequestError("the prompt is empty: give at least one token.")
        if len(ids) >= self._context_length:
            raise RequestError(
                f"the prompt has {len(ids)} tokens and the context is {self._context_length}, output "
                "included: shorten the prompt."
            )
        return ids

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation in the model's chat template, up to where the answer begins."""
        text = self._model.apply_chat_template(messages, add_generation_prompt=True)
        return self._encode("the conversation", text, add_special_tokens=False)

    def one_completion(self, params: SamplingParams | None) -> SamplingParams:
        """The parameters of a stream. Raises RequestError unless they ask for exactly one completion."""
        if params is None:
            return SamplingParams()
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {shown(params)}: give SamplingParams.")
        if params.n != 1:
            raise RequestError(f"a stream has one completion, not n = {params.n}: use generate.")
        return params

    def params(self, params: SamplingParams, index: int = 0) -> SamplingParams:
        """What completion `index` of a request runs with: defaults filled in, texts as token ids, a seed."""
        resolved = params.resolved(self._defaults)
        self._check_ids("stop_token_ids", resolved.stop_token_ids)
        self._check_ids("logit_bias", list(resolved.logit_bias or ()))
        words = [form for word in resolved.bad_words for form in self._word_forms(word)]
        return replace(resolved, bad_words=words, seed=self._seed(resolved, index), n=1)

    def _seed(self, params: SamplingParams, index: int) -> int | None:
        if params.greedy:
            return params.seed
        seed = params.seed if params.seed is not None else self._default_seed
        if seed is None:
            return secrets.randbits(63)
        return seed if index == 0 else (seed + index * _SEED_STEP) % 2**63

    def _word_forms(self, word: str | Sequence[int]) -> list[list[int]]:
        """A word may follow a space or begin a line: both forms are forbidden, as in vLLM."""
        if not isinstance(word, str):
            self._check_ids("bad_words", word)
            return [list(word)]
        forms = [
            self._encode("bad_words", text, add_special_tokens=False)
            for text in (word.lstrip(" "), " " + word.lstrip(" "))
        ]
        return [form for form in forms if form]

    def _encode(self, name: str, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{name} holds half a character (the lone surrogate {text[error.start]!r}): send whole ones."
            ) from None
        return self._model.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        bad = next((token for token in ids if not 0 <= token < self._vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"{name} holds the token id {shown(bad)}: ids of {self._model.name} run from 0 to "
                f"{self._vocab_size - 1}."
            )


def _token_ids(prompt: object) -> list[int]:
    """Whole numbers of any library count; truth values, and what would have to be rounded, do not."""
    if isinstance(prompt, Iterable) and not isinstance(prompt, bytes | bytearray | memoryview | Mapping):
        items = list(prompt)
        if all(hasattr(item, "__index__") and not isinstance(item, bool) for item in items):
            with suppress(TypeError):  # arrays have the method and refuse
                return [index(item) for item in items]
    raise RequestError(f"the prompt is {shown(prompt)}: give a text or a list of token ids.")
