"""Text as it becomes certain: incremental decoding, stop strings, and what must be held back for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.params import SamplingParams
from paceline.core.request import FinishReason
from paceline.loading.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop string, complete after the first `num_tokens` of the tokens looked at, at `start .. end` of
    the request's text."""

    num_tokens: int
    start: int
    end: int


class TextOutput:
    """The text of one request. `find_stop` looks ahead without a trace, `push` moves on.

    Stop strings are looked for token by token, so where a request ends does not depend on how many tokens
    a step commits. Text that may turn out to be the beginning of a stop string is held back.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._stream = tokenizer.stream(params.skip_special_tokens)
        self._params = params
        self._stops = tuple(str(stop) for stop in params.stop)
        self._longest = max(map(len, self._stops), default=0)
        self._text = ""
        self._num_tokens = 0
        # No stop string begins before this place: text up to `min_tokens`, or searched already.
        self._clean = 0
        self._num_emitted = 0

    @property
    def text(self) -> str:
        """Everything handed out so far."""
        return self._text[: self._num_emitted]

    def find_stop(self, tokens: Sequence[int]) -> Stop | None:
        """The first stop string that `tokens`, following those pushed before, complete."""
        if not self._stops:
            return None
        stream, text, clean = self._stream.copy(), self._text, self._clean
        for count, token in enumerate(tokens, 1):
            text += stream.push(token)
            if self._num_tokens + count > self._params.min_tokens:
                hits = [(start, stop) for stop in self._stops if (start := text.find(stop, clean)) >= 0]
                if hits:
                    start, stop = min(hits)
                    return Stop(count, start, start + len(stop))
                clean = max(clean, len(text) - self._longest + 1)
            else:
                clean = len(text)
        return None

    def push(self, tokens: Sequence[int], finish_reason: str | None = None) -> str:
        """Takes in committed tokens; returns the text that is certain now.

        With a finish reason everything left is handed out, up to the stop string if one ended the request.
        """
        stop = self.find_stop(tokens) if finish_reason in (None, FinishReason.STOP) else None
        ended_by_token = finish_reason == FinishReason.STOP and stop is None
        if ended_by_token and not self._params.include_stop_in_output:
            tokens = tokens[:-1]
        for token in tokens:
            self._text += self._stream.push(token)
            self._num_tokens += 1
            if self._num_tokens <= self._params.min_tokens:
                self._clean = len(self._text)
        self._clean = max(self._clean, len(self._text) - self._longest + 1) if self._stops else 0
        if finish_reason is None:
            return self._emit(len(self._text) - self._held_back())
        self._text += self._stream.flush()
        if stop is None:
            return self._emit(len(self._text))
        return self._emit(stop.end if self._params.include_stop_in_output else stop.start)

    def _emit(self, end: int) -> str:
        piece = self._text[self._num_emitted : end]
        self._num_emitted = max(self._num_emitted, end)
        return piece

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        tail = self._text[max(self._num_emitted, self._clean) :]
        return next(
            (
                len(tail) - start
                for start in range(len(tail))
                if any(stop.startswith(tail[start:]) for stop in self._stops)
            ),
            0,
        )
