"""The first layers of the target as its drafter: the tokens of plain decoding, and the guesses of a model cut
off after them, whatever becomes of slots."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from paceline import LLM, RequestOutput, SamplingParams
from paceline.core.request import Request
from paceline.core.scheduler import Scheduler
from paceline.drafters import registry
from paceline.drafters.early_layers import EarlyLayers
from paceline.engine.build import build_drafter
from paceline.engine.draft_messages import DraftGroupSpec
from paceline.errors import ConfigError
from tests.cases.lab import assert_no_slot_lost, random_prompt
from tests.tiny import ENGINE, edit_config, write_random

LAYERS, EARLY = 4, 2
GROWTHS = ["chain", "fixed-shape", "best-first", "layers", "calibrated"]
PROMPTS = [random_prompt(seed, 5 + 9 * seed) for seed in range(4)]
DTYPES = ["float32", "bfloat16", "int8"]
NEW_TOKENS = 48


def weakened(folder: Path, factor: float, **options: Any) -> Path:
    """A model whose later layers add little to what the early ones say, or nothing at all."""
    write_random(folder, layers=LAYERS, **options)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(EARLY, LAYERS):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"] *= factor
    save_file(tensors, folder / "model.safetensors")
    return folder


def cut_off(folder: Path, target: Path) -> Path:
    """A model of the target's first layers alone."""
    write_random(folder)
    (folder / "config.json").write_text((target / "config.json").read_text())
    edit_config(folder, num_hidden_layers=EARLY)
    tensors = load_file(target / "model.safetensors")
    gone = tuple(f"model.layers.{layer}." for layer in range(EARLY, LAYERS))
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(gone)}
    save_file(kept, folder / "model.safetensors")
    assert len(kept) < len(tensors)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == EARLY
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weakened(tmp_path_factory.mktemp("models") / "weakened", 0.15)


@pytest.fixture(scope="module")
def perfect(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weakened(tmp_path_factory.mktemp("models") / "perfect", 0.0)


def new_llm(model: Path, **options: Any) -> LLM:
    return LLM(model, **{**ENGINE, "draft_dtype": None, "draft": "layers", "draft_layers": EARLY, **options})


def ask(llm: LLM, temperature: float, k: int | None = None) -> list[RequestOutput]:
    params = [
        SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature, seed=seed, num_speculative_tokens=k)
        for seed in range(len(PROMPTS))
    ]
    return llm.generate([list(prompt) for prompt in PROMPTS], params)


def plain_tokens(model: Path, dtype: str) -> dict[float, list[list[int]]]:
    with LLM(model, **{**ENGINE, "draft_dtype": None, "dtype": dtype}, draft="none", max_num_seqs=1) as llm:
        return {t: [output.token_ids for output in ask(llm, t)] for t in (0.0, 0.8)}


def drafter_of(llm: LLM) -> EarlyLayers:
    model = llm.engine._executor._drafters[0]._model  # type: ignore[attr-defined]
    assert isinstance(model, EarlyLayers)
    return model


def assert_nothing_held(llm: LLM) -> None:
    assert llm.engine._executor.poll() is None, "releases are done with the next work"
    pool = drafter_of(llm)._pool
    assert pool.num_free == pool.num_slots > 0
    assert_no_slot_lost(llm)


@pytest.fixture(scope="module", params=DTYPES)
def plain(request: pytest.FixtureRequest, target: Path) -> tuple[str, dict[float, list[list[int]]]]:
    return request.param, plain_tokens(target, request.param)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("mode", ["serial-chain", "serial-tree"])
def test_tokens_are_those_of_plain_decoding(target: Path, plain: Any, mode: str, batch: int) -> None:
    dtype, wanted = plain
    with new_llm(target, dtype=dtype, mode=mode, max_num_seqs=batch) as llm:
        for temperature, tokens in wanted.items():
            for k in (None, 1, 4):
                outputs = ask(llm, temperature, k)
                assert [output.token_ids for output in outputs] == tokens
                accepted = sum(output.speculation.num_accepted_tokens for output in outputs)
                assert accepted > 10 or k is None, "how much is worth it without a number is measured"
                assert not any(output.speculation.num_failed_drafts for output in outputs)
        assert_nothing_held(llm)


