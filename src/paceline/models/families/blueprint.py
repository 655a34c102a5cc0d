"""A decoder and the facts needed to fill it from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.models.spec import DecoderSpec


@dataclass(frozen=True)
class Blueprint:
    """spec: the decoder. biased: the projections (`q`, `down`, ...) that have a bias.
    tied: the output matrix is the embedding. norm_offset: what the family adds to its stored norm weights.
    """

    spec: DecoderSpec
    biased: tuple[str, ...] = ()
    tied: bool = False
    norm_offset: float = 0.0
