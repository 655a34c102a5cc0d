"""Heads in whole engines: the target's own tokens come out, in every mode, with whatever head."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline import LLM, SamplingParams
from paceline.core.stats import SpeculationStats
from paceline.engine import head_setup
from paceline.errors import ConfigError, KernelError, ModelError
from tests.cases.lab import assert_no_slot_lost, random_prompt
from tests.engine.test_timeline import slow_down
from tests.loading.heads import LAYERS, eagle, write_head
from tests.loading.mtp import modules, write_target
from tests.models.heads import make_head_spec, make_head_weights
from tests.tiny import ENGINE, HIDDEN, successor_logits, write_markov, write_random

SHARED = [7, 8, 9, 10, 11, 12, 13, 14]
PROMPTS = [[5], random_prompt(1, 40), SHARED + random_prompt(2, 5), SHARED + random_prompt(3, 30)]
PARAMS = [
    [SamplingParams(max_tokens=20) for _ in PROMPTS],
    [SamplingParams(max_tokens=20, temperature=0.8, seed=seed) for seed in range(4)],
    [
        SamplingParams(max_tokens=20, temperature=0.8, seed=9, top_k=40, repetition_penalty=1.2),
        SamplingParams(max_tokens=20, temperature=0.0, frequency_penalty=0.5),
        SamplingParams(max_tokens=20, temperature=1.5, seed=3, logit_bias={9: 3.0}),
        SamplingParams(max_tokens=20, num_speculative_tokens=0),
    ],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    return write_random(folder / "target", layers=LAYERS)


@pytest.fixture(scope="module")
def head(folder: Path) -> Path:
    return write_head(folder / "head")


def decoded(target: Path, dtype: str) -> list[list[list[int]]]:
    """Token ids without a drafter, one request at a time."""
    with LLM(target, draft="none", max_num_seqs=1, **{**ENGINE, "dtype": dtype}) as llm:
        return [
            [llm.generate([prompt], one)[0].token_ids for prompt, one in zip(PROMPTS, params, strict=True)]
            for params in PARAMS
        ]


@pytest.fixture(scope="module")
def plain(target: Path) -> list[list[list[int]]]:
    return decoded(target, "float32")


@pytest.fixture(scope="module")
def cycle(folder: Path) -> tuple[Path, Path]:
    """A target whose next token is a function of the last, and a head that knows it: the feature is the
    token at its position, `fc` makes the next one of it, and the block the one after."""
    size = 12
    after = {token: (5 * token + 3) % size for token in range(size)}
    target = write_markov(folder / "markov", successor_logits(size, after, 0))
    sizes = {"hidden_size": size, "intermediate_size": size, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    weights = make_head_weights(
        make_head_spec(
            **sizes,
            capture=(0,),
            target_hidden_size=size,
            vocab_size=size,
            draft_vocab_size=size,
            norm_output=True,
        )
    )
    step, layer = torch.zeros(size, size), weights.modules[0].layer
    step[list(after.values()), list(after)] = 1.0
    weights.fc, weights.lm_head = step, 5.0 * torch.eye(size)
    layer.o, layer.gate, layer.up, layer.down = (
        torch.zeros(size, 8),
        torch.eye(size),
        torch.eye(size),
        100 * step,
    )
    for name in ("attn_norm", "mlp_norm"):
        setattr(layer, name, torch.ones(size))
    weights.modules[0].norm = torch.ones(size)
    config = {
        "hidden_size": size,
        "intermediate_size": size,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": size,
        "draft_vocab_size": size,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [0],
    }
    return target, write_head(folder / "knowing", "original", weights, **config)


def check(plain: list[list[list[int]]], llm: LLM, *, accepts: bool = True) -> SpeculationStats:
    """All at once, and one at a time; what was speculated."""
    for params, expected in zip(PARAMS, plain, strict=True):
        together = llm.generate(PROMPTS, params)
        assert [output.token_ids for output in together] == expected
        for at, prompt in enumerate(PROMPTS[:2]):
            (alone,) = llm.generate([prompt], params[at])
            assert alone.token_ids == expected[at]
    assert_no_slot_lost(llm)
    assert llm.speculation.num_failed_drafts == 0
    if accepts:
        assert llm.speculation.num_accepted_tokens > 0, (
            "without guesses that count equality would prove little"
        )
    return llm.speculation


@pytest.mark.parametrize("growth", ["chain", "fixed-shape", "best-first", "layers", "calibrated"])
@pytest.mark.parametrize("batch", [1, 4])
def test_in_turn(target: Path, head: Path, plain: list[list[list[int]]], growth: str, batch: int) -> None:
    with LLM(
        target, draft=head, growth=growth, max_num_seqs=batch, num_speculative_tokens=6, **ENGINE
    ) as llm:
        check(plain, llm)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_tokens": 90, "max_batch_tokens": 16},
        {"prefix_cache": False},
        {"dtype": "bfloat16", "draft_dtype": "float32"},
        {"length_by_batch_size": [(1, 4), (3, 0)]},
        {"draft": "ngram+"},
        {"exact": True},
    ],
    ids=str,
)
def test_in_turn_under_every_condition(
    target: Path, head: Path, plain: list[list[list[int]]], options: dict[str, Any]
) -> None:
    # Fixed: what is chosen by costs would soon leave a head at random alone.
    length = {} if "length_by_batch_size" in options else {"num_speculative_tokens": 6}
    merged = {**ENGINE, "max_num_seqs": 4, "draft": "", **length, **options}
    merged["draft"] += str(head)
    if "dtype" in options:
        plain = decoded(target, options["dtype"])
    with LLM(target, **merged) as llm:
        check(plain, llm)


@pytest.mark.parametrize("mode", ["overlapped", "swiftspec"])
@pytest.mark.parametrize("growth", ["auto", "chain", "layers"])
def test_at_the_same_time(
    target: Path, head: Path, plain: list[list[list[int]]], mode: str, growth: str
) -> None:
    with LLM(target, draft=head, mode=mode, growth=growth, max_num_seqs=4, **ENGINE) as llm:
        check(plain, llm, accepts=False)  # at random, nothing may be
        assert llm.speculation.num_drafted_nodes > 0
        assert not llm.lanes.drafter_losses


@pytest.mark.parametrize("mode", ["serial-chain", "serial-tree", "overlapped", "swiftspec", "discard"])
def test_a_head_that_knows_the_target_is_believed(cycle: tuple[Path, Path], mode: str) -> None:
    """It sees the token that a feature stands for, and nothing else: without features, or with another
    position's, it guesses wrong."""
    target, head = cycle
    prompts = [[1, 4, 9], [2, 2, 7, 5, 5, 11], [3]]
    params = SamplingParams(max_tokens=60)
    with LLM(target, draft="none", **ENGINE) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params)]
    with LLM(target, draft=head, mode=mode, num_speculative_tokens=4, **ENGINE) as llm:
        if llm.lanes.placement == "disaggregated":
            slow_down(llm, 0.01)
        outputs = llm.generate(prompts, params)
        assert [output.token_ids for output in outputs] == expected
        stats = llm.speculation
        if llm.lanes.placement == "disaggregated":
            until = time.monotonic() + 10  # the worker tells it with its next sign of life
            while not (found := llm.lanes.drafted_by_distance) and time.monotonic() < until:
                time.sleep(0.05)
            assert sum(right for _, right in found.values()) > 0
            assert max(found) > 0, "some guesses stand on guesses"
    if mode in ("serial-chain", "serial-tree"):
        assert all(output.speculation.mean_acceptance_length > 4.2 for output in outputs)
    assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens / (8 if mode != "serial-chain" else 1)
    assert stats.mean_acceptance_length is not None
    assert stats.mean_acceptance_length > 1.5


