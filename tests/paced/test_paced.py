"""Paced groups: the recorded texts come out in every mode, through real processes where the mode has them."""

from __future__ import annotations

import random
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from paceline import LLM
from paceline.config import Config, GroupsConfig
from paceline.core.params import SamplingParams
from paceline.core.work import Announcement, RunTarget, TargetItem
from paceline.errors import ConfigError
from paceline.loading import load
from paceline.modes import MODES
from paceline.paced.build import PacedPair, build_paced, read_pair
from paceline.paced.groups import PacedTarget, PassTimes, TraceTarget
from paceline.paced.world import Recording, World, read_recordings
from tests.tiny import ENGINE, write_random

VOCAB = 1000


def recording(seed: int, length: int = 40) -> Recording:
    """A text whose drafter's first choice is right four times out of five."""
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(VOCAB) for _ in range(5 + seed))
    output, rows = [], []
    for _ in range(length):
        row = rng.sample(range(VOCAB), 8)
        output.append(row[0] if rng.random() < 0.8 else rng.choice([*row[1:], rng.randrange(VOCAB)]))
        rows.append(tuple(row))
    scores = tuple([-0.3, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0] for _ in output)
    return Recording(prompt, tuple(output), tuple(rows), tuple(map(tuple, scores)))


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(b"".join(msgspec.json.encode(recording(seed)) + b"\n" for seed in range(2)))
    path = tmp_path / "pair.json"
    path.write_bytes(msgspec.json.encode(PacedPair(((8, 0.004),), ((8, 0.001),), str(trace), VOCAB)))
    return path


@pytest.mark.model
@pytest.mark.parametrize("mode", MODES)
def test_the_recorded_texts_come_out(mode: str, pair: Path) -> None:
    engine = build_paced(pair, Config(groups=GroupsConfig(mode=mode)), load("embedded").tokenizer)  # type: ignore[arg-type]
    texts: dict[str, list[int]] = {}
    try:
        for seed in range(2):
            each = recording(seed)
            params = SamplingParams(max_tokens=len(each.output), ignore_eos=True).resolved()
            engine.add(f"r{seed}", 0, each.prompt, params)
        while not engine.idle:
            for name, chunk in engine.step():
                texts.setdefault(name, []).extend(chunk.token_ids)
    finally:
        engine.close()
    assert texts == {f"r{seed}": list(recording(seed).output) for seed in range(2)}
    passes = engine.core.speculation.num_steps
    assert passes == 78 if mode == "autoregressive" else passes < 70


@pytest.mark.parametrize("mode", ["autoregressive", "serial-tree", "overlapped"])
def test_small_real_models_answer_in_their_time(mode: str, tmp_path: Path) -> None:
    models = write_random(tmp_path / "target"), write_random(tmp_path / "draft", head_noise=0.1)
    names = {"target_model": str(models[0]), "draft_model": str(models[1])}
    prompt, params = [5, 6, 7, 8], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    with LLM(models[0], draft="none", **ENGINE) as llm:
        expected, vocab_size = llm.generate(prompt, params)[0].token_ids, llm.model.vocab_size
        path = tmp_path / "pair.json"
        times = {"target_s": [[1, 0.004]], "draft_s": [[1, 0.001]]}
        path.write_bytes(
            msgspec.json.encode({**times, **names, "vocab_size": vocab_size, "context_length": 64})
        )
        config = Config(groups=GroupsConfig(mode=mode))  # type: ignore[arg-type]
        with closing(build_paced(path, config, llm.tokenizer)) as engine:
            engine.add("r", 0, prompt, params.resolved())
            tokens: list[int] = []
            while not engine.idle:
                tokens += [token for _, chunk in engine.step() for token in chunk.token_ids]
            assert tokens == expected
            assert engine.lanes.target_busy_s >= 0.004 * engine.lanes.target_passes
            about = engine.about
            assert (about.model, about.mode) == ("pair", mode)
            assert about.placement == ("disaggregated" if mode == "overlapped" else "serial")
            assert about.drafter == ("none" if mode == "autoregressive" else "draft_model")
            assert about.load_s > 0
            if mode == "overlapped":
                assert engine._lanes._group is not None


def test_branches_go_on_and_differ_from_each_other() -> None:
    text = World([recording(0)], VOCAB).text(recording(0).prompt)
    first = len(recording(0).prompt)
    on_text, _ = text.candidates(first + 1, recording(0).output[0], 8)
    assert tuple(on_text) == recording(0).candidates[1]
    wrong = (recording(0).output[0] + 1) % VOCAB
    off_text, _ = text.candidates(first + 1, wrong, 8)
    assert off_text != on_text
    assert len(set(off_text)) == 8
    ranks = recording(0).ranks()
    expected = off_text[rank] if (rank := ranks[1]) is not None else None
    assert expected is None or text.target_token(first + 1, wrong) == expected


def test_a_pass_takes_the_time_it_should() -> None:
    each = recording(0)
    target = PacedTarget(TraceTarget(World([each], VOCAB)), PassTimes([(1, 0.02), (9, 0.1)]))
    told = Announcement(len(each.prompt), SamplingParams().resolved(), each.prompt)
    slots = tuple(range(len(each.prompt)))
    item = TargetItem("r", 0, 0, each.prompt, 0, slots, True, announcement=told)
    began = time.perf_counter()
    (verdict,) = target.run(RunTarget(1, (item,))).verdicts
    assert time.perf_counter() - began > 0.05
    assert verdict.tokens == each.output[:1]


def test_times_lie_between_the_points_given() -> None:
    times = PassTimes([(16, 13.25), (4, 10.32), (8, 10.39)])
    assert [times.of(size) for size in (1, 4, 8, 16, 64)] == [10.32, 10.32, 10.39, 13.25, 13.25]
    assert times.of(12) == pytest.approx(11.82)


def test_what_cannot_be_read_is_named(tmp_path: Path, pair: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_recordings(tmp_path / "missing")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": [1]}\n')
    with pytest.raises(ConfigError, match=r"broken\.jsonl:1"):
        read_recordings(broken)
    with pytest.raises(ConfigError, match="not a paced pair"):
        read_pair(broken)
    assert read_pair(pair).vocab_size == VOCAB
    broken.write_bytes(msgspec.json.encode(PacedPair(((1, 1.0),), ((1, 1.0),), target_model="one")))
    with pytest.raises(ConfigError, match="either a trace, or"):
        read_pair(broken)
    with pytest.raises(ConfigError, match="recorded prompts only"):
        World([recording(0)], VOCAB).text([1, 2])
