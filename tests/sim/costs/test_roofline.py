"""Rooflines against what was fitted to real devices, and the names of devices and models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError, ModelError
from paceline.sim.costs.forms import PassesDraft, RooflinePass
from paceline.sim.costs.hardware import gpu_named, gpu_names, shape_names, shape_of
from paceline.sim.costs.published import published
from paceline.sim.costs.roofline import Efficiency, efficiency_of, kv_capacity, roofline


def target_of(gpu: str, model: str, ranks: int = 1, **more: Any) -> RooflinePass:
    target = roofline(gpu, model, ranks, **more).target
    assert isinstance(target, RooflinePass)
    return target


# Weights of 16.06 GB over 3.35 TB/s are 4.79 ms, 128 KiB of KV over it 39.1 ns, and 2 x 8.03e9 operations
# over 989 TFLOP/s 16.2 us.
def test_an_h100_with_all_of_its_data_sheet() -> None:
    target = target_of("H100", "llama-3.1-8b", efficiency=Efficiency(bandwidth=1.0, compute=1.0))
    assert target.read_s == pytest.approx(4.79e-3, rel=2e-3)
    assert target.per_kv_token_s == pytest.approx(3.913e-8, rel=1e-3)
    assert target.per_token_s == pytest.approx(1.624e-5, rel=1e-3)


def test_an_h100_as_it_was_measured() -> None:
    here, fitted = roofline("h100", "llama-3.1-8b"), published("llama3.1-8b@h100")
    for new, kv, requests in ((1, 500, 1), (64, 32_000, 16), (512, 64_000, 128)):
        expected = fitted.target.seconds(new, kv, requests)
        assert here.target.seconds(new, kv, requests) == pytest.approx(expected, rel=0.01)
    asked = (1, 3, 3, 1, 500)
    assert here.draft("eagle3").seconds(*asked) == pytest.approx(
        fitted.draft("eagle3").seconds(*asked), rel=0.05
    )
    assert here.step_overhead_s == pytest.approx(fitted.step_overhead_s, rel=0.01)


def test_an_h200_as_it_was_predicted() -> None:
    target = target_of("H200", "llama-3.1-8b")
    assert target.read_s == pytest.approx(4.1e-3, rel=0.01)
    assert target.per_kv_token_s == pytest.approx(2.73e-8, rel=1e-3)
    assert target.per_token_s == pytest.approx(2.1e-5, rel=0.01)


# Shares of draft and verification at batch 1 in the same paper's time breakdown, three guesses.
@pytest.mark.parametrize(
    ("target", "draft", "ranks", "ratio"),
    [("qwen3-8b", "qwen3-0.6b", 1, 47.1 / 41.9), ("llama-3-70b", "llama-3.2-1b", 4, 20.8 / 72.1)],
)
def test_draft_models_take_the_share_that_was_measured(
    target: str, draft: str, ranks: int, ratio: float
) -> None:
    costs = roofline("H100", target, ranks, draft=draft, draft_tensor_parallel=ranks)
    drafting = costs.draft("draft").seconds(1, 3, 3, 1, 1000)
    assert drafting / costs.target.seconds(4, 1000, 1) == pytest.approx(ratio, rel=0.25)


# What the models' cards say.
@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3-70b", 70.6),
        ("llama-3.2-1b", 1.236),
        ("llama-3.2-3b", 3.21),
        ("qwen2-72b", 72.7),
        ("qwen2-7b", 7.62),
        ("qwen2-1.5b", 1.544),
        ("qwen2-0.5b", 0.494),
        ("qwen3-8b", 8.19),
        ("qwen3-0.6b", 0.596),
        ("smollm2-135m", 0.1345),
    ],
)
def test_models_have_as_many_parameters_as_their_cards_say(model: str, billions: float) -> None:
    assert shape_of(model).parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_every_known_model_is_among_the_tested() -> None:
    assert len(shape_names()) == 11


def test_kv_bytes_and_the_head_are_those_of_the_paper() -> None:
    kib = {
        name: shape_of(name).kv_bytes_per_token / 1024 for name in ("llama-3.1-8b", "llama-3-70b", "qwen3-8b")
    }
    assert kib == {"llama-3.1-8b": 128, "llama-3-70b": 320, "qwen3-8b": 144}
    for name, share in (("llama-3.1-8b", 0.053), ("qwen3-8b", 0.049)):
        shape = shape_of(name)
        assert shape.head_parameters / shape.parameters == pytest.approx(share, rel=0.01)


# ---------------------------------------------------------------- tensor parallelism and bits


def test_ranks_share_the_work_and_add_up() -> None:
    one, four = target_of("H200", "qwen3-8b"), target_of("H200", "qwen3-8b", 4)
    assert (one.exchange_s, one.exchange_per_token_s) == (0.0, 0.0)
    for name in ("read_s", "per_token_s", "per_kv_token_s"):
        assert getattr(four, name) == pytest.approx(getattr(one, name) / 4)
    assert four.exchange_s == pytest.approx(2 * 36 * 12e-6)
    assert four.exchange_per_token_s == pytest.approx(2 * 36 * 4096 * 2 * 2 * 3 / 4 / 450e9)


def test_more_ranks_than_kv_heads_hold_copies() -> None:
    eight, sixteen = target_of("H100", "llama-3-70b", 8), target_of("H100", "llama-3-70b", 16)
    assert sixteen.per_kv_token_s == eight.per_kv_token_s
    assert sixteen.read_s == pytest.approx(eight.read_s / 2)


def test_fewer_bits_are_read_sooner_and_computed_as_fast() -> None:
    full, quarter = target_of("H200", "qwen3-8b"), target_of("H200", "qwen3-8b", weight_bits=4.0)
    assert quarter.read_s == pytest.approx(full.read_s / 4)
    assert quarter.per_token_s == full.per_token_s


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"141 GB of weights and 1 x H100 hold 72: raise .* to 2"):
        roofline("H100", "llama-3-70b")
    with pytest.raises(ConfigError, match=r"tensor_parallel is 33: llama-3.1-8b has 32 attention heads"):
        roofline("H100", "llama-3.1-8b", 33)
    with pytest.raises(ConfigError, match="tensor_parallel is 0"):
        roofline("H100", "llama-3.1-8b", 0)
    with pytest.raises(ConfigError, match="weight_bits is nan"):
        roofline("H100", "llama-3.1-8b", weight_bits=float("nan"))


def test_kv_fills_what_the_weights_leave() -> None:
    room = 0.9 * 80e9 - shape_of("llama-3.1-8b").parameters * 2
    assert kv_capacity("H100", "llama-3.1-8b") == int(room / (128 * 1024))


# ---------------------------------------------------------------- efficiencies


def test_efficiencies_are_replaced_by_name() -> None:
    assert efficiency_of({"bandwidth": 0.7, "step_s": 0.0}) == replace(
        Efficiency(), bandwidth=0.7, step_s=0.0
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bandwith", 0.5, "did you mean 'bandwidth'.*The known ones are bandwidth, compute, draft_layer_s"),
        ("bandwidth", 0.0, "bandwidth is 0: it must be a share of the data sheet"),
        ("compute", float("nan"), "compute is nan"),
        ("step_s", -1.0, "step_s is -1.0"),
        ("step_s", float("inf"), "step_s is inf"),
        ("sharpness", 0.5, "sharpness is 0.5: it must be from 1"),
    ],
)
def test_efficiencies_that_are_none(name: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        efficiency_of({name: value})


@given(
    st.sampled_from(sorted(gpu_names())),
    st.sampled_from(["qwen3-8b", "llama-3.2-1b", "smollm2-135m"]),
    st.integers(1, 9),
    st.integers(1, 300),
    st.integers(0, 10**5),
    st.floats(1.0, 64.0),
)
def test_a_roofline_never_falls(
    gpu: str, model: str, ranks: int, new: int, kv: int, sharpness: float
) -> None:
    target = target_of(gpu, model, ranks, efficiency=Efficiency(sharpness=sharpness))
    here = target.seconds(new, kv, 1)
    assert target.seconds(new + 1, kv, 1) >= here * (1 - 1e-12)
    assert target.seconds(new, kv + 1000, 1) >= here * (1 - 1e-12)


# ---------------------------------------------------------------- names


def test_an_unknown_gpu_or_model_is_refused_with_the_nearest_and_the_list() -> None:
    with pytest.raises(ConfigError, match=r"as 'h10O': did you mean 'H100'\? .*A100, H100, H200"):
        roofline("h10O", "qwen3-8b")
    with pytest.raises(
        ConfigError, match=r"'qwen3-8', .* did you mean 'qwen3-8b'\? The known ones are llama"
    ):
        roofline("H100", "qwen3-8")
    with pytest.raises(ConfigError, match=r"no GPU is known as 'TPU': the known ones are"):
        gpu_named("TPU")


def config(**changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
        "tie_word_embeddings": True,
    }
    return {name: value for name, value in {**content, **changes}.items() if value != "absent"}


def test_a_shape_comes_from_a_config_file_or_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config()))
    expected = replace(shape_of("smollm2-135m"), name="tiny")
    assert shape_of(str(path)) == expected == shape_of(str(path.parent))
    assert roofline("L40S", str(path)).draft("eagle3") != PassesDraft(each=target_of("L40S", str(path)))
    path.write_text(json.dumps({"text_config": config()}))
    assert shape_of(str(path)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (config(hidden_size="absent"), "hidden_size is missing"),
        (config(num_hidden_layers=-1), "num_hidden_layers is -1: it must be a whole number"),
        (config(vocab_size=1.5), "vocab_size is 1.5"),
        (config(intermediate_size=True), "intermediate_size is True"),
        (config(num_local_experts=8), "num_local_experts is set, and only dense models"),
        ([], "holds no table"),
    ],
)
def test_config_files_that_are_no_decoders(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=message) as refused:
        shape_of(str(path))
    assert str(path) in str(refused.value)


def test_config_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the model's shape"):
        shape_of(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        shape_of(str(tmp_path))