def test_a_head_of_the_whole_vocabulary_and_of_31(target: Path, tmp_path: Path, plain: Any) -> None:
    weights = eagle(draft_vocab_size=320, fc_norm=True, norm_output=True)
    head = write_head(
        tmp_path / "head", "speculators", weights, draft_vocab_size=320, fc_norm=True, norm_output=True
    )
    with LLM(target, draft=head, mode="serial-tree", max_num_seqs=4, **ENGINE) as llm:
        check(plain, llm)
        (report,) = llm.lanes.drafters
    assert (report.name, report.kv_bytes_per_token) == ("head", 2 * 20 * 4)
    assert report.feature_bytes_per_token == 3 * HIDDEN * 4
    block = sum(
        matrix.numel()
        for matrix in vars(weights.modules[0].layer).values()
        if matrix is not None and matrix.ndim > 1
    )
    assert report.weight_bytes == 4 * (HIDDEN * 3 * HIDDEN + 320 * HIDDEN + block)
    assert report.seconds > 0
    assert 0 < (report.share_of_step or 0) < 1


@pytest.mark.parametrize("mode", ["serial-chain", "overlapped"])
def test_a_place_that_the_head_reads_twice_is_kept_once(tmp_path: Path, head: Path, mode: str) -> None:
    """Of a target of 4 layers the usual places are 2, 2 and 1."""
    target = write_random(tmp_path / "shallow", layers=4)
    with LLM(target, draft=head, mode=mode, **ENGINE) as llm:
        check(decoded(target, "float32"), llm, accepts=False)
        assert llm.speculation.num_drafted_nodes > 0
        assert not llm.lanes.drafter_losses


