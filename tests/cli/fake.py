"""An engine without a model: it answers with words, and records what it was asked."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from paceline.config import Config
from paceline.core.params import SamplingParams
from paceline.core.stats import SpeculationStats
from paceline.core.work import TokenLogprobs
from paceline.engine.outputs import Chunk, LaneStats, RequestOutput, Timing, Usage
from paceline.errors import PacelineError

WORDS = ["Draft", " early,", " verify", " once", "."]


class FakeLLM:
    """`answer` gives the words of a prompt; `on_chunk` runs before each of them is handed out, `spoken` is
    what is said of guesses in a request's output."""

    answer: Callable[[SamplingParams], list[str]] = staticmethod(lambda _: WORDS)
    on_chunk: Callable[[int], None] = staticmethod(lambda _: None)
    fail_at_start: PacelineError | None = None
    fail_in_request: str | None = None
    seconds_per_token = 0.1
    speculation = SpeculationStats()
    spoken = SpeculationStats(2, 4, 2, 5, 3)
    lanes = LaneStats("serial-chain", "serial")
    made: list[FakeLLM]

    def __init__(self, *, config: Config, record: Path | None = None, trace: Path | None = None) -> None:
        if self.fail_at_start is not None:
            raise self.fail_at_start
        self.config = config
        self.record = record
        self.trace = trace
        self.closed = False
        self.asked: list[tuple[Any, SamplingParams]] = []
        self.aborted = 0
        self.made.append(self)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        return [(message["role"], message["content"]) for message in messages]

    def stream(self, prompt: Any, params: SamplingParams) -> Generator[Chunk, None, None]:
        self.asked.append((prompt, params))
        words = self.answer(params)
        ended = False
        try:
            for place, word in enumerate(words):
                self.on_chunk(place)
                yield Chunk(word, [place])
            ended = True
            yield Chunk("", [], self._output(prompt, words, params))
        finally:
            self.aborted += not ended

    def close(self) -> None:
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _output(self, prompt: Any, words: list[str], params: SamplingParams) -> RequestOutput:
        speculative = params.num_speculative_tokens != 0 and self.config.speculation.draft != "none"
        count = len(words)
        decode = (count - 1) * self.seconds_per_token * (1 if speculative else 2) if words else None
        ids = [sum(map(ord, word)) for word in words]
        return RequestOutput(
            request_id="r0",
            index=0,
            prompt_token_ids=[1, 2, 3],
            text="".join(words),
            token_ids=ids,
            finish_reason="error" if self.fail_in_request else "stop",
            error=self.fail_in_request,
            usage=Usage(len(prompt), count),
            timing=Timing(0.5, 0.25, decode, decode / (count - 1) if decode else None),
            drafter="ngram" if self.config.speculation.draft == "auto" else self.config.speculation.draft,
            speculation=self.spoken if speculative else SpeculationStats(4, 4),
            model=self.config.model,
            seed=params.seed if params.seed is not None else 77,
            logprobs=[TokenLogprobs(-0.5, 1, ((5, -0.5), (6, float("-inf"))))] * count
            if params.logprobs is not None
            else None,
        )
