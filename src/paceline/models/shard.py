"""One rank's share of a decoder, for tensor parallelism inside one group (Megatron-LM, arXiv:1909.08053).

The rows of q, k, v, gate and up and the columns of o and down are split: a rank computes whole heads and MLP
columns, and what it adds to the residual stream is a part whose sum over the ranks is the branch. Embedding,
norms and head are whole on every rank (of the head, the native pass has each rank compute its own rows).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.models.spec import DecoderSpec, DecoderWeights, LayerWeights

_MLP_UNITS = (64, 16, 2, 1)
"""An MLP column belongs to a group of 64 that shares an int8 scale, to a panel of 16, to a pair in bfloat16:
a share of whole ones has the bits of the whole model's weights."""


@dataclass(frozen=True, slots=True)
class Share:
    """Half-open ranges of what one rank computes. Heads of the model are numbered key-value head by key-value
    head; `heads` are those that read `kv_heads`, the same number for each of them."""

    heads: range
    kv_heads: range
    mlp: range


def share_of(spec: DecoderSpec, rank: int, ranks: int) -> Share:
    """What rank `rank` of `ranks` computes.

    With as many key-value heads as ranks or more, each rank has whole ones, evenly but for one (3 over 2
    ranks: 1 and 2). With fewer, a key-value head is kept by several ranks, which split the heads that
    read it.

    Raises ModelError when some rank would have nothing to do.
    """
    heads, kv_heads, width = spec.num_heads, spec.num_kv_heads, spec.intermediate_size
    if ranks > min(heads, width):
        raise ModelError(
            f"a model with {heads} attention heads cannot be split over {ranks} ranks: give at most {heads}."
        )
    if heads % kv_heads:
        raise ModelError(
            f"{heads} heads cannot share {kv_heads} key-value heads evenly: run such a model on one rank."
        )
    group = heads // kv_heads
    if kv_heads >= ranks:
        kv = _part(kv_heads, rank, ranks)
        own = range(kv.start * group, kv.stop * group)
    else:
        kept = [other * kv_heads // ranks for other in range(ranks)]
        first = kept.index(kept[rank])
        part = _part(group, rank - first, kept.count(kept[rank]))
        kv = range(kept[rank], kept[rank] + 1)
        own = range(kept[rank] * group + part.start, kept[rank] * group + part.stop)
    unit = next(unit for unit in _MLP_UNITS if width // unit >= ranks)
    blocks = _part(width // unit, rank, ranks)
    end = width if rank == ranks - 1 else blocks.stop * unit
    return Share(own, kv, range(blocks.start * unit, end))


def _part(count: int, rank: int, ranks: int) -> range:
    return range(count * rank // ranks, count * (rank + 1) // ranks)


def shard(
    spec: DecoderSpec, weights: DecoderWeights, rank: int, ranks: int
) -> tuple[DecoderSpec, DecoderWeights]:
    """Spec and weights of rank `rank` of `ranks`; the tensors are views. Raises ModelError as `share_of`.

    The biases of o and down are rank 0's alone, so that the sum has them once.
    """
    share = share_of(spec, rank, ranks)
    own = replace(
        spec,
        num_heads=len(share.heads),
        num_kv_heads=len(share.kv_heads),
        intermediate_size=len(share.mlp),
    )
    layers = [_layer(layer, share, spec.head_dim, first=rank == 0) for layer in weights.layers]
    return own, replace(weights, layers=layers)


def _layer(layer: LayerWeights, share: Share, head_dim: int, *, first: bool) -> LayerWeights:
    q = slice(share.heads.start * head_dim, share.heads.stop * head_dim)
    kv = slice(share.kv_heads.start * head_dim, share.kv_heads.stop * head_dim)
    mlp = slice(share.mlp.start, share.mlp.stop)
    return replace(
        layer,
        q=layer.q[q],
        k=layer.k[kv],
        v=layer.v[kv],
        o=layer.o[:, q],
        gate=layer.gate[mlp],
        up=layer.up[mlp],
        down=layer.down[:, mlp],
        q_bias=_rows(layer.q_bias, q),
        k_bias=_rows(layer.k_bias, kv),
        v_bias=_rows(layer.v_bias, kv),
        gate_bias=_rows(layer.gate_bias, mlp),
        up_bias=_rows(layer.up_bias, mlp),
        o_bias=layer.o_bias if first else None,
        down_bias=layer.down_bias if first else None,
    )


def _rows(bias: Tensor | None, rows: slice) -> Tensor | None:
    return None if bias is None else bias[rows]