def test_without_kernels_plain_torch_has_the_groups_threads(
    target: Path, head: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise KernelError("there is no compiler.")

    threads: list[int] = []
    monkeypatch.setattr(head_setup, "NativeHead", refuse)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    with LLM(target, draft=head, max_num_seqs=4, **ENGINE) as llm:
        assert threads == [ENGINE["threads"]]
        check(plain, llm, accepts=False)
        assert llm.speculation.num_drafted_nodes > 0


@pytest.mark.parametrize("layout", ["deepseek", "mimo"])
def test_the_targets_own_modules(tmp_path: Path, layout: str) -> None:
    target = write_target(tmp_path / "target", modules(layout, 2))
    plain = decoded(target, "float32")
    with LLM(target, draft="mtp", mode="serial-tree", max_num_seqs=4, **ENGINE) as llm:
        check(plain, llm)


@pytest.mark.parametrize("draft", ["mtp", "ngram+mtp"])
def test_a_target_without_modules_is_refused_before_it_is_loaded(
    target: Path, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.engine.build.load", None)
    with pytest.raises(ModelError, match=r"holds no multi-token prediction modules\. Name a head"):
        LLM(target, draft=draft, **ENGINE)


def test_the_embedded_model_has_no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.build.load", None)
    with pytest.raises(ModelError, match="checkpoint of embedded holds no multi-token prediction modules"):
        LLM(draft="mtp")


def test_pickled_weights_are_for_who_asks_for_them(target: Path, tmp_path: Path) -> None:
    head = write_head(tmp_path / "head")
    weights = load_file(head / "model.safetensors")
    (head / "model.safetensors").unlink()
    torch.save(weights, head / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"set speculation\.unpickle_head = true \(--unpickle-head\)"):
        LLM(target, draft=head, **ENGINE)
    with LLM(target, draft=head, unpickle_head=True, **ENGINE) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4))
        assert llm.config.speculation.unpickle_head
        assert llm.speculation.num_drafted_nodes > 0


def test_pickled_weights_of_what_is_no_head(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.build.load", None)
    with pytest.raises(ConfigError, match=r"unpickle_head is set but the drafter is .*, which is no head"):
        LLM(target, draft=target, unpickle_head=True, **ENGINE)


def test_a_target_that_forgets_is_refused(tmp_path: Path, head: Path) -> None:
    windowed = write_random(tmp_path / "windowed", layers=LAYERS, window=16)
    with pytest.raises(ConfigError, match="forgets what is behind its window: choose a drafter"):
        LLM(windowed, draft=head, **ENGINE)


def test_a_shipped_head_that_is_not_there(target: Path) -> None:
    with pytest.raises(ConfigError, match=r"no head is shipped for .*: give the folder"):
        LLM(target, draft="eagle3", **ENGINE)
