"""The loss of a head over its draft vocabulary, fused with the head's output matrix.

With p the target's distribution (over the whole vocabulary, known on the draft vocabulary only), p~ the same
renormalised on the draft vocabulary, q the head's, and alpha = sum_v min(p_v, q_v) the share of tokens that
is accepted (over the draft vocabulary; what lies outside is never accepted):

    kl         KL(p~ || q); rows whose likeliest token the head cannot say are left out (EAGLE-3)
    lk_hybrid  l KL(p~ || q) + (1 - l) (1 - alpha), l = exp(-3 alpha) without gradient (arXiv 2602.23881)
    lk_alpha   -log alpha (the same)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Loss = Literal["kl", "lk_hybrid", "lk_alpha"]
LOSSES: tuple[str, ...] = get_args(Loss)

_ROWS_PER_PRODUCT = 1024
_ROWS_PER_SOFTMAX = 64
"""Matrix products want many rows, what lies between them wants to stay in the cache."""
_ETA = 3.0


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The target at the positions of a batch that predict an answer token.

    p: `[M, draft vocabulary]` float32, true probabilities. mass: `[M]` float32, their sums. sayable: `[M]`
    bool, whether the draft vocabulary has the likeliest token.
    """

    p: Tensor
    mass: Tensor
    sayable: Tensor

    def at(self, rows: Tensor) -> TargetRows:
        return TargetRows(self.p[rows], self.mass[rows], self.sayable[rows])


def target_rows(
    finals: Tensor, lse: Tensor, best: Tensor, norm: Tensor, eps: float, head: Tensor, members: Tensor
) -> TargetRows:
    """finals: `[M, hidden]` last residuals. lse: `[M]`, best: `[M]` likeliest token. norm: the target's
    final norm. head: its rows of the draft vocabulary, in the type to multiply in. members: `[vocabulary]`
    bool, whether the draft vocabulary has the token."""
    normed = torch.nn.functional.rms_norm(finals.float(), norm.shape, norm, eps).to(head.dtype)
    p = torch.empty(len(finals), len(head), device=head.device)
    mass = torch.empty(len(finals), device=head.device)
    for at in range(0, len(finals), _ROWS_PER_PRODUCT):
        part = slice(at, at + _ROWS_PER_PRODUCT)
        logits = torch.nn.functional.linear(normed[part], head)
        for start in range(0, len(logits), _ROWS_PER_SOFTMAX):
            some = logits[start : start + _ROWS_PER_SOFTMAX]
            here = slice(at + start, at + start + len(some))
            torch.sub(some, lse[here, None], out=p[here])
            mass[here] = p[here].exp_().sum(-1)
            # The sum over all logits was taken in another precision, and a share cannot exceed one.
            if (mass[here] > 1).any():
                p[here] /= mass[here, None].clamp(min=1.0)
    return TargetRows(p, mass.clamp(max=1.0), members[best.long()])


@dataclass(frozen=True, slots=True)
class LossRows:
    """Which row of the target each of N rows is to match, and how much it counts. targets: `[N]` int64 index
    into TargetRows. weights: `[N]` float32."""

    targets: Tensor
    weights: Tensor


class HeadLoss(torch.autograd.Function):
    """`head_loss(hidden, head, target, rows, kind)`, gradients computed on the way forward.

    hidden: `[N, d]` normed, head: `[draft vocabulary, d]`, of one type. Returns the weighted sum of the rows'
    losses and, without gradient, each row's alpha `[N]`. Logits exist for 1024 rows at a time only.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, target: TargetRows, rows: LossRows, kind: Loss
    ) -> tuple[Tensor, Tensor]:
        d_hidden = torch.empty_like(hidden)
        d_head = torch.zeros(head.shape, device=head.device) if ctx.needs_input_grad[1] else None
        alpha = torch.empty(len(hidden), device=hidden.device)
        total = torch.zeros((), device=hidden.device)
        for at in range(0, len(hidden), _ROWS_PER_PRODUCT):
            part = slice(at, at + _ROWS_PER_PRODUCT)
            logits = torch.nn.functional.linear(hidden[part], head)
            for start in range(0, len(logits), _ROWS_PER_SOFTMAX):
                some = logits[start : start + _ROWS_PER_SOFTMAX]
                here = slice(at + start, at + start + len(some))
                losses, alpha[here] = to_gradient(
                    some, target.at(rows.targets[here]), rows.weights[here], kind
                )
                total += losses.sum()
            torch.mm(logits, head, out=d_hidden[part])
            if d_head is not None:
                d_head += logits.t() @ hidden[part]
        ctx.save_for_backward(d_hidden, d_head)
        ctx.mark_non_differentiable(alpha)
        return total, alpha

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        return d_hidden * grad.to(d_hidden.dtype), None if d_head is None else d_head * grad, None, None, None


def to_gradient(logits: Tensor, target: TargetRows, weights: Tensor, kind: Loss) -> tuple[Tensor, Tensor]:
    """Puts the gradient of the weighted losses in the place of the logits `[N, V]`; gives the weighted losses
    and the alphas, `[N]` float32.

    With q = softmax(z): d KL / dz = q - p~, and d(1 - alpha) / dz = q (<m, q> - m), m = [q < p]; so any mix
    of both is q a - (q m) b - p c with a number a, b, c for each row. KL's value is its cross-entropy: the
    entropy of p~ is constant.
    """
    p, z = target.p, logits.float()
    q = z.softmax(-1)
    alpha = torch.minimum(p, q).sum(-1)
    lse = z.amax(-1) - q.amax(-1).log()
    cross = lse - (p * z).sum(-1) / target.mass
    kl, tv, losses = _shares(cross, alpha, target.sayable * weights, weights, kind)
    if kind == "kl":
        q *= kl[:, None]
    else:
        below = torch.ops.aten.threshold_backward(q, p - q, 0.0)  # q where q < p, else 0
        q *= (kl + tv * below.sum(-1))[:, None]
        q.addcmul_(below, tv[:, None], value=-1)
    if kind != "lk_alpha":
        q.addcmul_(p, (kl / target.mass)[:, None], value=-1)
    logits.copy_(q)
    return losses, alpha


def _shares(
    cross: Tensor, alpha: Tensor, usable: Tensor, weights: Tensor, kind: Loss
) -> tuple[Tensor, Tensor, Tensor]:
    """How much of KL's gradient and of that of 1 - alpha a row's gradient is made of, and its loss."""
    if kind == "kl":
        return usable, torch.zeros_like(usable), usable * cross
    if kind == "lk_alpha":
        safe = alpha.clamp(min=1e-6)
        return torch.zeros_like(usable), weights / safe, -weights * safe.log()
    share = torch.exp(-_ETA * alpha)
    kl, tv = usable * share, weights * (1 - share)
    return kl, tv, kl * cross + tv * (1 - alpha)


def head_loss(
    hidden: Tensor, head: Tensor, target: TargetRows, rows: LossRows, kind: Loss
) -> tuple[Tensor, Tensor]:
    """See `HeadLoss`."""
    total, alpha = HeadLoss.apply(hidden, head, target, rows, kind)  # type: ignore[no-untyped-call]
    return total, alpha
