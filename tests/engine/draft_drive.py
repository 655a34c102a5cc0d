"""A core over the disaggregated executor, with a toy target and a draft worker that really is elsewhere."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from paceline.core.draft_lane import DraftPolicy
from paceline.core.drafting import DrafterNeeds, FixedLength
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.params import SamplingParams
from paceline.core.placement import OverlappedPlacement, SerialPlacement
from paceline.core.work import Event, RequestArrived
from paceline.engine.attachment import Patience
from paceline.engine.channel import Address, Keys, Listener
from paceline.engine.disaggregated import DisaggregatedExecutor, _Raised
from paceline.engine.draft_group import DraftGroup
from paceline.engine.draft_host import DraftHost, LocalHost
from paceline.engine.draft_messages import DraftGroupSpec
from paceline.engine.draft_worker import DrafterFactory, DraftWorker
from tests.core.toy import VOCAB, toy_generate
from tests.engine.draft_toys import LIMITS, ToyTarget, spec

QUICK = Patience(silence_s=1.0, revive_s=5.0, first_pause_s=0.02)


class ThreadHost:
    """A worker in a thread of this process: the same loop over the same sockets, no start of Python."""

    name = "the draft worker"
    connect_s = 10.0

    def __init__(
        self, factory: DrafterFactory, keys: Keys | None = None, worker: type[DraftWorker] = DraftWorker
    ) -> None:
        self.factory = factory
        self.worker = worker
        self.keys = keys or Keys.new()
        self.starts = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def ensure(self) -> Address:
        if self._thread is None:
            self._stop = threading.Event()
            self._folder = tempfile.TemporaryDirectory(prefix="paceline-")
            listener = Listener(f"ipc://{self._folder.name}/draft", self.keys.worker, self.keys.engine_public)
            self._address = Address(listener.endpoint, self.keys)
            self._thread = threading.Thread(target=self._serve, args=(listener, self._stop))
            self._thread.start()
            self.starts += 1
        return self._address

    def _serve(self, listener: Listener, stop: threading.Event) -> None:
        try:
            self.worker(listener, self.factory).run(stop)
        finally:
            listener.close()

    def ended(self) -> str | None:
        return None if self._thread is not None and self._thread.is_alive() else "ended"

    def end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._folder is not None:
            self._folder.cleanup()


@dataclass
class Drive:
    core: EngineCore
    executor: DisaggregatedExecutor
    group: DraftGroup
    host: Any
    target: ToyTarget
    events: list[Event] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)

    def feed(self, event: Event) -> None:
        self.events.append(event)
        for work in self.core.handle(event, time.perf_counter()):
            self.executor.submit(work)
        for delta in self.core.take_outputs():
            self.tokens.setdefault(delta.request_id, []).extend(delta.tokens)
            if delta.finish_reason is not None:
                self.ended[delta.request_id] = delta.finish_reason

    def add(self, name: str, prompt: Sequence[int], count: int) -> None:
        self.feed(RequestArrived(name, tuple(prompt), SamplingParams(max_tokens=count, temperature=0.0)))

    def run(self, each: Callable[[int], None] = lambda _: None, limit_s: float = 60.0) -> None:
        """Until the core is idle. each: called after every event with the number of tokens so far."""
        with self._limited(limit_s, "the core stalled"):
            while not self.core.idle:
                event = self.executor.poll()
                if event is not None:
                    self.feed(event)
                    each(sum(map(len, self.tokens.values())))

    def wait_for(self, kind: type[Any], limit_s: float = 20.0) -> Any:
        """The next event of this kind; what comes before is fed as well."""
        with self._limited(limit_s, f"no {kind.__name__} within {limit_s} s"):
            while True:
                event = self.executor.poll()
                if event is None:
                    time.sleep(0.005)
                    continue
                self.feed(event)
                if isinstance(event, kind):
                    return event

    @contextmanager
    def _limited(self, limit_s: float, problem: str) -> Iterator[None]:
        """Within, `poll` raises when it takes longer."""
        too_late = _Raised(None, AssertionError(problem))
        alarm = threading.Timer(limit_s, self.executor._events.put, (too_late,))
        alarm.start()
        try:
            yield
        finally:
            alarm.cancel()
            alarm.join()

    def check(self, prompts: dict[str, list[int]], count: int, each: Any = lambda _: None) -> None:
        """All at once, and exactly what plain decoding gives."""
        for name, prompt in prompts.items():
            self.add(name, prompt, count)
        self.run(each)
        for name, prompt in prompts.items():
            assert self.ended.pop(name) == "length"
            assert self.tokens.pop(name) == toy_generate(prompt, count)

    def seen(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def num_accepted(self) -> int:
        return self.core.speculation.num_accepted_tokens


def prompts(count: int, length: int = 5) -> dict[str, list[int]]:
    return {f"r{at}": [(at * 7 + i * 3) % VOCAB for i in range(length)] for at in range(count)}


@contextmanager
def driving(
    host: DraftHost,
    ahead: str = "off",
    *,
    pause_s: float = 0.0,
    patience: Patience = QUICK,
    group_spec: DraftGroupSpec | None = None,
) -> Iterator[Drive]:
    """ahead: "stream" runs draft and target at the same time, the other modes in turn."""
    events: SimpleQueue[Any] = SimpleQueue()
    group = DraftGroup(group_spec or spec(ahead, ahead_passes=2), host, events, patience)
    needs: DrafterNeeds = group.start()
    target = ToyTarget(pause_s)
    executor = DisaggregatedExecutor(target, group, events)
    try:
        yield Drive(_core(needs, ahead), executor, group, host, target)
    finally:
        executor.close()


def _core(needs: DrafterNeeds, ahead: str) -> EngineCore:
    config = CoreConfig(
        LIMITS,
        VOCAB,
        drafting=DraftPolicy((needs,), FixedLength(4)),
        placement=OverlappedPlacement() if ahead == "stream" else SerialPlacement(),
    )
    return EngineCore(config)


def process(factory: str) -> LocalHost:
    return LocalHost(f"tests.engine.draft_toys:{factory}")


def worker_pid(host: Any) -> int:
    """Of the child that a `LocalHost` has now."""
    return int(host._process.pid)
