"""Cells on an engine of this process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.bench.matrix import Contender, Load
from paceline.bench.overlap import overlap
from paceline.bench.peak_memory import PeakMemory, resident_bytes
from paceline.bench.prompts import BenchPrompt, Workload
from paceline.bench.records import Cell, Memory, RequestRecord, TimeShares
from paceline.bench.settings import Settings
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError, EngineError, RequestError

if TYPE_CHECKING:
    from paceline.engine.llm import LLM
    from paceline.engine.outputs import Chunk, LaneStats


@dataclass(frozen=True, slots=True)
class _Asked:
    prompt: BenchPrompt
    ids: list[int]


class EngineContender:
    """A drafter, and the engine that it gets for a stretch of cells."""

    def __init__(self, contender: Contender, settings: Settings) -> None:
        self.name = contender.name
        self._contender = contender
        self._settings = settings

    @property
    def description(self) -> dict[str, object]:
        import msgspec

        return {"config": msgspec.to_builtins(self._contender.config)}

    @contextmanager
    def started(self) -> Iterator[EngineSession]:
        from paceline.engine.llm import LLM

        before = resident_bytes()
        with LLM(config=self._contender.config) as llm:
            yield EngineSession(llm, self._contender, self._settings, before)


class EngineSession:
    """rss_before: bytes of this process before the engine was made."""

    def __init__(self, llm: LLM, contender: Contender, settings: Settings, rss_before: int) -> None:
        self._llm, self._contender, self._settings = llm, contender, settings
        self._rss_before = rss_before

    def measure(self, key: str, workload: Workload, load: Load, repeat: int) -> Cell:
        """Raises ConfigError where no prompt of the workload is short enough, EngineError."""
        settings = self._settings
        asked = self._asked(workload, settings.count(load))
        self._warm_up(asked, load)
        lanes = self._llm.lanes
        due = load.due_s(len(asked), settings.seed + repeat)
        with PeakMemory() as memory:
            drive = _Drive(self._llm, settings.params)
            drive.run(list(zip(due, asked, strict=True)), load.batch)
        return Cell(
            key=key,
            contender=self._contender.name,
            workload=workload.name,
            batch=load.batch,
            rate=load.rate,
            burstiness=load.burstiness,
            repeat=repeat,
            duration_s=drive.duration_s,
            requests=drive.records,
            shares=_shares(lanes, self._llm.lanes, drive.idle_s),
            memory=_memory(self._llm.lanes),
            rss_before=self._rss_before,
            rss_peak=memory.peak,
            stood_still_s=memory.stood_still_s,
            max_guesses=self._contender.max_guesses,
            load_s=self._llm.load_s,
            mode=lanes.mode,
            placement=lanes.placement,
        )

    def _asked(self, workload: Workload, count: int) -> list[_Asked]:
        """The first prompts that fit, from the beginning again where there are fewer than `count`."""
        settings, fitting = self._settings, []
        for prompt in workload.prompts:
            ids = self._ids(prompt)
            if len(ids) <= settings.longest:
                fitting.append(_Asked(prompt, ids))
            if len(fitting) == count:
                break
        if not fitting:
            raise ConfigError(
                f"no prompt of the workload {workload.name} has {settings.longest} tokens or fewer: raise "
                "--longest, or give other prompts."
            )
        return [fitting[at % len(fitting)] for at in range(count)]

    def _ids(self, prompt: BenchPrompt) -> list[int]:
        if self._settings.raw:
            return self._llm.intake.prompt_ids(prompt.text)
        return self._llm.chat_prompt(prompt.messages)

    def _warm_up(self, asked: Sequence[_Asked], load: Load) -> None:
        """A few tokens of the first requests, as many at once as later: costs and acceptance are seen, and
        what is made at first use is there."""
        if self._settings.warm_up == 0:
            return
        params = replace(self._settings.params, max_tokens=self._settings.warm_up)
        first = asked[: load.batch or 1]
        _Drive(self._llm, params).run([(0.0, each) for each in first], load.batch)


class _Drive:
    """One engine kept at a load. Arrivals are counted from when a request is due, so that a busy engine does
    not hide its queue."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm, self._engine, self._params = llm, llm.engine, params
        self.records: list[RequestRecord] = []
        self.duration_s = self.idle_s = 0.0
        self._open: dict[str, tuple[_Asked, RequestRecord]] = {}
        self._began = 0.0

    def run(self, requests: Sequence[tuple[float, _Asked]], most: int | None) -> None:
        """requests: seconds at which each is due, and what it asks.  most: in flight at once."""
        waiting = deque(enumerate(requests))
        self._began = time.perf_counter()
        try:
            while waiting or self._open:
                while waiting and self._may_begin(waiting[0][1][0], most):
                    number, (due, asked) = waiting.popleft()
                    self._begin(f"b{number}", asked, due if most is None else self._now())
                if self._open:
                    self._step()
                else:
                    self._sleep(waiting[0][1][0])
        finally:
            for name in self._open:  # only where something was raised
                self._engine.abort(name)
        self.duration_s = self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _may_begin(self, due: float, most: int | None) -> bool:
        return due <= self._now() and (most is None or len(self._open) < most)

    def _begin(self, name: str, asked: _Asked, arrival_s: float) -> None:
        record = RequestRecord(
            prompt=asked.prompt.name, arrival_s=arrival_s, end_s=arrival_s, prompt_tokens=len(asked.ids)
        )
        self.records.append(record)
        try:
            params = self._llm.intake.params(self._params)
            self._engine.add(name, 0, self._llm.intake.prompt_ids(asked.ids), params)
        except RequestError as error:
            record.error = str(error)
            return
        self._open[name] = asked, record

    def _sleep(self, until_s: float) -> None:
        began = self._now()
        time.sleep(max(0.0, until_s - began))
        self.idle_s += self._now() - began

    def _step(self) -> None:
        if self._engine.idle:
            raise EngineError("the engine stalled with requests open; this is a bug, please report it.")
        for name, chunk in self._engine.step():
            if name in self._open:
                self._take(name, chunk, self._now())

    def _take(self, name: str, chunk: Chunk, at_s: float) -> None:
        asked, record = self._open[name]
        if chunk.token_ids:
            record.first_token_s = at_s if record.first_token_s is None else record.first_token_s
            record.end_s = at_s
            record.chunk_times_s.append(at_s)
            record.chunk_tokens.append(len(chunk.token_ids))
        output = chunk.output
        if output is None:
            return
        del self._open[name]
        record.tokens = len(output.token_ids)
        record.token_ids = output.token_ids
        record.text = output.text
        record.finish_reason = output.finish_reason
        record.error = output.error if output.finish_reason == "error" else None
        record.speculation = output.speculation
        record.overlap = overlap(asked.ids, output.token_ids)


def _shares(before: LaneStats, after: LaneStats, idle_s: float) -> TimeShares:
    sample = after.sample_s - before.sample_s
    draft = after.draft_busy_s - before.draft_busy_s
    advance = after.draft_advance_s - before.draft_advance_s
    beside = after.placement == "disaggregated"
    return TimeShares(
        draft_s=0.0 if beside else draft + advance,
        verify_s=after.target_busy_s - before.target_busy_s - sample,
        sample_s=sample,
        idle_s=idle_s,
        draft_beside_s=draft if beside else 0.0,
    )


def _memory(lanes: LaneStats) -> list[Memory]:
    target = lanes.target_memory
    own = Memory(
        name="target", weight_bytes=target.weight_bytes, kv_bytes_per_token=target.kv_bytes_per_token
    )
    return [
        own,
        *(
            Memory(
                name=each.name,
                weight_bytes=each.weight_bytes,
                kv_bytes_per_token=each.kv_bytes_per_token,
                feature_bytes_per_token=each.feature_bytes_per_token,
            )
            for each in lanes.drafters
        ),
    ]
