"""Attention of the training-time test: causal over the keys of step 0, and one own key per later step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Rows:
    """The query rows of a packed batch, by sequence.

    keys: per sequence, first and last + 1 of its keys in the batch. queries: the same of its query rows.
    limits: `[R]` int64, how many of its own sequence's keys each row sees.
    """

    def __init__(self, keys: Sequence[tuple[int, int]], queries: Sequence[tuple[int, int]], limits: Tensor):
        self.keys, self.queries, self.limits = keys, queries, limits
        self._hidden: list[Tensor] = []

    def parts(self) -> list[tuple[slice, slice, Tensor]]:
        """Per sequence with rows: its queries, its keys up to the last one seen, and what each row does not
        see of them, `[rows, keys]` bool."""
        found = []
        for (k0, k1), (q0, q1) in zip(self.keys, self.queries, strict=True):
            if q0 < q1:
                limits = self.limits[q0:q1]
                seen = min(int(limits[-1]), k1 - k0)
                hidden = torch.arange(seen, device=limits.device)[None, :] >= limits[:, None]
                found.append((slice(q0, q1), slice(k0, k0 + seen), hidden))
        return found


class StepAttention(torch.autograd.Function):
    """`attend(q, keys, values, own_keys, own_values, rows, scale)`.

    q: `[R, H, D]`. keys, values: `[T, G, D]` of step 0, H a multiple of G. own_keys, own_values:
    `[R, steps, G, D]`, the row's own of the steps since, its query's included; steps may be 0.
    Returns `[R, H, D]` in q's type. One softmax over both kinds of keys; the products run in q's type.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        rows: Rows,
        scale: float,
    ) -> Tensor:
        heads, groups = q.shape[1], keys.shape[1]
        out = torch.empty_like(q)
        own = torch.einsum("rgmd,rsgd->grms", _grouped(q, groups), own_keys)
        probabilities = []
        for query, key, hidden in rows.parts():
            count = query.stop - query.start
            queries = _by_group(q[query], groups)
            scores = torch.bmm(queries, keys[key].permute(1, 2, 0)).float() * scale
            scores.view(groups, count, heads // groups, -1).masked_fill_(hidden[None, :, None, :], -torch.inf)
            extra = own[:, query].reshape(groups, scores.shape[1], -1).float() * scale
            p = torch.cat([scores, extra], dim=2).softmax(-1).to(q.dtype)
            probabilities.append(p)
            split = scores.shape[2]
            part = torch.bmm(p[:, :, :split], values[key].transpose(0, 1))
            part = part.view(groups, count, heads // groups, -1)
            if own_keys.shape[1]:
                p_own = p[:, :, split:].view(groups, count, heads // groups, -1)
                part = part + torch.einsum("grms,rsgd->grmd", p_own, own_values[query])
            out[query] = part.transpose(0, 1).reshape(count, heads, -1)
        ctx.save_for_backward(q, keys, values, own_keys, own_values, out, *probabilities)
        ctx.rows, ctx.scale = rows, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, own_keys, own_values, out, *probabilities = ctx.saved_tensors
        scale, heads, groups, steps = ctx.scale, q.shape[1], keys.shape[1], own_keys.shape[1]
        grad = grad.contiguous()
        d_q, d_own_k, d_own_v = torch.empty_like(q), torch.zeros_like(own_keys), torch.zeros_like(own_values)
        d_k = torch.zeros(keys.shape, device=q.device)
        d_v = torch.zeros(values.shape, device=q.device)
        delta = (grad.float() * out.float()).sum(-1, keepdim=True)
        for (query, key, _), p in zip(ctx.rows.parts(), probabilities, strict=True):
            count, split = query.stop - query.start, p.shape[2] - steps
            d_out, queries = _by_group(grad[query], groups), _by_group(q[query], groups)
            correction = _by_group(delta[query], groups)
            d_p = torch.bmm(d_out, values[key].permute(1, 2, 0)).float()
            d_s = ((d_p - correction).mul_(p[:, :, :split])).mul_(scale).to(q.dtype)
            part = torch.bmm(d_s, keys[key].transpose(0, 1)).view(groups, count, heads // groups, -1)
            d_k[key] += torch.bmm(d_s.transpose(1, 2), queries).transpose(0, 1)
            d_v[key] += torch.bmm(p[:, :, :split].transpose(1, 2), d_out).transpose(0, 1)
            if steps:
                shape = (groups, count, heads // groups)
                p_own, d_o = p[:, :, split:].view(*shape, -1), d_out.view(*shape, -1)
                d_p_own = torch.einsum("grmd,rsgd->grms", d_o, own_values[query]).float()
                d_s_own = (d_p_own - correction.view(*shape, 1)) * p_own * scale
                d_s_own = d_s_own.to(q.dtype)
                part = part + torch.einsum("grms,rsgd->grmd", d_s_own, own_keys[query])
                d_own_k[query] = torch.einsum("grms,grmd->rsgd", d_s_own, queries.view(*shape, -1))
                d_own_v[query] = torch.einsum("grms,grmd->rsgd", p_own, d_o)
            d_q[query] = part.transpose(0, 1).reshape(count, heads, -1)
        return d_q, d_k.to(keys.dtype), d_v.to(values.dtype), d_own_k, d_own_v, None, None


def _grouped(x: Tensor, groups: int) -> Tensor:
    """`[R, H, D]` -> `[R, G, H / G, D]`: the query heads that share a key head."""
    return x.view(x.shape[0], groups, -1, x.shape[-1])


def _by_group(x: Tensor, groups: int) -> Tensor:
    """`[R, H, D]` -> `[G, R * H / G, D]`."""
    return _grouped(x, groups).transpose(0, 1).reshape(groups, -1, x.shape[-1])


def attend(
    q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, rows: Rows, scale: float
) -> Tensor:
    """See `StepAttention`."""
    out: Tensor = StepAttention.apply(q, keys, values, own_keys, own_values, rows, scale)  # type: ignore[no-untyped-call]
    return out
