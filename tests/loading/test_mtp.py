"""Multi-token prediction modules in the target's checkpoint and beside it, in each family's layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.errors import ModelError
from paceline.loading import LoadedModel, load
from paceline.loading.heads import check_mtp, is_head, load_head, load_mtp
from paceline.models.torch_head import TorchHead
from tests.models.heads import HeadWorld
from tests.models.worlds import Chunk
from tests.tiny import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, write_random
from tests.tiny_checkpoints import VOCAB

from .mtp import LAYERS, OWN, modules, place, write_target
from .support import logits

TOKENS = [5, 6, 7, 300, 9, 10, 11]


def inside(folder: Path, tensors: dict[str, Tensor], **config: Any) -> LoadedModel:
    return load(str(write_target(folder, tensors, **config)))


def beside(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_mtp", **config}))
    return folder


def norm(x: Tensor, weight: Tensor, layout: str = "") -> Tensor:
    weight = weight.double() + (1.0 if layout == "qwen3-next" else 0.0)
    return x / (x.square().mean(-1, keepdim=True) + 1e-12).sqrt() * weight


def turned(x: Tensor) -> Tensor:
    half = HEAD_DIM // 2
    angle = torch.arange(len(x)).double()[:, None] * 10_000.0 ** (-torch.arange(half).double() / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def module_forward(
    layout: str, found: dict[str, Tensor], model: LoadedModel, hidden: Tensor, module: int = 0
) -> tuple[Tensor, Tensor]:
    """A module on a whole text, straight from the checkpoint's tensors: logits and what is fed back."""
    own, block = place(layout, module)
    embed_norm, hidden_norm, join, last_norm = (found[f"{own}{name}.weight"].double() for name in OWN[layout])
    w = {
        name.removeprefix(block): tensor.double() for name, tensor in found.items() if name.startswith(block)
    }
    e = model.weights.embed[TOKENS].double()
    if layout != "qwen3-next":
        e[0] = 0
    parts = [norm(e, embed_norm, layout), norm(hidden, hidden_norm, layout)]
    x = torch.cat(parts[::-1] if layout == "mimo" else parts, 1) @ join.T
    a, n = norm(x, w["input_layernorm.weight"], layout), len(TOKENS)
    q = turned((a @ w["self_attn.q_proj.weight"].T).view(n, HEADS, HEAD_DIM))
    k = turned((a @ w["self_attn.k_proj.weight"].T).view(n, KV_HEADS, HEAD_DIM))
    v = (a @ w["self_attn.v_proj.weight"].T).view(n, KV_HEADS, HEAD_DIM)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    x = x + mixed @ w["self_attn.o_proj.weight"].T
    m = norm(x, w["post_attention_layernorm.weight"], layout)
    gate, up = m @ w["mlp.gate_proj.weight"].T, m @ w["mlp.up_proj.weight"].T
    x = x + (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T
    normed = norm(x, last_norm, layout)
    assert model.weights.lm_head is not None
    return normed @ model.weights.lm_head.double().T, x if layout == "deepseek" else normed


# ---------------------------------------------------------------- what is right


@pytest.mark.parametrize("layout", OWN)
@pytest.mark.parametrize("where", ["inside", "beside"])
@pytest.mark.parametrize("count", [1, 2])
def test_modules_run_as_their_family_does(layout: str, where: str, count: int, tmp_path: Path) -> None:
    found = modules(layout, count)
    if where == "inside":
        model = inside(tmp_path / "model", found, num_nextn_predict_layers=count)
        check_mtp(model.name)
        assert not is_head(tmp_path / "model")
        head = load_mtp(model)
    else:
        model = inside(tmp_path / "model", {})
        folder = beside(tmp_path / "head", found, num_nextn_predict_layers=count)
        assert is_head(folder)
        head = load_head(folder, model)
    spec = head.spec
    assert (head.kind, spec.capture, spec.num_modules) == ("MTP", (LAYERS,), count)
    assert head.weights.embed is model.weights.embed
    assert head.weights.lm_head is model.weights.lm_head
    features = 2 * torch.randn(len(TOKENS), 1, HIDDEN, generator=torch.manual_seed(2))
    fed = features[:, 0].double()
    hidden = fed if layout == "mimo" else norm(fed, model.weights.final_norm)
    decoder = TorchHead(spec, head.weights)
    fused = decoder.fuse(features)
    torch.testing.assert_close(fused.double(), hidden, atol=1e-5, rtol=1e-5)
    for module in range(count):
        ((got, back),) = HeadWorld(decoder).step((Chunk(0, TOKENS), fused), module=module)
        want, want_back = module_forward(layout, found, model, hidden, module)
        torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(back.double(), want_back, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("layout", OWN)
def test_modules_leave_the_target_alone(layout: str, tmp_path: Path) -> None:
    plain, more = inside(tmp_path / "one", {}), inside(tmp_path / "two", modules(layout, 2))
    want = logits(plain.spec, plain.weights, TOKENS)
    assert torch.equal(logits(more.spec, more.weights, TOKENS), want)


def test_a_whole_mimo(tmp_path: Path) -> None:
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    blocks = [f"model.layers.{i}." for i in range(LAYERS)] + [place("mimo", 0)[1]]
    biases = {
        f"{block}self_attn.{part}_proj.bias": torch.randn(size)
        for block in blocks
        for part, size in sizes.items()
    }
    kind = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    model = inside(tmp_path / "model", {**modules("mimo", 1), **biases}, **kind)
    assert model.spec.family == "mimo"
    head = load_mtp(model)
    for layer in (*model.weights.layers, head.weights.modules[0].layer):
        assert layer.q_bias is not None
        assert layer.k_bias is not None
        assert layer.v_bias is not None
    assert logits(model.spec, model.weights, TOKENS).isfinite().all()


def test_copies_of_the_targets_matrices(tmp_path: Path) -> None:
    plain = inside(tmp_path / "plain", {})
    assert plain.weights.lm_head is not None
    block = place("deepseek", 0)[0]
    copies = {f"{block}embed_tokens.weight": plain.weights.embed}
    model = inside(tmp_path / "same", {**modules("deepseek", 1), **copies})
    assert load_mtp(model).weights.embed is model.weights.embed
    own = {f"{block}embed_tokens.weight": torch.randn(VOCAB, HIDDEN)}
    own[f"{block}shared_head.head.weight"] = torch.randn(VOCAB, HIDDEN)
    head = load_mtp(inside(tmp_path / "own", {**modules("deepseek", 1), **own}))
    assert head.weights.lm_head is not None
    assert torch.equal(head.weights.embed, own[f"{block}embed_tokens.weight"])
    assert torch.equal(head.weights.lm_head, own[f"{block}shared_head.head.weight"])
    two = {
        **modules("deepseek", 2),
        **own,
        f"{place('deepseek', 1)[0]}embed_tokens.weight": torch.zeros(VOCAB, HIDDEN),
    }
    with pytest.raises(ModelError, match=r"embed_tokens\.weight differ"):
        load_mtp(inside(tmp_path / "two", two))


def test_biases(tmp_path: Path) -> None:
    bias = torch.randn(HEADS * HEAD_DIM)
    name = f"{place('mimo', 0)[1]}self_attn.q_proj.bias"
    head = load_mtp(inside(tmp_path / "model", {**modules("mimo", 1), name: bias}))
    stored = head.weights.modules[0].layer.q_bias
    assert stored is not None
    assert torch.equal(stored, bias)


# ---------------------------------------------------------------- what is wrong


def without(name: str) -> Callable[[dict[str, Tensor], str], Any]:
    return lambda found, block: found.pop(block + name)


def put(name: str, *shape: int) -> Callable[[dict[str, Tensor], str], Any]:
    return lambda found, block: found.update({block + name: torch.zeros(shape)})


WRONG: dict[str, tuple[Callable[[dict[str, Tensor], str], Any], str]] = {
    "missing": (without("mlp.up_proj.weight"), "lacks 1 of .*mlp.up_proj.weight"),
    "experts": (put("mlp.experts.0.up_proj.weight", 4, 4), "mixture of experts is not supported"),
    "router": (put("mlp.gate.weight", 4, 4), "mixture of experts"),
    "latent": (put("self_attn.kv_a_proj_with_mqa.weight", 4, 4), "multi-head latent attention"),
    "linear": (put("linear_attn.in_proj.weight", 4, 4), "linear attention"),
    "gated": (put("self_attn.q_proj.weight", 2 * HEADS * HEAD_DIM, HIDDEN), "come with a gate"),
    "unknown": (put("gadget.weight", 4), "gadget.weight.*would be wrong"),
    "shape": (put("mlp.up_proj.weight", 7, HIDDEN), r"up_proj.weight has shape \[7, 48\]"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("layout", OWN)
@pytest.mark.parametrize("where", ["inside", "beside"])
def test_what_cannot_run_is_refused(case: str, layout: str, where: str, tmp_path: Path) -> None:
    change, message = WRONG[case]
    found = modules(layout, 1)
    change(found, place(layout, 0)[1])
    model = inside(tmp_path / "model", found if where == "inside" else {})
    folder = beside(tmp_path / "head", found)
    with pytest.raises(ModelError, match=f"(?s){message}"):
        load_mtp(model) if where == "inside" else load_head(folder, model)


def test_fewer_modules_than_promised(tmp_path: Path) -> None:
    model = inside(tmp_path / "model", modules("deepseek", 1), num_nextn_predict_layers=2)
    with pytest.raises(ModelError, match="num_nextn_predict_layers=2, the file holds 1"):
        load_mtp(model)


def test_models_without_modules(tmp_path: Path) -> None:
    model = inside(tmp_path / "model", {})
    with pytest.raises(ModelError, match=f"checkpoint of {model.name} holds no multi-token"):
        check_mtp(model.name)
    with pytest.raises(ModelError, match="holds no multi-token prediction modules"):
        load_mtp(model)


def test_targets_that_modules_are_not_made_for(tmp_path: Path) -> None:
    windowed = load(str(write_random(tmp_path / "model", layers=LAYERS, window=8)))
    with pytest.raises(ModelError, match="sliding windows"):
        load_head(beside(tmp_path / "head", modules("deepseek", 1)), windowed)


def test_layers_that_are_too_many_are_still_refused(tmp_path: Path) -> None:
    extra = {f"model.layers.{LAYERS}.mlp.up_proj.weight": torch.zeros(4, 4)}
    with pytest.raises(ModelError, match="running without it would be wrong"):
        inside(tmp_path / "model", extra)
