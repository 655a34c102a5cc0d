"""What a caller may ask of one request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.errors import RequestError, shown

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy decoding: dividing logits by them would overflow float32."""

_LARGEST_FACTOR = 1e6
"""What logits are multiplied or divided by must leave them finite in float32."""

_NUMBERS = {  # low, high, low excluded
    "temperature": (0.0, _LARGEST_FACTOR, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (1 / _LARGEST_FACTOR, _LARGEST_FACTOR, False),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
}
_LONGEST_TENANT = 256
_INTEGERS = {  # low, high
    "top_k": (0, 2**64 - 1),
    "max_tokens": (1, 2**64 - 1),
    "min_tokens": (0, 2**64 - 1),
    "logprobs": (0, 2**64 - 1),
    "n": (1, 1024),
    "num_speculative_tokens": (0, 2**64 - 1),
    "seed": (-(2**63), 2**64 - 1),
}
_OPTIONAL = {
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("max_tokens", "logprobs", "num_speculative_tokens", "seed"),
}
_SWITCHES = ("ignore_eos", "include_stop_in_output", "skip_special_tokens")
_NEUTRAL = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    A filter left at None takes the model's own default (its generation config), and neutral where it
    has none. `max_tokens=None` runs to the context limit. Order of processing: logit bias, bad words and
    `min_tokens`, penalties, temperature, top-k, top-p, min-p.

    temperature: 0 = greedy.  top_k: 0 = off.  seed: None = drawn from the system, reported in the output.
    n: number of completions; completion i uses its own seed, derived from `seed`, the first being `seed`.
    logprobs: number of alternatives reported per token, from the raw logits.
    bad_words: texts or token id sequences that must not appear.
    num_speculative_tokens: draft length of this request; None = the engine's, 0 = no speculation.
    tenant: on whose behalf; where outputs are learnt from per tenant, those of nobody (empty) are not.

    Raises RequestError when a value is out of range.
    """

    max_tokens: int | None = 256
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    seed: int | None = None
    n: int = 1
    num_speculative_tokens: int | None = None
    tenant: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        for name, (low, high, open_low) in _NUMBERS.items():
            if (value := getattr(self, name)) is not None or name not in _OPTIONAL:
                _number(name, value, low, high, open_low=open_low)
        for name, (least, most) in _INTEGERS.items():
            if (value := getattr(self, name)) is not None or name not in _OPTIONAL:
                _integer(name, value, least, most)
        object.__setattr__(self, "tenant", _tenant(self.tenant))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {shown(getattr(self, name))}: give True or False.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}: lower min_tokens."
            )

    def resolved(self, defaults: Mapping[str, float] | None = None) -> SamplingParams:
        """This request with every filter set: the caller's value, else the model's, else neutral."""
        defaults = defaults or {}
        changes: dict[str, Any] = {
            name: defaults.get(name, neutral)
            for name, neutral in _NEUTRAL.items()
            if getattr(self, name) is None
        }
        return replace(self, **changes) if changes else self

    @property
    def greedy(self) -> bool:
        return (self.temperature or 0.0) < GREEDY_BELOW

    @property
    def plain(self) -> bool:
        """Whether the raw logits decide: no filter, mask, bias or penalty touches them."""
        filters = not self.greedy and bool(self.top_k or self.top_p != 1.0 or self.min_p)
        penalties = bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)
        return not (filters or penalties or self.logit_bias or self.bad_words or self.min_tokens)


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    allowed = f"{'more than' if open_low else 'at least'} {low:g} and at most {high:g}"
    finite = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    if not finite:
        raise RequestError(f"{name} is {shown(value)}: give a finite number, {allowed}.")
    assert isinstance(value, int | float)
    if not low <= value <= high or (open_low and value == low):
        given = f"{value:g}" if isinstance(value, float) else shown(value)
        raise RequestError(f"{name} is {given}: it must be {allowed}.")


def _integer(name: str, value: object, low: int, high: int = 2**64 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {shown(value)}: give a whole number.")
    if value < low:
        raise RequestError(f"{name} is {shown(value)}: it must be at least {low}.")
    if value > high:
        limit = "it must fit 64 bits" if high == 2**64 - 1 else f"it must be at most {high}"
        raise RequestError(f"{name} is {shown(value)}: {limit}.")


def _strings(name: str, value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) for item in items):
        raise RequestError(f"{name} is {shown(value)}: give a string or a list of strings.")
    if not all(items):
        raise RequestError(f"{name} holds an empty string, which would match at once: remove it.")
    half = next((item for item in items if any("\ud800" <= char <= "\udfff" for char in item)), None)
    if half is not None:
        raise RequestError(f"{name} holds {shown(half)}, half a character that no text contains: remove it.")
    return tuple(items)


def _tenant(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_TENANT:
        raise RequestError(f"tenant is {shown(value)}: give a text of at most {_LONGEST_TENANT} characters.")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise RequestError(f"tenant is {shown(value)}: half a character is no name.")
    return value


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not all(type(item) is int and item >= 0 for item in value):
        raise RequestError(f"{name} is {shown(value)}: give a list of token ids (whole numbers from 0).")
    return tuple(value)


def _bad_words(value: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise RequestError(f"bad_words is {shown(value)}: give a list of strings or of token id lists.")
    words = tuple(item if isinstance(item, str) else _token_ids("bad_words", item) for item in value)
    if not all(words):
        raise RequestError("bad_words holds an empty entry: remove it.")
    return words


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError(f"logit_bias is {shown(value)}: give a mapping from token id to bias.")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        if not (type(key) is int or (isinstance(key, str) and key.isdecimal())):
            raise RequestError(
                f"logit_bias has the key {shown(key)}: keys are token ids (whole numbers from 0)."
            )
        if len(str(key)) > 20 if isinstance(key, str) else key >= 2**64:
            raise RequestError(f"logit_bias has the key {shown(key)}, which is no token id.")
        _number(f"logit_bias[{key}]", amount, -100.0, 100.0)
        bias[int(key)] = float(amount)
    return bias or None
