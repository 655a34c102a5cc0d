"""Servers of the OpenAI protocol, against one that answers with a script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paceline.bench.checks import checks_of
from paceline.bench.matrix import Load
from paceline.bench.prompts import workloads_of
from paceline.bench.records import Cell
from paceline.bench.servers import servers_of
from paceline.bench.settings import Settings
from paceline.core.params import SamplingParams
from paceline.core.stats import SpeculationStats
from paceline.errors import ConfigError, EngineError

from .fake_server import CHUNKS, Script, serving

pytest.importorskip("httpx2")

SETTINGS = Settings(SamplingParams(max_tokens=6, temperature=0.0, seed=0), requests=5, warm_up=0)
(CHAT,) = workloads_of(["chat"], None, [])


def measured(
    script: Script,
    load: Load = Load(batch=2),  # noqa: B008 - frozen
    settings: Settings = SETTINGS,
    **more: Any,
) -> Cell:
    with serving(script) as url:
        (server,) = servers_of([url], "m", settings, more.get("key_env"), more.get("timeout_s", 20.0))
        with server.started() as session:
            return session.measure("key", CHAT, load, 0)


def test_chunks_of_several_tokens_are_counted_as_tokens() -> None:
    cell = measured(Script())
    assert len(cell.requests) == 5
    for request in cell.requests:
        assert request.error is None
        assert (request.tokens, request.prompt_tokens) == (6, 5)
        assert request.chunk_tokens == [1, 3, 2]
        assert len(request.chunk_times_s) == 3  # the chunk that only names the role is none
        assert request.text == " one two three four five six"
        assert request.finish_reason == "length"
        times = request.times
        assert times.tpot_s == pytest.approx(sum(times.chunk_gaps_s()) / 5)
    assert cell.speculation == SpeculationStats(
        num_drafts=10, num_draft_tokens=30, num_accepted_tokens=15, accepted_by_depth=[10, 5]
    )
    assert all(check.passed is not False for check in checks_of([cell]))


def test_as_many_at_once_as_the_batch_says() -> None:
    script = Script(pause_s=0.02)
    measured(script, Load(batch=2))
    assert script.most_open == 2


def test_arrivals_count_from_when_a_request_is_due() -> None:
    cell = measured(Script(), Load(rate=100.0))
    due = Load(rate=100.0).due_s(5, 0)
    assert [request.arrival_s for request in cell.requests] == due
    assert all((request.times.ttft_s or 0.0) > 0 for request in cell.requests)


def test_a_server_that_tells_tokens_only_at_the_end() -> None:
    """It refuses to be asked for more."""
    script = Script(refused=("continuous_usage_stats",))
    (request, *_) = measured(script).requests
    assert (request.tokens, request.chunk_tokens) == (6, [])
    assert request.times.tpot_s is not None
    assert request.times.token_gaps_s() == []
    assert len(request.times.chunk_gaps_s()) == 2
    assert script.asked[-1][1]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("script", [Script(usage="never"), Script(refused=("include_usage",))])
def test_a_server_that_never_tells_tokens(script: Script) -> None:
    cell = measured(script)
    (request, *_) = cell.requests
    assert (request.error, request.tokens, request.chunk_tokens) == (None, None, [])
    assert request.times.tpot_s is None
    assert request.times.ttft_s is not None
    assert checks_of([cell])[0].passed


def test_tokens_without_a_text_belong_to_the_chunk_before() -> None:
    """As the end of text, which the total counts."""
    script = Script(chunks=((" a", 1), (" b", 2), ("", 1)))
    (request, *_) = measured(script).requests
    assert (request.chunk_tokens, request.tokens) == ([1, 2, 1], 4)


def test_what_is_asked_of_the_server() -> None:
    params = SamplingParams(max_tokens=6, temperature=0.5, top_k=7, stop=["END"], seed=3, ignore_eos=True)
    script = Script()
    measured(script, settings=Settings(params, requests=2, warm_up=4))
    path, body, _ = script.asked[-1]
    assert path == "/v1/chat/completions"
    assert (body["model"], body["stream"], body["messages"][0]["role"]) == ("m", True, "user")
    sampling = {"max_tokens": 6, "temperature": 0.5, "top_k": 7, "stop": ["END"], "seed": 3}
    assert {name: body[name] for name in sampling} == sampling
    assert body["ignore_eos"] is True
    assert "top_p" not in body
    assert [asked["max_tokens"] for _, asked, _ in script.asked] == [1, 4, 4, 6, 6]


def test_raw_prompts_and_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "secret")
    script = Script()
    raw = Settings(SETTINGS.params, requests=1, raw=True)
    cell = measured(script, Load(batch=1), raw, key_env="THE_KEY")
    path, body, headers = script.asked[-1]
    assert path == "/v1/completions"
    assert body["prompt"] == CHAT.prompts[0].text
    assert headers["authorization"] == "Bearer secret"
    assert cell.requests[0].chunk_tokens == [1, 3, 2]


def test_a_broken_stream_costs_its_own_request() -> None:
    cell = measured(Script(break_after=2))
    assert [request.error for request in cell.requests] == ["the stream ended before its answer did."] * 5
    assert checks_of([cell])[0].passed is False


@pytest.mark.parametrize("drips", [False, True])
def test_a_server_that_takes_too_long(drips: bool) -> None:
    script = Script(hang_after=1, drips=drips)
    (request, *_) = measured(script, timeout_s=0.5, settings=one()).requests
    assert request.error == "no answer within 0.5 s: raise --timeout."
    assert request.tokens is None


def one() -> Settings:
    return Settings(SETTINGS.params, requests=1, warm_up=0)


def test_a_server_that_refuses() -> None:
    with pytest.raises(EngineError, match=r"refuses a request for m: HTTP 401"):
        measured(Script(status=401))


def test_a_server_that_is_not_there() -> None:
    (server,) = servers_of(["http://127.0.0.1:9"], "m", SETTINGS, None, 5.0)
    with server.started() as session, pytest.raises(EngineError, match="is the server running there"):
        session.measure("key", CHAT, Load(batch=1), 0)


def test_a_server_without_a_metrics_page() -> None:
    assert measured(Script(metrics=False), settings=one()).speculation is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: servers_of(["localhost:80"], "m", SETTINGS, None, 1.0), "give http://HOST:PORT"),
        (lambda: servers_of(["http://a:many"], "m", SETTINGS, None, 1.0), "give http://HOST:PORT"),
        (lambda: servers_of(["http://a", "http://a/v1"], "m", SETTINGS, None, 1.0), "name each once"),
        (lambda: servers_of(["http://a"], "m", SETTINGS, "NO_SUCH_KEY", 1.0), "set it"),
        (lambda: servers_of(["http://a"], "m", SETTINGS, None, float("nan")), "--timeout is nan"),
    ],
)
def test_servers_that_are_none(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_names_and_addresses() -> None:
    named, plain = servers_of(["none=http://a:1/v1/", "https://b:2/api"], "m", SETTINGS, None, 1.0)
    assert (named.name, named.base) == ("none", "http://a:1/v1")
    assert (plain.name, plain.base) == ("b:2", "https://b:2/api/v1")


def test_the_script_has_six_tokens() -> None:
    assert sum(count for _, count in CHUNKS) == 6
