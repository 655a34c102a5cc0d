"""The blocking face: a list of prompts in, a list of outputs out, or one prompt streamed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from tqdm import tqdm

from paceline.config import Config, load_config, with_options
from paceline.core.params import SamplingParams
from paceline.core.stats import DrafterReport, SpeculationStats
from paceline.drafters.base import Drafter
from paceline.engine.build import build
from paceline.engine.intake import Intake, Prompt
from paceline.engine.outputs import Chunk, LaneStats, RequestOutput, Timing, Usage
from paceline.engine.timeline import check_trace
from paceline.errors import ConfigError, EngineError, RequestError, shown

logger = logging.getLogger(__name__)


class LLM:
    """A model ready to generate, alone on this thread.

    model: as `paceline.config.Config.model`.  draft: "ngram", "suffix", "none", a model's name, or a
    Drafter of your own.  options: any other configuration key by its last name, such as `dtype` or
    `max_num_seqs`.
    record: file for the event log.  trace: file for a picture of both lanes, which `close` writes; open it in
    ui.perfetto.dev.

    Raises ConfigError, ModelError or KernelError.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        draft: str | Path | Drafter | None = None,
        config: Config | None = None,
        record: str | Path | None = None,
        trace: str | Path | None = None,
        **options: Any,
    ) -> None:
        self._trace = Path(trace) if trace is not None else None
        if self._trace is not None:
            check_trace(self._trace)
        own = draft if draft is not None and not isinstance(draft, str | Path) else None
        options |= {"model": model, "draft": None if own is not None else draft}
        self.config = with_options(config, options) if config else load_config(options=options)
        if record is not None and trace is not None and Path(record).resolve() == Path(trace).resolve():
            raise ConfigError(f"record and trace both name {record}: give each a file of its own.")
        built = build(self.config, drafter=own, record=Path(record) if record is not None else None)
        self.model = built.model
        self.tokenizer = built.model.tokenizer
        self.precision = built.precision
        self.device = built.device
        self.engine = built.engine
        self.engine.timeline.keep_tokens = self._trace is not None
        limits = built.engine.core.config.limits
        self.intake = Intake(built.model, limits.context_length, self.config.seed)
        self._ids = itertools.count()
        self._chunks: dict[str, list[Chunk]] = {}

    @property
    def load_s(self) -> float:
        return self.engine.about.load_s

    @property
    def speculation(self) -> SpeculationStats:
        """What was guessed and what came of it, of all requests so far."""
        return self.engine.speculation

    @property
    def lanes(self) -> LaneStats:
        """How target and drafter shared the time so far, and whether the drafter is there."""
        return self.engine.lanes

    @property
    def speculation_report(self) -> tuple[DrafterReport, ...]:
        """Of each drafter, in the order they were named: how often it was asked, and how well what is said of
        its guesses comes true."""
        return self.engine.lanes.drafters

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
        # All are checked before any is started: an error in between would leave requests behind.
        checked = [self._checked(prompt, wanted) for prompt, wanted in zip(batch, asked, strict=True)]
        slots = [slot for each in checked for slot in (each if isinstance(each, list) else self._add(*each))]
        waiting = {slot for slot in slots if isinstance(slot, str)}
        outputs = self._run(waiting, progress)
        return [outputs[slot] if isinstance(slot, str) else slot for slot in slots]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Chunk]:
        """Text as it becomes certain; the last chunk carries the output. Leaving the loop aborts.

        Raises RequestError if the request cannot be served.
        """
        params = self.intake.one_completion(params)
        # Started by the first `next`: a generator that never ran could not abort.
        return self._stream(self.intake.prompt_ids(prompt), self.intake.params(params))

    def close(self) -> None:
        """Writes the trace that was asked for. May be called twice. Raises EngineError if it cannot be
        written."""
        self.engine.close()
        trace, self._trace = self._trace, None
        if trace is not None:
            self.engine.timeline.write_trace(
                trace, lambda ids: self.tokenizer.decode(ids, skip_special_tokens=False)
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except EngineError as error:
            if kind is None:
                raise
            logger.warning("%s", error)  # what ended the block matters more

    # ------------------------------------------------------------ one engine, many waiting for it

    def _checked(
        self, prompt: Prompt, params: SamplingParams
    ) -> tuple[list[int], list[SamplingParams]] | list[RequestOutput]:
        """What to start, or the refusals."""
        try:
            ids = self.intake.prompt_ids(prompt)
            return ids, [self.intake.params(params, index) for index in range(params.n)]
        except RequestError as error:
            return self._refused(params, error)

    def _add(self, ids: list[int], each: list[SamplingParams]) -> list[str]:
        return [self._start(ids, resolved, index) for index, resolved in enumerate(each)]

    def _start(self, ids: list[int], params: SamplingParams, index: int = 0) -> str:
        name = f"r{next(self._ids)}"
        self._chunks[name] = []
        self.engine.add(name, index, ids, params)
        return name

    def _refused(self, params: SamplingParams, error: RequestError) -> list[RequestOutput]:
        output = RequestOutput(
            request_id=f"r{next(self._ids)}",
            index=0,
            prompt_token_ids=[],
            text="",
            token_ids=[],
            finish_reason="error",
            error=str(error),
            usage=Usage(0, 0),
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


def _as_batch(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray) or isinstance(prompts, bytes | bytearray | memoryview):
        raise RequestError(f"the prompts are {shown(prompts)}: give a text, token ids, or a list of these.")
    one = prompts.ndim == 1 if isinstance(prompts, np.ndarray) else bool(prompts) and _is_id(prompts[0])
    return [prompts] if one else list(prompts)  # type: ignore[list-item]


def _is_id(value: object) -> bool:
    return not isinstance(value, str | Sequence | np.ndarray) and hasattr(value, "__index__")


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise RequestError("params must be SamplingParams, or a list of them with one for each prompt.")
    if len(params) != count:
        raise RequestError(f"{count} prompts but {len(params)} sampling parameters: give one or one each.")
    return list(params)