@pytest.mark.parametrize("growth", GROWTHS)
def test_every_growth_rule_gives_plain_decodings_tokens(target: Path, growth: str) -> None:
    wanted = plain_tokens(target, "float32")
    with new_llm(target, growth=growth, num_speculative_tokens=6, max_num_seqs=3) as llm:
        for temperature, tokens in wanted.items():
            assert [output.token_ids for output in ask(llm, temperature)] == tokens
        assert llm.engine.core.speculation.num_accepted_tokens > 100
        assert_nothing_held(llm)


@pytest.mark.parametrize("mode", ["serial-chain", "serial-tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_its_guesses_are_those_of_a_model_cut_off_there(
    target: Path, tmp_path: Path, mode: str, temperature: float, dtype: str
) -> None:
    """Also where a part of the tree lives on below the next root."""
    small = cut_off(tmp_path / "small", target)
    found = []
    for options in ({}, {"draft": str(small), "draft_layers": None, "draft_dtype": dtype}):
        with new_llm(target, dtype=dtype, mode=mode, num_speculative_tokens=5, **options) as llm:
            found.append([output.speculation for output in ask(llm, temperature)])
    assert found[0] == found[1]
    assert sum(stats.num_accepted_tokens for stats in found[0]) > 10


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_tokens": 8, "max_num_seqs": 4},
        {"max_batch_tokens": 16, "max_num_seqs": 2, "prefix_cache": False},
        {"kv_tokens": 300, "max_num_seqs": 4, "max_batch_tokens": 32},
        {"max_num_seqs": 1},
    ],
)
def test_every_guess_is_right_through_chunks_hits_and_preemption(
    perfect: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later layers add nothing here: what reads a wrong slot guesses wrong."""
    preempted: list[Request] = []
    preempt = Scheduler.preempt

    def watched(scheduler: Scheduler, request: Request) -> None:
        preempted.append(request)
        preempt(scheduler, request)

    monkeypatch.setattr(Scheduler, "preempt", watched)
    plain = LLM(perfect, **{**ENGINE, "prefix_cache": False}, draft="none")
    llm = new_llm(perfect, num_speculative_tokens=3, **options)
    stem, rng = random_prompt(7, 30), random.Random(1)
    for turn in range(3):
        prompts = [
            [*stem[: rng.randrange(31)], *random_prompt(turn * 9 + seed, rng.randrange(1, 40))]
            for seed in range(6)
        ]
        params = [SamplingParams(max_tokens=60, temperature=0.8 * (turn == 1), seed=n) for n in range(6)]
        outputs = llm.generate(prompts, params)
        wanted = plain.generate(prompts, params)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in wanted]
    stats = llm.engine.core.speculation
    assert stats.acceptance_rate == 1.0
    assert stats.num_failed_drafts == 0
    assert stats.num_drafts > 100
    assert bool(preempted) == ("kv_tokens" in options)
    assert_nothing_held(llm)


def test_it_resumes_after_rounds_without_guesses(perfect: Path) -> None:
    llm = new_llm(perfect, length_by_batch_size=[(1, 3), (2, 0)])
    params = SamplingParams(max_tokens=100)
    stream = llm.stream(list(PROMPTS[1]), params)
    for _ in range(5):
        next(stream)
    llm.generate([list(PROMPTS[2])], SamplingParams(max_tokens=20))
    *_, last = stream
    assert last.output is not None
    stats = last.output.speculation
    assert stats.acceptance_rate == 1.0
    assert stats.num_steps > stats.num_drafts > 15


def test_a_window_is_the_targets(tmp_path: Path) -> None:
    """Slots that the target has let go of are not read."""
    model = weakened(tmp_path / "windowed", 0.0, window=16)
    with LLM(model, **ENGINE, draft="none") as plain, new_llm(model, num_speculative_tokens=3) as llm:
        params = SamplingParams(max_tokens=100)
        prompts = [list(prompt) for prompt in PROMPTS]
        wanted = plain.generate(prompts, params)
        outputs = llm.generate(prompts, params)
        assert [output.token_ids for output in outputs] == [output.token_ids for output in wanted]
        assert llm.engine.core.speculation.acceptance_rate == 1.0
        assert_nothing_held(llm)


@pytest.fixture
def few_slots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    kind = replace(registry.KINDS["layers"], target_slots=2)
    monkeypatch.setitem(registry.KINDS, "layers", kind)
    return


@pytest.mark.usefixtures("few_slots")
@pytest.mark.parametrize("mode", ["serial-chain", "serial-tree"])
def test_where_slots_are_short_there_are_fewer_guesses(target: Path, mode: str) -> None:
    wanted = plain_tokens(target, "float32")
    for batch in (1, 4):
        with new_llm(target, mode=mode, max_num_seqs=batch, num_speculative_tokens=6) as llm:
            assert drafter_of(llm)._pool.num_slots == 2 * batch
            assert [output.token_ids for output in ask(llm, 0.0)] == wanted[0.0]
            assert llm.engine.core.speculation.num_accepted_tokens > 10
            assert_nothing_held(llm)


def test_a_third_of_the_layers_where_nothing_is_said(tmp_path: Path) -> None:
    for count, depth in [(2, 1), (7, 2), (9, 3)]:
        with new_llm(write_random(tmp_path / str(count), layers=count), draft_layers=None) as llm:
            assert drafter_of(llm)._layers == depth


@pytest.mark.parametrize(
    ("options", "cause", "remedy"),
    [
        ({"draft_layers": LAYERS}, f"the target has {LAYERS} layers", "give fewer"),
        ({"draft": "ngram"}, "draft_layers is 2 but the drafter is ngram", "leave it out"),
        ({"draft_dtype": "int8"}, "the drafter is layers, which has no weights", "leave it out"),
        ({"mode": "overlapped"}, "runs layers of the target in the target's process", "placement = serial"),
        ({"placement": "disaggregated"}, "but is to run in another", "or another drafter"),
        ({"mode": "swiftspec"}, "but is to run in another", "or another drafter"),
        ({"target_devices": "0/1"}, "gives the target 2 ranks", "give it one"),
    ],
)
def test_what_it_cannot_do_is_refused(target: Path, options: Any, cause: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        new_llm(target, **options)
    assert cause in str(caught.value)
    assert remedy in str(caught.value)


def test_a_target_of_one_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has a single one"):
        new_llm(write_random(tmp_path / "flat", layers=1), draft_layers=None)


def test_it_is_not_made_in_another_process(target: Path) -> None:
    with new_llm(target) as llm:
        limits = llm.engine.core.config.limits
        spec = DraftGroupSpec(config=llm.config, limits=limits, target_vocab_size=320)
    with pytest.raises(ConfigError, match="but is to run in another"):
        build_drafter(spec)


def test_the_placement_is_serial_where_it_is_left_to_be_chosen(
    target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"), new_llm(target, placement="auto") as llm:
        assert ask(llm, 0.0, 4)[0].speculation.num_accepted_tokens > 0
    assert "serial, because layers has to run in the target's process" in caplog.text


TEXTS = ["Repeat after me: one two three four, one two three four.", "What is the capital of France?"]


def chat(llm: LLM, texts: list[str], temperature: float) -> list[RequestOutput]:
    prompts = [llm.chat_prompt([{"role": "user", "content": text}]) for text in texts]
    params = [SamplingParams(max_tokens=16, temperature=temperature, seed=seed) for seed in range(len(texts))]
    return llm.generate(prompts, params)


@pytest.mark.model
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_the_real_model_the_tokens_are_plain_decodings(dtype: str) -> None:
    common: dict[str, Any] = {"dtype": dtype, "context_length": 256, "threads": 1}
    with LLM(draft="none", max_num_seqs=1, **common) as llm:
        wanted = {t: [output.token_ids for output in chat(llm, TEXTS * 2, t)] for t in (0.0, 0.8)}
    for mode in ("serial-chain", "serial-tree"):
        options = {**common, "mode": mode, "max_num_seqs": 4, "num_speculative_tokens": 4}
        with LLM(draft="layers", draft_layers=24, **options) as llm:
            for temperature, tokens in wanted.items():
                together = chat(llm, TEXTS * 2, temperature)
                assert [output.token_ids for output in together] == tokens
                (alone,) = chat(llm, TEXTS[:1], temperature)
                assert alone.token_ids == tokens[0]
            stats = llm.engine.core.speculation
            assert stats.num_accepted_tokens > 10
            assert stats.num_failed_drafts == 0
            assert_nothing_held(llm)
