"""Traces say what an engine that drafts would have accepted, at the places that it visits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import SamplingParams
from paceline.config import load_config
from paceline.errors import ConfigError
from paceline.sim.acceptance import TraceSet, read_traces
from paceline.tracing import pipeline
from paceline.tracing.pipeline import TracePlan, trace
from paceline.tracing.tracer import Depth
from tests.cases.lab import random_prompt
from tests.loading.heads import LAYERS, write_head
from tests.tiny import ENGINE, write_random
from tests.tracing.support import assert_recorded, steps_of

PROMPTS = [random_prompt(1, 30), [7, 8, 9, 7, 8, 9, 7, 8], random_prompt(2, 90), [5]]
NEW_TOKENS = 40
END = 292
"""In one of the greedy answers."""
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.6)
PENALISED = replace(SAMPLED, top_k=20, repetition_penalty=1.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def drafters(folder: Path) -> dict[str, str]:
    """By the name that they have in traces."""
    write_random(folder / "target", layers=LAYERS, eos=[END])
    write_random(folder / "small", layers=LAYERS, head_noise=0.2)
    write_head(folder / "head")
    own = {name: str(folder / name) for name in ("small", "head")}
    return {"ngram": "ngram", "suffix": "suffix", "layers": "layers", **own}


@pytest.fixture(scope="module")
def data(folder: Path) -> Path:
    return written(folder / "prompts.jsonl", [{"prompt_token_ids": each} for each in PROMPTS])


def written(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return path


def plan_of(
    folder: Path, data: Path, draft: str, params: SamplingParams, depth: int = 20, **options: Any
) -> TracePlan:
    options = {"model": str(folder / "target"), "draft": draft, "max_num_seqs": 2, **ENGINE, **options}
    return TracePlan(load_config(options=options), data, params, seed=3, depth=Depth(depth, 4))


def traced(folder: Path, plan: TracePlan) -> TraceSet:
    out = folder / "traces.jsonl"
    out.unlink(missing_ok=True)
    trace(plan, out)
    return read_traces(out)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALISED], ids=["greedy", "sampled", "penalised"])
@pytest.mark.parametrize(
    ("name", "depth", "k"),
    # What suffixes guess first depends on how many guesses are wanted.
    [(n, 20, k) for n in ("ngram", "layers", "small", "head") for k in (3, 20)] + [("suffix", 5, 5)],
)
def test_a_trace_says_what_a_run_accepts(
    folder: Path, drafters: dict[str, str], data: Path, params: SamplingParams, name: str, depth: int, k: int
) -> None:
    found = traced(folder, plan_of(folder, data, drafters[name], params, depth))
    seeded = [replace(params, seed=3 * 1_000_003 + number) for number in range(len(PROMPTS))]
    options = {"suffix_tree": False} if name == "suffix" else {}
    texts, steps = steps_of(
        folder,
        PROMPTS,
        seeded,
        model=folder / "target",
        draft=drafters[name],
        num_speculative_tokens=k,
        **ENGINE,
        **options,
    )
    accepted = sum(
        assert_recorded(each, name, k, text, visited)
        for each, text, visited in zip(found.requests, texts, steps, strict=True)
    )
    if params is GREEDY and name not in ("ngram", "head"):  # those of the real model have something to find
        assert accepted > 0, "nothing was ever accepted: equality would prove little"


def test_details_agree_with_what_was_accepted(folder: Path, drafters: dict[str, str], data: Path) -> None:
    names = "+".join(drafters.values())
    found = traced(folder, plan_of(folder, data, names, GREEDY))
    assert found.drafters == tuple(drafters)
    for request in found.requests:
        for name, each in request.drafters.items():
            assert each.confidence is not None
            assert each.top is not None
            for place, (count, guesses, top) in enumerate(
                zip(each.accepted, each.confidence, each.top, strict=True)
            ):
                if place == 0:
                    assert (count, guesses, top) == (1, (), ())
                    continue
                assert count - 1 <= len(guesses) <= 20
                assert bool(top) == bool(guesses)
                assert len(top) == (4 if name in ("layers", "small", "head") else bool(guesses))
                if count > 1:
                    assert top[0] == (request.output[place], guesses[0])
                assert len({token for token, _ in top}) == len(top)


def test_few_slots_change_nothing(folder: Path, drafters: dict[str, str], data: Path) -> None:
    names = "+".join(drafters[name] for name in ("layers", "small", "head"))
    plenty = traced(folder, plan_of(folder, data, names, GREEDY, 6))
    assert traced(folder, plan_of(folder, data, names, GREEDY, 6, kv_tokens=160)) == plenty
    with pytest.raises(ConfigError, match="kv_tokens is 130 but a text of 130 tokens"):
        traced(folder, plan_of(folder, data, names, GREEDY, 6, kv_tokens=130))


def test_a_stopped_run_goes_on(
    folder: Path, drafters: dict[str, str], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(folder, data, f"ngram+{drafters['head']}+suffix", SAMPLED, suffix_cache="shared")
    out = folder / "traces.jsonl"
    whole = traced(folder, plan)
    content = out.read_bytes()
    for kept in (len(content) - 20, content.find(b"\n", content.find(b"\n") + 1) + 5, 30):
        out.write_bytes(content[:kept])
        assert trace(plan, out).requests == len(PROMPTS)
        assert read_traces(out) == whole

    def no_more(*_: object) -> None:
        raise AssertionError("all is there already")

    monkeypatch.setattr("paceline.tracing.tracer.Tracer.write", no_more)
    assert trace(plan, out).tokens == 0
    assert out.read_bytes() == content


def test_changed_options_are_refused(folder: Path, data: Path) -> None:
    plan = plan_of(folder, data, "ngram", GREEDY)
    traced(folder, plan)
    out = folder / "traces.jsonl"
    content = out.read_bytes()
    changed = {
        r"another drafters.0.depth \(.* was 20, and is 9\)": replace(plan, depth=Depth(9, 4)),
        "another sampling.max_tokens": replace(plan, params=replace(GREEDY, max_tokens=9)),
        "another sampling.seed": replace(plan, seed=4),
        "another drafters.0.name": plan_of(folder, data, "suffix", GREEDY),
        "options.prompt_lookup_max": plan_of(folder, data, "ngram", GREEDY, prompt_lookup_max=7),
        "another provenance.data, provenance.data_sha256": replace(
            plan, data=written(folder / "other.jsonl", [{"prompt_token_ids": [4]}])
        ),
        "are not the first of the prompts: raise --limit": replace(plan, limit=2),
    }
    for message, other in changed.items():
        with pytest.raises(ConfigError, match=message):
            trace(other, out)
        assert out.read_bytes() == content
    for other_file in ("something else\n", '{"format": "paceline-costs"}\n', "[" * 100_000 + "\n"):
        out.write_text(other_file, encoding="utf-8")
        with pytest.raises(ConfigError, match="line 1 is not the header of a file of traces"):
            trace(plan, out)
        assert out.read_text(encoding="utf-8") == other_file


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ('{"text": "a"}', "line 2 has none of messages, turns, prompt, question"),
        ('{"prompt_token_ids": [5, 99999]}', "line 2: the prompt holds the token id 99999"),
        ('{"prompt_token_ids": []}', "line 2: the prompt is empty"),
        ('{"prompt_token_ids": [5], "id": "prompts/1"}', "line 2 has the id \"?'?prompts/1\"?'? of line 1"),
        ('{"prompt_token_ids": [5], "id": []}', "line 2: id is "),
    ],
)
def test_bad_prompts_are_named(folder: Path, tmp_path: Path, line: str, message: str) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text(f'{{"prompt_token_ids": [5]}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        trace(plan_of(folder, data, "ngram", GREEDY), tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 4}, "num_speculative_tokens is set but every drafter is asked"),
        ({"selector": "everyone"}, "selector is set"),
        ({"mode": "overlapped"}, "leave groups.mode and groups.placement out"),
        ({"growth": "best-first"}, "tree.growth is best-first but traces are of chains"),
        ({"draft": "none"}, "speculation.draft is none: name the drafters"),
        ({"prompt_lookup_branches": 2}, "prompt_lookup_branches is 2"),
    ],
)
def test_options_that_no_trace_holds_are_refused(
    folder: Path, data: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    plan = plan_of(folder, data, **{"draft": "ngram", "params": GREEDY, **options})
    with pytest.raises(ConfigError, match=message):
        trace(plan, tmp_path / "out.jsonl")


def test_an_answer_ends_with_its_end_token(folder: Path, data: Path) -> None:
    found = traced(folder, plan_of(folder, data, "ngram", GREEDY))
    ended = [each.output for each in found.requests if END in each.output]
    assert ended, "no answer ends: choose another token"
    assert all(each.index(END) == len(each) - 1 for each in ended)


def test_the_depth_has_bounds() -> None:
    with pytest.raises(ConfigError, match="depth is 0"):
        Depth(0)
    with pytest.raises(ConfigError, match="top is 65"):
        Depth(20, 65)


def test_progress_is_told(folder: Path, data: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int, int]] = []
    plan = replace(plan_of(folder, data, "ngram", GREEDY), limit=3)
    pipeline.trace(plan, tmp_path / "out.jsonl", progress=lambda *each: told.append(each))
    assert [done for done, _, _ in told] == [0, 1, 2, 3]
    assert {total for _, total, _ in told} == {3}
