"""The head's forward pass over packed sequences, unrolled on its own outputs (training-time test, EAGLE-3).

Row t of a sequence has the target's fused feature of position t and token t + 1. Step 0 reads these; step s
reads the row's own output of step s - 1 and token t + 1 + s at rotary position t + s, and sees the keys of
step 0 up to t and its own of steps 1 .. s: what a chain of draft steps sees at inference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from paceline.train.attention import Rows, attend
from paceline.train.head_shape import HeadShape, Parameters


@dataclass(frozen=True, slots=True)
class Context:
    """Every position of the packed sequences that a row may look at.

    features: `[T, captured, hidden]`. next_tokens: `[T]` int64, the token one ahead. positions: `[T]` int64.
    bounds: first and last + 1 of each sequence.
    """

    features: Tensor
    next_tokens: Tensor
    positions: Tensor
    bounds: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One step's rows. rows: `[R]` int64 places in the context, ascending. normed: `[R, hidden]`, what the
    output matrix multiplies, in the type of the products."""

    rows: Tensor
    normed: Tensor


@dataclass(frozen=True, slots=True)
class Continue:
    """What step s reads. kept: `[R']` int64, indices of the rows of step s - 1 that go on, ascending.
    tokens: `[R']` int64, token t + 1 + s of each."""

    kept: Tensor
    tokens: Tensor


class HeadPass:
    """parameters: in the type of the products (norms too). embed: `[vocabulary, hidden]`, the target's."""

    def __init__(self, shape: HeadShape, parameters: Parameters, embed: Tensor) -> None:
        self.shape = shape
        self.p = parameters
        self.embed = embed
        self.dtype = parameters["fc.weight"].dtype
        self._inv_freq = shape.inv_freq.to(embed.device)
        names = [f"midlayer.self_attn.{name}_proj.weight" for name in "kv"]
        self._kv = torch.cat([parameters[name] for name in names])
        self._gate_up = torch.cat([parameters[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up")])

    def unroll(
        self, context: Context, rows: Tensor, steps: int, go_on: Callable[[int, Step], Continue | None]
    ) -> list[Step]:
        """Up to `steps` steps from the places `rows`; `go_on(s, step s - 1)` says how step s continues."""
        hidden, inputs = self._inputs(self.fuse(context.features), context.next_tokens)
        keys, values = self._keys(inputs, context.positions)
        starts, fed = rows, hidden
        residual, x = hidden[rows], inputs[rows]
        groups = (len(rows), 0, self.shape.num_kv_heads, self.shape.head_dim)
        own_keys, own_values = keys.new_zeros(groups), values.new_zeros(groups)
        done: list[Step] = []
        for step in range(steps):
            if step:
                ahead = go_on(step, done[-1])
                if ahead is None or not len(ahead.kept):
                    break
                starts = starts[ahead.kept]
                residual, x = self._inputs(fed[ahead.kept], ahead.tokens)
                key, value = self._keys(x, context.positions[starts] + step)
                own_keys = torch.cat([own_keys[ahead.kept], key[:, None]], dim=1)
                own_values = torch.cat([own_values[ahead.kept], value[:, None]], dim=1)
            q = self._queries(x, context.positions[starts] + step)
            places = _rows(context, starts)
            attended = attend(q, keys, values, own_keys, own_values, places, self.shape.head_dim**-0.5)
            fed, normed = self._after(residual, attended.flatten(1))
            done.append(Step(starts, normed))
        return done

    def fuse(self, features: Tensor) -> Tensor:
        """`[T, captured, hidden]` -> `[T, hidden]` float32."""
        features = features.to(self.embed.device)
        if self.shape.fc_norm:
            parts = [
                self._norm(features[:, i].float(), f"fc_norm.{i}") for i in range(len(self.shape.capture))
            ]
            features = torch.stack(parts, dim=1)
        return linear(features.flatten(1).to(self.dtype), self.p["fc.weight"]).float()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.p[f"{name}.weight"].float()
        return rms_norm(x, weight.shape, weight, self.shape.norm_eps)

    def _inputs(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream at the layer's entry, `[R, hidden]` float32, and what q, k, v read,
        `[R, 2 hidden]`."""
        normed = self._norm(hidden, "midlayer.hidden_norm")
        embedded = self._norm(self.embed[tokens].float(), "midlayer.input_layernorm")
        both = torch.cat([embedded.to(self.dtype), normed.to(self.dtype)], dim=1)
        return normed if self.shape.norm_before_residual else hidden, both

    def _keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        groups = self.shape.num_kv_heads
        key, value = linear(x, self._kv).chunk(2, dim=1)
        return self._rotated(key, positions, groups), value.reshape(len(x), groups, -1)

    def _queries(self, x: Tensor, positions: Tensor) -> Tensor:
        q = linear(x, self.p["midlayer.self_attn.q_proj.weight"])
        return self._rotated(q, positions, self.shape.num_heads)

    def _rotated(self, x: Tensor, positions: Tensor, heads: int) -> Tensor:
        angles = positions[:, None].float() * self._inv_freq
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        low, high = x.view(len(x), heads, -1).float().chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(self.dtype)

    def _after(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The hidden state that the next step is fed, float32, and the normed one."""
        x = residual + linear(attended, self.p["midlayer.self_attn.o_proj.weight"]).float()
        normed = self._norm(x, "midlayer.post_attention_layernorm").to(self.dtype)
        gate, up = linear(normed, self._gate_up).chunk(2, dim=1)
        x = x + linear(silu(gate) * up, self.p["midlayer.mlp.down_proj.weight"]).float()
        normed = self._norm(x, "norm")
        return normed if self.shape.norm_output else x, normed.to(self.dtype)


def _rows(context: Context, starts: Tensor) -> Rows:
    """Where the ascending places `starts` lie among the sequences."""
    edges = torch.tensor([edge for bounds in context.bounds for edge in bounds], device=starts.device)
    cuts = torch.searchsorted(starts, edges).tolist()
    queries = list(zip(cuts[::2], cuts[1::2], strict=True))
    return Rows(context.bounds, queries, context.positions[starts] + 1)
