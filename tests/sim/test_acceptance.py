"""Acceptance traces: what is read is what was written, and what is broken is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.sim.acceptance import (
    DrafterTrace,
    RequestTrace,
    encoded,
    encoded_header,
    read_traces,
    write_traces,
)

from .data import needs_traces, published, request

HEADER = {"format": "paceline-acceptance", "version": 1, "target": "m"}
GOOD: dict[str, Any] = {
    "id": "a",
    "prompt_token_ids": [1, 2],
    "generated_token_ids": [3, 4, 5],
    "acc_eagle": {"acc_len": [1, 2, 1]},
    "acc_ngram": {"acc_len": [1, 1, 1]},
}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def test_round_trip(tmp_path: Path) -> None:
    detailed = DrafterTrace(
        (1, 3, 1), ((-0.5, -1.0), (), (-0.1,)), (((7, -0.25), (8, -2.0)), (), ((9, 0.0),))
    )
    requests = [
        RequestTrace("a", (1, 2), (3, 4, 5), {"head": detailed, "ngram": DrafterTrace((1, 1, 2))}),
        RequestTrace("b", (1,), (2,), {"head": DrafterTrace((1,))}),
    ]
    path = tmp_path / "mine.jsonl"
    write_traces(path, {"target": "m", "drafters": [{"name": "head", "depth": 20}]}, requests)
    found = read_traces(path)
    assert found.requests == tuple(requests)
    assert found.name == "mine"
    assert found.drafters == ("head", "ngram")
    assert found.header is not None
    assert found.header["format"] == "paceline-acceptance"
    assert found.header["target"] == "m"
    assert [each.name for each in tmp_path.iterdir()] == ["mine.jsonl"]


def test_lines_written_one_by_one_are_the_file(tmp_path: Path) -> None:
    one = request("a", [1], [2, 3], head=[1, 2])
    path = tmp_path / "whole.jsonl"
    write_traces(path, {"target": "m"}, [one])
    assert path.read_bytes() == encoded_header({"target": "m"}) + encoded(one)


def test_published_form_has_no_header_and_heads_of_another_length(tmp_path: Path) -> None:
    other = GOOD | {"id": 7, "acc_eagle": {"acc_len": [1, 2]}}
    found = read_traces(write(tmp_path / "t.jsonl", GOOD, "", other))
    assert found.header is None
    assert [each.request_id for each in found.requests] == ["a", "7"]
    assert [each.aligned("eagle") for each in found.requests] == [True, False]
    assert not found.requests[0].aligned("suffix")


def test_compressed(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode()))
    assert read_traces(path).name == "t"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ConfigError, match=r"t\.jsonl\.gz, line \d cannot be read .*: is it whole"):
        read_traces(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"id": "a", ', r"is not JSON \(.*\): mend or delete it"),
        ("[1]", r"is '\[1\]': each line must be an object"),
        ('{"id": ' + "[" * 100_000, r"is not JSON"),
        ('{"id": ' + "[" * 100_000 + "]" * 100_000 + "}", r"is not JSON"),
        (b"\xff".decode("latin1") * 3, r"is not JSON"),
        ({"id": "a", "prompt_token_ids": [1]}, r"has no generated_token_ids: add it"),
        (
            GOOD | {"prompt_token_ids": [1, "x"]},
            r"prompt_token_ids: Expected `int`, got `str` .*mend or delete",
        ),
        (GOOD | {"prompt_token_ids": [1, 2.5]}, r"prompt_token_ids: Expected `int`, got `float`"),
        (GOOD | {"prompt_token_ids": []}, r"prompt_token_ids is empty"),
        (GOOD | {"generated_token_ids": [1, -2, 3]}, r"generated_token_ids holds -2: ids are from 0"),
        (GOOD | {"generated_token_ids": [2**40, 2, 3]}, r"generated_token_ids holds 1099511627776"),
        (
            GOOD | {"acc_ngram": {"acc_len": [1, 1]}},
            r"acc_ngram: acc_len has 2 entries and generated_token_ids 3",
        ),
        (GOOD | {"acc_eagle": {"acc_len": [1, 0, 1]}}, r"acc_eagle: acc_len holds 0: .* from 1 .*bonus"),
        (GOOD | {"acc_eagle": {"acc_len": [1, 10**30, 1]}}, r"acc_eagle: acc_len holds 1000"),
        (GOOD | {"acc_eagle": [1, 2, 1]}, r"acc_eagle: Expected `object`, got `array`"),
        (GOOD | {"acc_eagle": {}}, r"acc_eagle: .*missing required field `acc_len`"),
        (json.dumps(GOOD).replace("[1, 2, 1]", "[1, NaN, 1]"), r"is not JSON"),
        (
            GOOD | {"acc_eagle": {"acc_len": [1, 2, 1], "confidence": [[-1.0]]}},
            r"acc_eagle: confidence has 1 entries and acc_len 3",
        ),
        (
            GOOD | {"acc_eagle": {"acc_len": [1, 2, 1], "top": [[], [[1, 0.5]], []]}},
            r"acc_eagle: 0\.5 is not the logarithm of a probability",
        ),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: object, said: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, line)
    with pytest.raises(ConfigError, match=r"t\.jsonl, line 2:? " + said):
        read_traces(path)


def test_ours_must_be_aligned(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", HEADER, GOOD, GOOD | {"acc_eagle": {"acc_len": [1, 2]}})
    with pytest.raises(ConfigError, match=r"line 3: acc_eagle: acc_len has 2 entries .*[Rr]ecord"):
        read_traces(path)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"format": "other"}, GOOD], r"line 1: format is 'other': this reads \"paceline-acceptance\""),
        ([HEADER | {"version": 2}, GOOD], r"line 1: version is 2, and this reads 1: .*update"),
        ([HEADER, GOOD, HEADER], r"line 3 is a second header"),
        ([HEADER], r"holds no request"),
        ([], r"holds no request"),
    ],
)
def test_headers(tmp_path: Path, lines: list[object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_traces(write(tmp_path / "t.jsonl", *lines))


def test_no_file(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.jsonl"):
        with pytest.raises(ConfigError, match=r"there is no file .*: give a JSONL file"):
            read_traces(path)


@pytest.mark.parametrize(
    "bad",
    [
        DrafterTrace((1, 2)),
        DrafterTrace((1, 0, 1)),
        DrafterTrace((1, 1, 1), ((float("nan"),), (), ())),
        DrafterTrace((1, 1, 1), ((-float("inf"),), (), ())),
    ],
)
def test_what_cannot_be_read_is_not_written(tmp_path: Path, bad: DrafterTrace) -> None:
    path = tmp_path / "t.jsonl"
    with pytest.raises(ConfigError, match=r"request 'a': acc_head: "):
        write_traces(path, {}, [RequestTrace("a", (1,), (2, 3, 4), {"head": bad})])
    assert not list(tmp_path.iterdir())


@needs_traces
@pytest.mark.parametrize(
    ("dataset", "requests", "aligned"), [("gsm8k", 300, 174), ("instructcoder", 500, 408)]
)
def test_published_files(dataset: str, requests: int, aligned: int) -> None:
    found = read_traces(published(dataset))
    assert len(found.requests) == requests
    assert sum(each.aligned("eagle") for each in found.requests) == aligned
    assert all(each.aligned("ngram") for each in found.requests)
