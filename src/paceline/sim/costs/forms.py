"""What passes and questions to drafters take: the forms of it.

Every form is monotone by its construction: no coefficient is below 0 and no table falls. All times are in
seconds. A form is data (a msgspec struct), so that it is written to a file and read back as it is; anything
else with the method of the protocol serves as well, but cannot be saved.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from typing import Annotated, Literal, Protocol, runtime_checkable

import msgspec
from msgspec import Meta

_MOST_S = 1e6
Seconds = Annotated[float, Meta(ge=0, le=_MOST_S, description="seconds, from 0 to a million")]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1, description="a whole number from 1")]


class PassTime(Protocol):
    """A pass of the target or a draft model."""

    def seconds(self, new_tokens: int, kv_tokens: int, requests: int) -> float:
        """new_tokens: in the pass, roots and guesses of all requests.  kv_tokens: that those look back on,
        the contexts of all requests together."""
        ...


@dataclass(frozen=True, slots=True)
class PassShape:
    """What a pass computes where its requests differ, as a prompt differs from requests that decode.

    new_tokens, kv_tokens, requests: as of `PassTime`.  pairs: of a new token and one of its request's that it
    looks back on, new ones too.  kv_again: KV tokens of requests with more than one new token.  rows: new
    tokens whose logits are wanted.
    """

    new_tokens: int
    kv_tokens: int
    requests: int
    pairs: float
    kv_again: float
    rows: int

    @classmethod
    def even(cls, new_tokens: int, kv_tokens: int, requests: int, most_rows: int) -> PassShape:
        """All requests have the same share of all. most_rows: logits wanted per request at most."""
        requests = max(requests, 1)
        each = new_tokens / requests
        return cls(
            new_tokens,
            kv_tokens,
            requests,
            each * (kv_tokens + new_tokens / 2),
            min(max(each - 1.0, 0.0), 1.0) * kv_tokens,
            min(new_tokens, most_rows * requests),
        )

    @classmethod
    def of(cls, items: Iterable[tuple[int, int, int]]) -> PassShape:
        """items: of each request its new tokens, those before them, and the rows it wants."""
        new = kv = requests = rows = again = 0
        pairs = 0.0
        for count, before, wanted in items:
            new, kv, requests, rows = new + count, kv + before, requests + 1, rows + wanted
            pairs += count * (before + count / 2)
            again += before if count > 1 else 0
        return cls(new, kv, requests, pairs, again, rows)


@runtime_checkable
class ShapedPassTime(PassTime, Protocol):
    """Tells passes apart whose totals are the same."""

    def seconds_of(self, shape: PassShape) -> float: ...


def pass_seconds(time: PassTime, shape: PassShape) -> float:
    """By all that `time` asks for."""
    if isinstance(time, ShapedPassTime):
        return time.seconds_of(shape)
    return time.seconds(shape.new_tokens, shape.kv_tokens, shape.requests)


class DraftTime(Protocol):
    """One question to a drafter."""

    def seconds(self, requests: int, levels: int, guesses: int, unread: int, kv_tokens: int) -> float:
        """requests: for which it guesses.  levels: of the deepest chain.  guesses: of all requests together.
        unread: committed tokens that the drafter has not seen, of all requests together; a request's newest
        token is one of them.  kv_tokens: their contexts together."""
        ...


class Form(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="form"):
    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int | float) and not (isfinite(number) and number >= 0.0):
                    raise ValueError(f"`{name}` holds {number}: it must be finite and not below 0")


# ---------------------------------------------------------------- passes


class LinearPass(Form, frozen=True, tag="linear"):
    """A constant, mostly reading the weights, and so much per new token, per KV token and per request."""

    fixed_s: Seconds
    per_token_s: Seconds = 0.0
    per_kv_token_s: Seconds = 0.0
    per_request_s: Seconds = 0.0

    def seconds(self, new_tokens: int, kv_tokens: int, requests: int) -> float:
        return (
            self.fixed_s
            + self.per_token_s * new_tokens
            + self.per_kv_token_s * kv_tokens
            + self.per_request_s * requests
        )


class RooflinePass(Form, frozen=True, tag="roofline"):
    """Memory traffic and arithmetic at the same time: `fixed + (memory^p + compute^p)^(1/p)`.

    memory = `read_s`, the weights, + KV; compute = per new token. sharpness: p; 1 = one after the other, as
    in `LinearPass`; large = whichever is longer. exchange_s, and per token of the pass: what tensor parallel
    ranks take to add up their parts.
    """

    read_s: Seconds
    per_token_s: Seconds
    per_kv_token_s: Seconds
    fixed_s: Seconds = 0.0
    exchange_s: Seconds = 0.0
    exchange_per_token_s: Seconds = 0.0
    sharpness: Annotated[float, Meta(ge=1, le=64, description="a number from 1 to 64")] = 1.0

    def seconds(self, new_tokens: int, kv_tokens: int, requests: int) -> float:  # noqa: ARG002 - all share
        memory = self.read_s + self.per_kv_token_s * kv_tokens
        compute = self.per_token_s * new_tokens
        beside = self.fixed_s + self.exchange_s + self.exchange_per_token_s * new_tokens
        longer, shorter = max(memory, compute), min(memory, compute)
        if longer == 0.0:
            return beside
        hidden: float = (1.0 + (shorter / longer) ** self.sharpness) ** (1.0 / self.sharpness)
        return beside + longer * hidden


class TablePass(Form, frozen=True, tag="table"):
    """Measured sizes, and so much per KV token, request and row of logits.

    seconds_at: of a pass of `new_tokens[i]` tokens of one request without context, never falling. between:
    "line" = sizes between two measured ones lie on the line through them, so that a step of the hardware is
    two neighbouring sizes; "step" = they take as long as the next larger one, as passes padded to the sizes
    of captured graphs do. per_token_s: each token beyond the largest size.
    per_pair_s: of each pair of a new token and one that it looks back on, new ones too, where attention is
    bound by arithmetic.
    per_kv_again_s: of each KV token where a request has more than one new token: queries that share what is
    read are computed in another way than a single one.
    per_row_s: of each new token whose logits are wanted. most_rows: of one request, where only totals are
    known: of a prompt's tokens only the last one's are. Every request then counts as having its share of all.
    """

    new_tokens: Annotated[tuple[Count, ...], Meta(min_length=1)]
    seconds_at: Annotated[tuple[Seconds, ...], Meta(min_length=1)]
    between: Literal["line", "step"] = "line"
    per_token_s: Seconds = 0.0
    per_kv_token_s: Seconds = 0.0
    per_request_s: Seconds = 0.0
    per_pair_s: Seconds = 0.0
    per_kv_again_s: Seconds = 0.0
    per_row_s: Seconds = 0.0
    most_rows: Count = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_table("new_tokens", self.new_tokens, self.seconds_at)

    def seconds(self, new_tokens: int, kv_tokens: int, requests: int) -> float:
        return self.seconds_of(PassShape.even(new_tokens, kv_tokens, requests, self.most_rows))

    def seconds_of(self, shape: PassShape) -> float:
        return (
            self._of_size(shape.new_tokens)
            + self.per_kv_token_s * shape.kv_tokens
            + self.per_request_s * (shape.requests - 1)
            + self.per_pair_s * shape.pairs
            + self.per_kv_again_s * shape.kv_again
            + self.per_row_s * shape.rows
        )

    def _of_size(self, size: int) -> float:
        if self.between == "step":
            at = bisect_left(self.new_tokens, size)
            if at < len(self.new_tokens):
                return self.seconds_at[at]
        return _on_line(self.new_tokens, self.seconds_at, size, self.per_token_s)


def _on_line(sizes: tuple[int, ...], times: tuple[float, ...], size: float, beyond: float) -> float:
    """Between the times of the nearest sizes; below the first as there, after the last by `beyond` each."""
    at = bisect_left(sizes, size)
    if at == len(sizes):
        return times[-1] + beyond * (size - sizes[-1])
    if at == 0 or sizes[at] == size:
        return times[at]
    below, above = sizes[at - 1], sizes[at]
    return times[at - 1] + (times[at] - times[at - 1]) * (size - below) / (above - below)


def _check_table(sizes_name: str, sizes: tuple[int, ...], times: tuple[float, ...]) -> None:
    if len(sizes) != len(times):
        raise ValueError(f"`{sizes_name}` has {len(sizes)} sizes but `seconds_at` {len(times)} times")
    if any(a >= b for a, b in pairwise(sizes)):
        raise ValueError(f"`{sizes_name}` must rise from one to the next")
    if any(a > b for a, b in pairwise(times)):
        raise ValueError("`seconds_at` must not fall: more takes no less time")


Pass = LinearPass | RooflinePass | TablePass


# ---------------------------------------------------------------- drafters


class LinearDraft(Form, frozen=True, tag="linear"):
    """A constant, and so much per level, request, guess, unread token and KV token, this also per level."""

    fixed_s: Seconds = 0.0
    per_level_s: Seconds = 0.0
    per_request_s: Seconds = 0.0
    per_guess_s: Seconds = 0.0
    per_unread_s: Seconds = 0.0
    per_kv_token_s: Seconds = 0.0
    per_level_kv_s: Seconds = 0.0

    def seconds(self, requests: int, levels: int, guesses: int, unread: int, kv_tokens: int) -> float:
        return (
            self.fixed_s
            + self.per_level_s * levels
            + self.per_request_s * requests
            + self.per_guess_s * guesses
            + self.per_unread_s * unread
            + (self.per_kv_token_s + self.per_level_kv_s * levels) * kv_tokens
        )


class TableDraft(Form, frozen=True, tag="table"):
    """Measured numbers of levels, and so much per request, guess, unread token and KV token, this also per
    level. The first level may well take less than its share: a second asks for another way of computing them.

    seconds_at: of a question `levels[i]` deep, never falling; others lie on the line between their
    neighbours.  per_level_s: each level beyond the deepest.
    """

    levels: Annotated[tuple[Annotated[int, Meta(ge=0, le=4096)], ...], Meta(min_length=1)]
    seconds_at: Annotated[tuple[Seconds, ...], Meta(min_length=1)]
    per_level_s: Seconds = 0.0
    per_request_s: Seconds = 0.0
    per_guess_s: Seconds = 0.0
    per_unread_s: Seconds = 0.0
    per_kv_token_s: Seconds = 0.0
    per_level_kv_s: Seconds = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_table("levels", self.levels, self.seconds_at)

    def seconds(self, requests: int, levels: int, guesses: int, unread: int, kv_tokens: int) -> float:
        return (
            _on_line(self.levels, self.seconds_at, levels, self.per_level_s)
            + self.per_request_s * requests
            + self.per_guess_s * guesses
            + self.per_unread_s * unread
            + (self.per_kv_token_s + self.per_level_kv_s * levels) * kv_tokens
        )


class PassesDraft(Form, frozen=True, tag="passes"):
    """A model that drafts: a pass over the unread tokens, which gives the first level of guesses, and one
    over each level but the last, which nobody expands. fixed_s: of a question, besides."""

    each: Pass
    fixed_s: Seconds = 0.0

    def seconds(self, requests: int, levels: int, guesses: int, unread: int, kv_tokens: int) -> float:
        first = self.each.seconds(max(unread, requests, 1), kv_tokens, requests)
        if levels <= 1:
            return self.fixed_s + first
        per_level = max(-(-guesses // levels), requests, 1)
        further = self.each.seconds(per_level, kv_tokens + guesses, requests)
        return self.fixed_s + first + (levels - 1) * further


class ShareDraft(Form, frozen=True, tag="share"):
    """A fixed share of the pass that verifies the guesses."""

    share: Annotated[float, Meta(ge=0, le=1000, description="a number from 0 to 1000")]
    of: Pass

    def seconds(self, requests: int, levels: int, guesses: int, unread: int, kv_tokens: int) -> float:  # noqa: ARG002
        return self.share * self.of.seconds(requests + guesses, kv_tokens, requests)


Draft = LinearDraft | TableDraft | PassesDraft | ShareDraft
