"""The fused losses against autograd on their plain formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.train.losses import LOSSES, LossRows, TargetRows, head_loss, target_rows

VOCAB, OUTSIDE, HIDDEN = 40, 10, 16


def target(rows: int) -> TargetRows:
    logits = torch.randn(rows, VOCAB + OUTSIDE) * 2
    p = logits.softmax(-1)[:, :VOCAB].contiguous()
    return TargetRows(p, p.sum(-1), logits.argmax(-1) < VOCAB)


def plain(kind: str, logits: Tensor, p: Tensor, sayable: Tensor) -> tuple[Tensor, Tensor]:
    log_q = logits.log_softmax(-1)
    alpha = torch.minimum(p, log_q.exp()).sum(-1)
    cross = -(p / p.sum(-1, keepdim=True) * log_q).sum(-1) * sayable
    share = torch.exp(-3 * alpha.detach())
    losses = {"kl": cross, "lk_hybrid": share * cross + (1 - share) * (1 - alpha), "lk_alpha": -alpha.log()}
    return losses[kind], alpha


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("rows", [3, 64, 1100])
def test_values_and_gradients(kind: str, rows: int) -> None:
    torch.manual_seed(rows)
    known = target(90)
    hidden, head = torch.randn(rows, HIDDEN), torch.randn(VOCAB, HIDDEN)
    which, weights = torch.randint(0, 90, (rows,)), torch.rand(rows)
    results = []
    for fused in (True, False):
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        if fused:
            total, alpha = head_loss(h, w, known, LossRows(which, weights), kind)  # type: ignore[arg-type]
        else:
            losses, alpha = plain(kind, h @ w.t(), known.p[which], known.sayable[which])
            total = (losses * weights).sum()
        (total * 0.7).backward()
        results.append((total.detach(), alpha.detach(), h.grad, w.grad))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def test_a_frozen_output_matrix_gets_no_gradient() -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(5, HIDDEN, requires_grad=True), torch.randn(VOCAB, HIDDEN)
    rows = LossRows(torch.arange(5), torch.ones(5))
    total, _ = head_loss(hidden, head, target(5), rows, "kl")
    total.backward()
    assert hidden.grad is not None
    assert head.grad is None


def test_target_rows_are_the_true_probabilities_of_the_draft_vocabulary() -> None:
    torch.manual_seed(1)
    finals, norm = torch.randn(70, HIDDEN), torch.rand(HIDDEN) + 0.5
    head = torch.randn(VOCAB + OUTSIDE, HIDDEN)
    logits = torch.nn.functional.rms_norm(finals, (HIDDEN,), norm, 1e-5) @ head.t()
    members = torch.zeros(VOCAB + OUTSIDE, dtype=torch.bool)
    members[:VOCAB] = True
    rows = target_rows(
        finals, logits.logsumexp(-1), logits.argmax(-1).int(), norm, 1e-5, head[:VOCAB], members
    )
    p = logits.softmax(-1)[:, :VOCAB]
    torch.testing.assert_close(rows.p, p)
    torch.testing.assert_close(rows.mass, p.sum(-1))
    assert torch.equal(rows.sayable, logits.argmax(-1) < VOCAB)
