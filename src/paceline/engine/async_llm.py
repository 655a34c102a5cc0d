"""The concurrent face: many streams over one engine that runs on a thread of its own."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.params import SamplingParams
from paceline.engine.intake import Prompt
from paceline.engine.llm import LLM
from paceline.engine.outputs import Chunk, RequestOutput
from paceline.errors import EngineError, RequestError


@dataclass(frozen=True, slots=True)
class _Start:
    name: str
    index: int
    ids: list[int]
    params: SamplingParams
    mailbox: _Mailbox


@dataclass(frozen=True, slots=True)
class _Abort:
    name: str


@dataclass(frozen=True, slots=True)
class _Mailbox:
    """Hands chunks from the engine's thread to one waiting task."""

    loop: asyncio.AbstractEventLoop
    chunks: asyncio.Queue[Chunk | Exception]

    def put(self, item: Chunk | Exception) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self.chunks.put_nowait, item)


class AsyncLLM:
    """Takes the options of `LLM`. A pass runs outside the interpreter lock, so streams stay responsive.

    A stream that is closed or cancelled aborts its request. If a step fails, the streams that took part raise
    EngineError; later ones are served.
    """

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        self._llm = LLM(model, **options)
        self._inbox: queue.SimpleQueue[_Start | _Abort | None] = queue.SimpleQueue()
        self._open: dict[str, _Mailbox] = {}
        self._failure: EngineError | None = None
        self._names = itertools.count()
        self._thread = threading.Thread(target=self._work, name="paceline-engine", daemon=True)
        self._thread.start()

    @property
    def llm(self) -> LLM:
        """The engine's own face, for what needs no engine step: tokenizer, model, configuration."""
        return self._llm

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """See `LLM.chat_prompt`."""
        return self._llm.chat_prompt(messages)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncGenerator[Chunk]:
        """Text as it becomes certain; the last chunk carries the output.

        Raises RequestError or EngineError.
        """
        return self._stream(prompt, self._llm.intake.one_completion(params), 0)

    async def _stream(self, prompt: Prompt, params: SamplingParams, index: int) -> AsyncGenerator[Chunk]:
        ids = self._llm.intake.prompt_ids(prompt)
        resolved = self._llm.intake.params(params, index)
        name = f"a{next(self._names)}"
        mailbox = _Mailbox(asyncio.get_running_loop(), asyncio.Queue())
        self._send(_Start(name, index, ids, resolved, mailbox))
        finished = False
        try:
            while not finished:
                item = await mailbox.chunks.get()
                finished = isinstance(item, Exception) or item.output is not None
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            if not finished:
                self._inbox.put(_Abort(name))

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> list[RequestOutput]:
        """All `n` completions of one prompt, run together."""
        params = params or SamplingParams()
        tasks = [asyncio.create_task(self._complete(prompt, params, index)) for index in range(params.n)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one failed, the others' work is not wanted any more
                task.cancel()

    async def _complete(self, prompt: Prompt, params: SamplingParams, index: int) -> RequestOutput:
        async for chunk in self._stream(prompt, params, index):
            if chunk.output is not None:
                return chunk.output
        raise EngineError("the stream ended without an output; this is a bug, please report it.")

    def close(self) -> None:
        """Ends open streams with EngineError and stops the thread."""
        self._inbox.put(None)
        self._thread.join()
        self._llm.close()

    # ------------------------------------------------------------ the engine's thread

    def _send(self, message: _Start) -> None:
        if self._failure is not None:
            raise EngineError(str(self._failure))
        self._inbox.put(message)
        # The engine may have ended between the look and the put, with nobody left to read the message.
        if self._failure is not None:
            raise EngineError(str(self._failure))

    def _work(self) -> None:
        reason = "the engine is closed: make a new AsyncLLM."
        try:
            while self._take_messages():
                for name, chunk in self._llm.engine.step():
                    self._deliver(name, chunk)
        except Exception as error:  # noqa: BLE001 - reported to every stream
            reason = f"the engine failed: {type(error).__name__}: {error}. Restart it."
        self._failure = EngineError(reason)
        for mailbox in self._open.values():
            mailbox.put(self._failure)
        while True:  # requests that were on their way
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, _Start):
                message.mailbox.put(self._failure)

    def _take_messages(self) -> bool:
        """Everything in the inbox; waits only when there is nothing else to do. False = closed."""
        while not self._inbox.empty() or self._llm.engine.idle:
            message = self._inbox.get()
            if message is None:
                return False
            if isinstance(message, _Abort):
                if self._open.pop(message.name, None) is not None:
                    self._llm.engine.abort(message.name)
            else:
                self._open[message.name] = message.mailbox
                self._llm.engine.add(message.name, message.index, message.ids, message.params)
        return True

    def _deliver(self, name: str, chunk: Chunk) -> None:
        mailbox = self._open.get(name)
        if mailbox is None:
            return  # aborted; this is its last word
        if chunk.output is not None:
            del self._open[name]
        if chunk.output is not None and chunk.output.finish_reason == "error":
            kind = EngineError if chunk.output.engine_fault else RequestError
            mailbox.put(kind(chunk.output.error or "the request failed."))
        else:
            mailbox.put(chunk)
