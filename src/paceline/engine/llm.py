"""The blocking face: a list of prompts in, a list of outputs out, or one prompt streamed."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from tqdm import tqdm

from paceline.config import Config, load_config, with_options
from paceline.core.params import SamplingParams
from paceline.core.stats import SpeculationStats
from paceline.drafters.base import Drafter
from paceline.engine.build import build
from paceline.engine.intake import Intake, Prompt
from paceline.engine.outputs import Chunk, RequestOutput, Timing, Usage
from paceline.errors import EngineError, RequestError


class LLM:
    """A model ready to generate, alone on this thread.

    model: as `paceline.config.Config.model`.  draft: "ngram", "none", a model's name, or a Drafter of your
    own.  options: any other configuration key by its last name, such as `dtype` or `max_num_seqs`.
    record: file for the event log.

    Raises ConfigError, ModelError or KernelError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        draft: str | Path | Drafter | None = None,
        config: Config | None = None,
        record: Path | None = None,
        **options: Any,
    ) -> None:
        own = draft if draft is not None and not isinstance(draft, str | Path) else None
        options |= {"model": model, "draft": None if own is not None else draft}
        self.config = with_options(config, options) if config else load_config(options=options)
        built = build(self.config, drafter=own, record=record)
        self.model = built.model
        self.tokenizer = built.model.tokenizer
        self.precision = built.precision
        self.device = built.device
        self.engine = built.engine
        limits = built.engine.core.config.limits
        self.intake = Intake(built.model, limits.context_length, self.config.seed)
        self._ids = itertools.count()
        self._chunks: dict[str, list[Chunk]] = {}

    @property
    def load_s(self) -> float:
        return self.engine.about.load_s

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation (`[{"role": ..., "content": ...}]`) up to where the answer begins.

        Raises RequestError if the model has no chat template or rejects the messages.
        """
        return self.intake.chat_ids(messages)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """`n` outputs per prompt, in order. A text is taken raw, without the chat template.

        A request that cannot be served comes back with `finish_reason` "error" and its `error`; the
        others are not touched.
        """
        batch = _as_batch(prompts)
        asked = _as_params(params, len(batch))
        slots: list[str | RequestOutput] = []
        for prompt, wanted in zip(batch, asked, strict=True):
            try:
                slots.extend(self._add(prompt, wanted))
            except RequestError as error:
                slots.extend(self._refused(prompt, wanted, error))
        waiting = {slot for slot in slots if isinstance(slot, str)}
        outputs = self._run(waiting, progress)
        return [outputs[slot] if isinstance(slot, str) else slot for slot in slots]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Chunk]:
        """Text as it becomes certain; the last chunk carries the output. Leaving the loop aborts.

        Raises RequestError if the request cannot be served.
        """
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"a stream has one completion, not n = {params.n}: use generate.")
        # Started by the first `next`: a generator that never ran could not abort.
        return self._stream(self.intake.prompt_ids(prompt), self.intake.params(params))

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ------------------------------------------------------------ one engine, many waiting for it

    def _add(self, prompt: Prompt, params: SamplingParams) -> list[str]:
        ids = self.intake.prompt_ids(prompt)
        each = [self.intake.params(params, index) for index in range(params.n)]
        return [self._start(ids, resolved, index) for index, resolved in enumerate(each)]

    def _start(self, ids: list[int], params: SamplingParams, index: int = 0) -> str:
        name = f"r{next(self._ids)}"
        self._chunks[name] = []
        self.engine.add(name, index, ids, params)
        return name

    def _refused(self, prompt: Prompt, params: SamplingParams, error: RequestError) -> list[RequestOutput]:
        ids = [] if isinstance(prompt, str) else list(prompt)
        output = RequestOutput(
            request_id=f"r{next(self._ids)}",
            index=0,
            prompt_token_ids=ids,
            text="",
            token_ids=[],
            finish_reason="error",
            error=str(error),
            usage=Usage(len(ids), 0),
            timing=Timing(self.load_s),
            drafter=self.engine.about.drafter,
            speculation=SpeculationStats(),
            model=self.engine.about.model,
            seed=params.seed,
        )
        return [replace(output, index=index) for index in range(params.n)]

    def _run(self, waiting: set[str], progress: bool) -> dict[str, RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        try:
            with tqdm(total=len(waiting), desc="generating", unit="request", disable=not progress) as bar:
                while len(outputs) < len(waiting):
                    self._step()
                    for name in [name for name in waiting if name not in outputs]:
                        chunks = self._chunks[name]
                        if chunks and chunks[-1].output is not None:
                            outputs[name] = chunks[-1].output
                            bar.update()
        finally:
            self._forget(waiting, unfinished=waiting - outputs.keys())
        return outputs

    def _stream(self, ids: list[int], params: SamplingParams) -> Generator[Chunk]:
        name = self._start(ids, params)
        finished = False
        try:
            while not finished:
                chunks, self._chunks[name] = self._chunks[name], []
                for chunk in chunks:
                    finished = chunk.output is not None
                    yield chunk
                if not finished:
                    self._step()
        finally:
            self._forget([name], unfinished=[] if finished else [name])

    def _step(self) -> None:
        if self.engine.idle:
            raise EngineError("the engine stalled with requests open; this is a bug, please report it.")
        for name, chunk in self.engine.step():
            if name in self._chunks:
                self._chunks[name].append(chunk)

    def _forget(self, names: Iterable[str], unfinished: Iterable[str]) -> None:
        for name in unfinished:
            self.engine.abort(name)
        for name in names:
            self._chunks.pop(name, None)


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) and not isinstance(prompts[0], str | Sequence | np.ndarray)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{count} prompts but {len(params)} sampling parameters: give one or one each.")
    return list(params)
