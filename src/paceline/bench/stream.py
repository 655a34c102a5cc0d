"""The server-sent events of one completion, as they come."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

from paceline.bench.records import RequestRecord
from paceline.core.stats import SpeculationStats

_MOST_TOKENS = 2**31 - 1


class Stream:
    """Tokens are counted by what the server says, never by chunks, of which one may hold several.

    A chunk counts where it has text or raises the count of tokens: one that only opens the answer does not.
    """

    def __init__(self) -> None:
        self.ended = False
        self._times: list[float] = []
        self._counts: list[int | None] = []  # tokens so far, with each chunk
        self._text: list[str] = []
        self._usage: dict[str, Any] = {}
        self._finish: str | None = None
        self._speculation: SpeculationStats | None = None

    def take(self, line: str, at_s: float) -> None:
        """One line of the response. Raises ValueError where it tells of an error, or is none."""
        name, colon, data = line.partition(":")
        if not colon or name != "data":
            return
        if data.strip() == "[DONE]":
            self.ended = True
            return
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError):
            raise ValueError(f"the stream has a line that is not JSON: {data.strip()[:80]}") from None
        if not isinstance(chunk, dict) or chunk.get("error"):
            raise ValueError(f"the server says: {_writable(_said(chunk))}")
        self._take(chunk, at_s)

    def _take(self, chunk: dict[str, Any], at_s: float) -> None:
        usage = chunk.get("usage")
        told = _count(usage, "completion_tokens")
        if isinstance(usage, dict):
            self._usage = usage
        metrics = chunk.get("metrics")
        if isinstance(metrics, dict):
            self._speculation = _speculation(metrics.get("speculative_decoding"))
        choices = chunk.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return
        text = _text_of(choice)
        if choice.get("finish_reason"):
            self._finish, self.ended = _writable(str(choice["finish_reason"])), True
        before = next((count for count in reversed(self._counts) if count is not None), 0)
        if text or (told is not None and told > before):
            self._text.append(text)
            self._times.append(at_s)
            self._counts.append(told)

    def write(self, record: RequestRecord) -> None:
        """What came, into `record`."""
        record.text = _writable("".join(self._text))
        record.finish_reason = self._finish
        record.tokens = _count(self._usage, "completion_tokens")
        record.prompt_tokens = _count(self._usage, "prompt_tokens")
        record.speculation = self._speculation
        record.chunk_times_s = self._times
        record.chunk_tokens = self._chunk_tokens(record.tokens)
        if self._times:
            record.first_token_s, record.end_s = self._times[0], self._times[-1]

    def _chunk_tokens(self, total: int | None) -> list[int]:
        """Empty unless every chunk told its count. Tokens without a text of their own, as the one that ends
        an answer, belong to the chunk before."""
        counts = [count for count in self._counts if count is not None]
        if total is None or len(counts) < len(self._counts) or not counts:
            return []
        counts = [*list(accumulate(counts, max))[:-1], max(total, counts[-1])]
        each = [after - before for before, after in zip([0, *counts], counts, strict=False)]
        return each if all(count > 0 for count in each) else []


def _count(usage: object, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if type(value) is int and 0 <= value <= _MOST_TOKENS else None


def _writable(text: str) -> str:
    """JSON may hold half a character, and no file can. Halves that came in two chunks are one again."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _text_of(choice: dict[str, Any]) -> str:
    """Of a chat's delta, reasoning included, or of a completion."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        parts = (delta.get("reasoning_content") or delta.get("reasoning"), delta.get("content"))
        return "".join(part for part in parts if isinstance(part, str))
    text = choice.get("text")
    return text if isinstance(text, str) else ""


def _speculation(told: object) -> SpeculationStats | None:
    """What vLLM says of a request with `--per-request-spec-decode-metrics`: steps, guesses, accepted ones,
    and how many steps accepted 0, 1, 2, ... of them."""
    if not isinstance(told, dict):
        return None
    names = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    steps, drafted, accepted = (_count(told, name) for name in names)
    given = told.get("acceptance_histogram")
    histogram = [_count({"": count}, "") for count in given] if isinstance(given, list) else [None]
    if steps is None or drafted is None or accepted is None or None in histogram:
        return None
    reached = list(accumulate(reversed(histogram)))[::-1][1:]
    return SpeculationStats(
        num_steps=steps,
        num_emitted_tokens=accepted + steps,
        num_drafts=steps,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        accepted_by_depth=[count for count in reached if count],
    )


def refusal(status: int, body: bytes) -> str:
    """An error response in one line."""
    try:
        said = _said(json.loads(body))
    except (ValueError, RecursionError):
        said = body.decode(errors="replace")
    return f"HTTP {status}: {_writable(' '.join(said.split())[:200])}"


def _said(chunk: object) -> str:
    found = chunk.get("error", chunk) if isinstance(chunk, dict) else chunk
    return str(found.get("message", found) if isinstance(found, dict) else found)
