"""Cells on servers that speak the OpenAI protocol, whatever decodes behind it."""

from __future__ import annotations

import asyncio
import math
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from paceline.bench.counters import counted, difference
from paceline.bench.matrix import Load
from paceline.bench.overlap import overlap
from paceline.bench.prompts import BenchPrompt, Workload
from paceline.bench.records import Cell, RequestRecord
from paceline.bench.settings import Settings
from paceline.bench.stream import Stream, refusal
from paceline.core.params import SamplingParams
from paceline.core.stats import SpeculationStats
from paceline.errors import ConfigError, EngineError, shown

if TYPE_CHECKING:
    from httpx2 import AsyncClient

_NAMED = re.compile(r"^(?:(?P<name>[\w.+:-]+)=)?(?P<url>https?://[^\s/]+\S*)$")
_WORDS = re.compile(r"\w+|\S")
_USAGE: tuple[dict[str, bool] | None, ...] = (
    {"include_usage": True, "continuous_usage_stats": True},
    {"include_usage": True},
    None,
)
"""What streams are asked to say of their tokens: with every chunk, at the end, or nothing, where more is
refused."""


def servers_of(
    urls: Sequence[str], model: str, settings: Settings, key_env: str | None, timeout_s: float
) -> list[Server]:
    """urls: each with a name before it or not, as in `none=http://localhost:8000`. key_env: the environment
    variable that holds the servers' key. Raises ConfigError."""
    _check_client()
    if not 0 < timeout_s < math.inf:
        raise ConfigError(f"--timeout is {timeout_s:g}: give a number of seconds above 0.")
    key = os.environ.get(key_env) if key_env is not None else None
    if key_env is not None and not key:
        raise ConfigError(f"--api-key-env is {key_env}, but there is no such environment variable: set it.")
    servers = []
    for text in urls:
        match = _NAMED.match(text)
        if match is None or not _has_port_or_none(match["url"]):
            raise ConfigError(f"--url is {shown(text)}: give http://HOST:PORT, with NAME= before it or not.")
        url = match["url"].rstrip("/")
        base = url if urlsplit(url).path.endswith("/v1") else f"{url}/v1"
        servers.append(Server(match["name"] or urlsplit(url).netloc, base, model, settings, key, timeout_s))
    names = [server.name for server in servers]
    if len(set(names)) < len(names):
        raise ConfigError(f"servers are called {', '.join(names)}: name each once, as in --url NAME=URL.")
    return servers


def _has_port_or_none(url: str) -> bool:
    try:
        _ = urlsplit(url).port
    except ValueError:
        return False
    return True


def _check_client() -> None:
    try:
        import httpx2  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--url needs httpx2, which is not installed: pip install 'paceline[bench]'."
        ) from None


@dataclass(frozen=True, slots=True)
class Server:
    """base: its URL, `/v1` included."""

    name: str
    base: str
    model: str
    settings: Settings
    key: str | None
    timeout_s: float

    @property
    def description(self) -> dict[str, object]:
        return {"base": self.base, "model": self.model}

    @contextmanager
    def started(self) -> Iterator[ServerSession]:
        """Raises EngineError where it does not answer, or refuses the model."""
        yield ServerSession(self)


