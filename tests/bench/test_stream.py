"""Events of a stream, and a metrics page, line by line."""

from __future__ import annotations

import json

import pytest

from paceline.bench.counters import counted, difference
from paceline.bench.records import RequestRecord
from paceline.bench.stream import Stream, refusal
from paceline.core.stats import SpeculationStats

STEPS = {"num_spec_steps": 2, "num_draft_tokens": 4, "num_accepted_draft_tokens": 3}


def test_speculation_of_a_request_as_vllm_tells_it() -> None:
    """Five steps: one accepted nothing, two one guess, two all three."""
    told = {
        "num_spec_steps": 5,
        "num_draft_tokens": 15,
        "num_accepted_draft_tokens": 8,
        "acceptance_histogram": [1, 2, 0, 2],
    }
    stream, record = Stream(), RequestRecord(prompt="p", arrival_s=0.0)
    chunk = {"choices": [{"delta": {"content": "a"}}], "metrics": {"speculative_decoding": told}}
    stream.take(f"data: {json.dumps(chunk)}", 1.0)
    stream.write(record)
    assert record.speculation is not None
    assert record.speculation.mean_acceptance_length == 1 + 8 / 5
    assert record.speculation.accepted_by_depth == [4, 2, 2]
    assert record.speculation.num_emitted_tokens == 13


def test_lines_that_are_no_data_say_nothing() -> None:
    stream = Stream()
    for line in ("", ": keep-alive", "event: ping", "id: 3"):
        stream.take(line, 0.0)
    assert not stream.ended
    stream.take("data: [DONE]", 0.0)
    assert stream.ended


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("data: {broken", "not JSON: {broken"),
        ('data: {"error": {"message": "no memory"}}', "the server says: no memory"),
        ("data: [1]", "the server says"),
        ("data: " + "[" * 100_000, "not JSON"),
        ('data: {"error": "half a \\ud83d"}', "half a"),
    ],
)
def test_errors_in_a_stream(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Stream().take(line, 0.0)


@pytest.mark.parametrize(
    "chunk",
    [
        {"choices": ["odd"], "usage": [1]},
        {"choices": {"a": 1}, "usage": {"completion_tokens": "3"}},
        {"choices": [{"delta": {"content": 5}}], "usage": {"completion_tokens": -1}},
        {"choices": [], "usage": {"completion_tokens": 10**30}},
        {"metrics": {"speculative_decoding": {"num_spec_steps": "many"}}},
        {"metrics": {"speculative_decoding": STEPS | {"acceptance_histogram": ["a", None]}}},
        {"metrics": {"speculative_decoding": STEPS | {"acceptance_histogram": 3}}},
    ],
)
def test_what_makes_no_sense_counts_for_nothing(chunk: object) -> None:
    stream, record = Stream(), RequestRecord(prompt="p", arrival_s=0.0)
    stream.take(f"data: {json.dumps(chunk)}", 1.0)
    stream.write(record)
    assert (record.tokens, record.chunk_times_s, record.speculation) == (None, [], None)


def test_reasoning_is_text() -> None:
    stream, record = Stream(), RequestRecord(prompt="p", arrival_s=0.0)
    for delta in ({"reasoning_content": "hm "}, {"content": "yes"}, {"content": None}):
        stream.take(f"data: {json.dumps({'choices': [{'delta': delta}]})}", 1.0)
    stream.write(record)
    assert record.text == "hm yes"
    assert len(record.chunk_times_s) == 2


def test_half_a_character_can_be_written() -> None:
    """The halves of one that came in two chunks are one again."""
    stream, record = Stream(), RequestRecord(prompt="p", arrival_s=0.0)
    for text in ("\\ud83d", "\\ude00", " \\ud800"):
        stream.take('data: {"choices": [{"delta": {"content": "' + text + '"}}]}', 1.0)
    stream.write(record)
    assert record.text == "\U0001f600 \ufffd"
    assert refusal(500, b'"\\ud800"').encode()


def test_refusals_in_one_line() -> None:
    assert refusal(500, b"<html>\n no </html>") == "HTTP 500: <html> no </html>"
    assert refusal(400, b'{"error": {"message": "too long"}}') == "HTTP 400: too long"
    assert refusal(400, b'{"error": "too long"}') == "HTTP 400: too long"


def test_a_metrics_page_of_two_engines() -> None:
    page = "\n".join(
        f'vllm:spec_decode_num_{name}{{engine="{engine}"{more}}} {value}'
        for engine in (0, 1)
        for name, more, value in (
            ("drafts_total", "", 10.0),
            ("drafts_created", "", 1.7e9),
            ("draft_tokens_total", "", 30.0),
            ("accepted_tokens_total", "", 12.0),
            ("accepted_tokens_per_pos_total", ',position="0"', 8.0),
            ("accepted_tokens_per_pos_total", ',position="1"', 4.0),
        )
    )
    assert counted(page) == SpeculationStats(
        num_drafts=20, num_draft_tokens=60, num_accepted_tokens=24, accepted_by_depth=[16, 8]
    )
    assert counted("python_gc_objects_collected_total 3") is None


def test_a_server_that_began_anew_has_no_difference() -> None:
    assert difference(SpeculationStats(num_drafts=5), SpeculationStats(num_drafts=3)) is None
    assert difference(None, SpeculationStats()) is None
