"""The unrolled head against a chain computed anew for every row, with plain full attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.loading import LoadedModel
from paceline.train.head_shape import HeadShape, Parameters
from paceline.train.unroll import Context, Continue, HeadPass, Step

from .support import random_head, tiny_target

STEPS = 4
FLAGS: dict[str, dict[str, bool]] = {
    "plain": {},
    "3.1": {"fc_norm": True, "norm_output": True},
    "normed residual": {"norm_before_residual": True},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_target(tmp_path_factory.mktemp("unroll"))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, position: int, shape: HeadShape) -> Tensor:
    """`[heads, D]`."""
    angle = position * shape.inv_freq
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], dim=-1)


class Reference:
    """One layer, one entry after the other; entry i is (hidden, token, position)."""

    def __init__(self, shape: HeadShape, parameters: Parameters, embed: Tensor) -> None:
        self.shape, self.p, self.embed = shape, parameters, embed

    def fuse(self, features: Tensor) -> Tensor:
        if self.shape.fc_norm:
            parts = [
                norm(features[i], self.p[f"fc_norm.{i}.weight"], self.shape.norm_eps)
                for i in range(len(features))
            ]
            features = torch.stack(parts)
        return self.p["fc.weight"] @ features.flatten()

    def last(self, entries: list[tuple[Tensor, int, int]]) -> tuple[Tensor, Tensor]:
        """What is fed back and the normed output of the last entry, which sees all of them."""
        shape, p = self.shape, {name.removeprefix("midlayer."): t for name, t in self.p.items()}
        keys, values = [], []
        for hidden, token, position in entries:
            normed = norm(hidden, p["hidden_norm.weight"], shape.norm_eps)
            a = torch.cat([norm(self.embed[token], p["input_layernorm.weight"], shape.norm_eps), normed])
            groups = (shape.num_kv_heads, shape.head_dim)
            keys.append(rotated((p["self_attn.k_proj.weight"] @ a).view(groups), position, shape))
            values.append((p["self_attn.v_proj.weight"] @ a).view(groups))
        q = rotated((p["self_attn.q_proj.weight"] @ a).view(shape.num_heads, -1), position, shape)
        share = shape.num_heads // shape.num_kv_heads
        k = torch.stack(keys).repeat_interleave(share, dim=1)
        v = torch.stack(values).repeat_interleave(share, dim=1)
        weights = (torch.einsum("hd,thd->ht", q, k) * shape.head_dim**-0.5).softmax(-1)
        attended = torch.einsum("ht,thd->hd", weights, v).flatten()
        x = (normed if shape.norm_before_residual else hidden) + p["self_attn.o_proj.weight"] @ attended
        m = norm(x, p["post_attention_layernorm.weight"], shape.norm_eps)
        gated = torch.nn.functional.silu(p["mlp.gate_proj.weight"] @ m) * (p["mlp.up_proj.weight"] @ m)
        x = x + p["mlp.down_proj.weight"] @ gated
        out = norm(x, p["norm.weight"], shape.norm_eps)
        return out if shape.norm_output else x, out


def packed(generator: torch.Generator, lengths: tuple[int, ...], width: tuple[int, int]) -> Context:
    total = sum(lengths)
    bounds, at = [], 0
    for length in lengths:
        bounds.append((at, at + length))
        at += length
    return Context(
        features=torch.randn(total, *width, generator=generator),
        next_tokens=torch.randint(0, 300, (total,), generator=generator),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        bounds=tuple(bounds),
    )


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_every_step_of_every_row(target: LoadedModel, flags: dict[str, bool]) -> None:
    """Rows drop out between the steps, one sequence has none, and step s is fed the tokens that follow."""
    generator = torch.manual_seed(5)
    shape, parameters = random_head(target, 50, num_kv_heads=2, **flags)
    embed = target.weights.embed.float()
    context = packed(generator, (9, 6, 13), (len(shape.capture), shape.hidden_size))
    rows = torch.tensor([3, 4, 5, 6, 7, 17, 18, 19, 20, 21, 22])
    tokens = torch.randint(0, 300, (STEPS, 28), generator=generator)

    def go_on(step: int, done: Step) -> Continue:
        kept = (torch.arange(len(done.rows)) % (step + 2) != 1).nonzero().flatten()
        return Continue(kept, tokens[step][done.rows[kept]])

    steps = HeadPass(shape, parameters, embed).unroll(context, rows, STEPS, go_on)
    assert [len(step.rows) for step in steps] == [11, 7, 5, 4]
    reference = Reference(shape, parameters, embed)
    for number, step in enumerate(steps):
        for place, got in zip(step.rows.tolist(), step.normed, strict=True):
            start = next(a for a, b in context.bounds if a <= place < b)
            entries = [
                (reference.fuse(context.features[i]), int(context.next_tokens[i]), i - start)
                for i in range(start, place + 1)
            ]
            fed, normed = reference.last(entries)
            for later in range(1, number + 1):
                entries.append((fed, int(tokens[later][place]), place - start + later))
                fed, normed = reference.last(entries)
            torch.testing.assert_close(got, normed, rtol=1e-4, atol=1e-4)


def test_gradients_of_all_weights(target: LoadedModel) -> None:
    """Against the reference, through three steps."""
    generator = torch.manual_seed(6)
    shape, parameters = random_head(target, 50)
    embed = target.weights.embed.float()
    context = packed(generator, (5, 4), (len(shape.capture), shape.hidden_size))
    rows = torch.tensor([1, 2, 6, 7])
    tokens = torch.randint(0, 300, (3, 9), generator=generator)
    mixing = torch.randn(3, 4, shape.hidden_size, generator=generator)
    gradients = []
    for plain in (False, True):
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in parameters.items()}
        if plain:
            outputs = _plain_chains(Reference(shape, leaves, embed), context, rows, tokens)
        else:
            steps = HeadPass(shape, leaves, embed).unroll(
                context, rows, 3, lambda step, done: Continue(torch.arange(4), tokens[step][done.rows])
            )
            outputs = torch.stack([step.normed for step in steps])
        (outputs * mixing).sum().backward()
        gradients.append({name: leaf.grad for name, leaf in leaves.items() if name != "lm_head.weight"})
    for name, want in gradients[1].items():
        torch.testing.assert_close(gradients[0][name], want, rtol=1e-3, atol=1e-3, msg=name)


def _plain_chains(reference: Reference, context: Context, rows: Tensor, tokens: Tensor) -> Tensor:
    fused = [reference.fuse(features) for features in context.features]
    outputs: list[list[Tensor]] = [[], [], []]
    for place in rows.tolist():
        start = next(a for a, b in context.bounds if a <= place < b)
        entries = [(fused[i], int(context.next_tokens[i]), i - start) for i in range(start, place + 1)]
        for step in range(3):
            fed, normed = reference.last(entries)
            outputs[step].append(normed)
            if step < 2:
                entries.append((fed, int(tokens[step + 1][place]), place - start + step + 1))
    return torch.stack([torch.stack(step) for step in outputs])