class ServerSession:
    def __init__(self, server: Server) -> None:
        self._server, self._settings = server, server.settings
        self._usage: dict[str, bool] | None = None
        self._probed = False
        self._began = 0.0

    def measure(self, key: str, workload: Workload, load: Load, repeat: int) -> Cell:
        """Raises EngineError."""
        return asyncio.run(self._measure(key, workload, load, repeat))

    async def _measure(self, key: str, workload: Workload, load: Load, repeat: int) -> Cell:
        import httpx2

        settings = self._settings
        count = settings.count(load)
        asked = [workload.prompts[at % len(workload.prompts)] for at in range(count)]
        headers = {"Authorization": f"Bearer {self._server.key}"} if self._server.key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx2.AsyncClient(
            headers=headers, timeout=self._server.timeout_s, limits=limits
        ) as client:
            if not self._probed:
                await self._probe(client, asked[0])
            if settings.warm_up:
                params = replace(settings.params, max_tokens=settings.warm_up)
                await self._drive(client, [(0.0, each) for each in asked[: load.batch or 1]], load, params)
            before = await self._counters(client)
            due = load.due_s(count, settings.seed + repeat)
            pairs = list(zip(due, asked, strict=True))
            records, duration_s = await self._drive(client, pairs, load, settings.params)
            after = await self._counters(client)
        return Cell(
            key=key,
            contender=self._server.name,
            workload=workload.name,
            batch=load.batch,
            rate=load.rate,
            burstiness=load.burstiness,
            repeat=repeat,
            duration_s=duration_s,
            requests=records,
            speculation=difference(before, after),
        )

    async def _drive(
        self,
        client: AsyncClient,
        requests: Sequence[tuple[float, BenchPrompt]],
        load: Load,
        params: SamplingParams,
    ) -> tuple[list[RequestRecord], float]:
        """As many workers as the load has requests in flight, or one for each request that is due."""
        waiting = deque(requests)
        records: list[RequestRecord] = []
        self._began = time.perf_counter()

        async def work() -> None:
            while waiting:
                due, prompt = waiting.popleft()
                await asyncio.sleep(max(0.0, due - self._now()))
                record = RequestRecord(
                    prompt=prompt.name, arrival_s=due if load.batch is None else self._now()
                )
                records.append(record)
                await self._ask(client, prompt, params, record)

        async with asyncio.TaskGroup() as group:
            for _ in range(load.batch or len(requests)):
                group.create_task(work())
        return records, self._now()

    def _in_time(self) -> asyncio.Timeout:
        """For a whole answer: the client's own limit begins anew with every byte."""
        return asyncio.timeout(self._server.timeout_s)

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _ask(
        self, client: AsyncClient, prompt: BenchPrompt, params: SamplingParams, record: RequestRecord
    ) -> None:
        """What goes wrong with one request is noted in its record."""
        import httpx2

        body, stream = self._body(prompt, params, self._usage), Stream()
        try:
            async with self._in_time(), client.stream("POST", self._url(), json=body) as response:
                if response.status_code != 200:
                    raise ValueError(refusal(response.status_code, await response.aread()))
                async for line in response.aiter_lines():
                    stream.take(line, self._now())
        except (TimeoutError, httpx2.TimeoutException):
            record.error = f"no answer within {self._server.timeout_s:g} s: raise --timeout."
        except (httpx2.HTTPError, ValueError) as error:
            record.error = str(error) or type(error).__name__
        if record.error is None and not stream.ended:
            record.error = "the stream ended before its answer did."
        record.end_s = self._now()
        stream.write(record)
        words = _WORDS.findall(prompt.text), _WORDS.findall(record.text)
        record.overlap = overlap(*words)

    def _url(self) -> str:
        return f"{self._server.base}/{'completions' if self._settings.raw else 'chat/completions'}"

    def _body(
        self, prompt: BenchPrompt, params: SamplingParams, usage: dict[str, bool] | None
    ) -> dict[str, Any]:
        asked = {"prompt": prompt.text} if self._settings.raw else {"messages": list(prompt.messages)}
        told = {} if usage is None else {"stream_options": usage}
        return {"model": self._server.model, **asked, "stream": True, **told, **_sampling(params)}

    async def _probe(self, client: AsyncClient, prompt: BenchPrompt) -> None:
        """One token, to see what the server can be asked for. Raises EngineError."""
        import httpx2

        params, told = replace(self._settings.params, max_tokens=1), ""
        for usage in _USAGE:
            try:
                async with self._in_time():
                    response = await client.post(self._url(), json=self._body(prompt, params, usage))
            except (TimeoutError, httpx2.HTTPError) as error:
                reason = str(error) or type(error).__name__
                raise EngineError(
                    f"{self._server.base} does not answer ({reason}): is the server running there?"
                ) from None
            if response.status_code == 200:
                self._usage, self._probed = usage, True
                return
            told = refusal(response.status_code, response.content)
            if response.status_code not in (400, 422):
                break
        raise EngineError(f"{self._server.base} refuses a request for {self._server.model}: {told}")

    async def _counters(self, client: AsyncClient) -> SpeculationStats | None:
        """What its metrics page counts of speculation; None = it has none."""
        import httpx2

        try:
            async with self._in_time():
                response = await client.get(f"{self._server.base.removesuffix('/v1')}/metrics")
        except (TimeoutError, httpx2.HTTPError):
            return None
        return counted(response.text) if response.status_code == 200 else None


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Those that were set: servers refuse what they do not know."""
    names = (
        *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "stop", "seed", "ignore_eos"),
    )
    neutral = SamplingParams()
    set_ = {name: value for name in names if (value := getattr(params, name)) != getattr(neutral, name)}
    return {"max_tokens": params.max_tokens} | {
        name: list(value) if isinstance(value, tuple) else value for name, value in set_.items()
    }
