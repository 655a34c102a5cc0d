"""Chains of a loaded head, and what is found out about one that was described wrongly."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from paceline.cli import cli
from paceline.loading import load
from paceline.loading.heads import load_head
from paceline.models.torch_head import TorchHead
from paceline.train import acceptance
from paceline.train.batches import packed, split
from paceline.train.head_chains import chain_matches
from paceline.train.store import FeatureStore
from paceline.train.unroll import HeadPass
from tests import tiny

TRAINING = [
    *("--raw", "--max-tokens", "24", "--max-num-seqs", "8", "--batch-tokens", "150", "--epochs", "60"),
    *(
        "--steps",
        "3",
        "--draft-vocab-size",
        "250",
        "--held-out",
        "0.1",
        "--threads",
        "1",
        "--dtype",
        "float32",
    ),
    *("--learning-rate", "0.004", "--loss", "kl", "--norm-before-residual", "--fp32", "--quiet"),
]


@dataclasses.dataclass
class Trained:
    target: Path
    data: Path
    out: Path

    def changed(self, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
        """The head under another config."""
        folder.mkdir()
        for path in (self.out / "head").iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))
        return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A head that knows the target's answers to its prompts by heart."""
    folder = tmp_path_factory.mktemp("explain")
    target = tiny.write_random(folder / "target", layers=8)
    data = folder / "prompts.jsonl"
    words = ["quick", "brown", "lazy", "quiet", "moon", "stars"]
    lines = [json.dumps({"prompt": f"the {a} {b}"}) for a in words for b in words if a != b]
    data.write_text("\n".join(lines) + "\n")
    arguments = [
        "train",
        "eagle3",
        "--target",
        str(target),
        "--data",
        str(data),
        "--out",
        str(folder / "out"),
    ]
    result = CliRunner().invoke(cli, [*arguments, *TRAINING])
    assert result.exit_code == 0, result.output
    return Trained(target, data, folder / "out")


def explained(trained: Trained, head: Path) -> dict[str, Any]:
    arguments = ["explain-acceptance", "--target", trained.target, "--draft", head, "--data", trained.data]
    options = ["--prompts", 12, "--max-tokens", 20, "--threads", 1, "--dtype", "float32", "--json", "--quiet"]
    result = CliRunner().invoke(cli, [str(each) for each in (*arguments, *options)])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["measured"][0]["name"] == "as loaded"
    gains = [each["gain"] for each in found["measured"][1:]]
    assert gains == sorted(gains, reverse=True)
    return found


def test_chains_of_the_loaded_head_are_those_of_the_trainer(trained: Trained) -> None:
    model = load(str(trained.target))
    head = load_head(trained.out / "head", model)
    store = FeatureStore(trained.out / "features")
    chosen, _ = split(store, 0.1, 100)
    decoder = TorchHead(head.spec, head.weights)
    shape_of = json.loads((trained.out / "head" / "training.json").read_text())["recipe"]
    assert shape_of["norm_before_residual"]
    from safetensors.torch import load_file

    from paceline.train.head_shape import head_shape

    stored = load_file(trained.out / "head" / "model.safetensors")
    ids = head.weights.target_ids
    assert ids is not None
    shape = head_shape(
        model.spec, len(ids), capture=head.spec.capture, norm_before_residual=True, fc_norm=True
    )
    parameters = {name: tensor.float() for name, tensor in stored.items() if name not in ("d2t", "t2d")}
    plain = HeadPass(shape, parameters, model.weights.embed.float())
    want = acceptance.greedy_chains(plain, packed(store, chosen[:8]), ids, 4)
    total = 0
    for one, expected in zip(chosen[:8], want, strict=True):
        here = slice(one.start, one.start + one.length)
        tokens, features = store.tokens[here].long(), store.features[here].float()
        got = chain_matches(decoder, features, tokens, one.prompt_length - 1, 4)
        assert torch.equal(got, expected.first)
        total += int(got.sum())
    assert total > 100


def test_nothing_is_wrong_with_the_head_as_it_was_written(trained: Trained) -> None:
    found = explained(trained, trained.out / "head")
    assert found["measured"][0]["length"] > 2
    assert "none of these changes helps" in found["causes"][0]


def test_a_flag_that_says_the_wrong_thing(trained: Trained, tmp_path: Path) -> None:
    head = trained.changed(tmp_path / "head", lambda config: config.update(norm_before_residual=False))
    found = explained(trained, head)
    assert found["measured"][1]["name"] == "norm_before_residual true"
    assert 'set "norm_before_residual": true' in found["causes"][0]


def test_layers_named_by_the_other_convention(trained: Trained, tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 4, 5]

    found = explained(trained, trained.changed(tmp_path / "head", change))
    assert found["measured"][1]["name"] == "capture [2, 4, 5]"
    assert '"eagle_aux_hidden_state_layer_ids": [2, 4, 5]' in found["causes"][0]


def test_a_rope_of_its_own(trained: Trained, tmp_path: Path) -> None:
    head = trained.changed(tmp_path / "head", lambda config: config.update(rope_theta=100.0))
    names = [each["name"] for each in explained(trained, head)["measured"]]
    assert "rope of the target" in names


def test_the_table(trained: Trained) -> None:
    arguments = ["explain-acceptance", "--target", trained.target, "--draft", trained.out / "head"]
    options = ["--data", trained.data, "--prompts", 2, "--max-tokens", 8, "--threads", 1, "--quiet"]
    result = CliRunner().invoke(cli, [str(each) for each in (*arguments, *options)])
    assert result.exit_code == 0, result.output
    assert "tokens per pass" in result.stdout
    assert "outside the draft vocabulary" in result.stdout
    assert "likely causes:" in result.stdout
