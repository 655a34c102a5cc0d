"""What a head has computed of a sequence beside what it keeps, and one pass over several."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from paceline.core.token_tree import ROOT
from paceline.drafters.features import FeatureSource
from paceline.drafters.tree_drafter import DraftSequence
from paceline.execution.forward_batch import Segment
from paceline.execution.rows import joined
from paceline.execution.target_view import Span
from paceline.models.head import HeadDecoder


@dataclass(slots=True)
class Unbacked:
    """What a sequence has computed from the head's own output, for want of the target's features.

    spine: slots of the committed positions that follow those held.  tip: output `[hidden]` at the last
    committed position that is computed, None = it was not wanted then.  hidden: output at each node.
    far: how many of the head's own outputs the tip (as ROOT) and each node are made from, one by one.
    """

    spine: list[int] = field(default_factory=list)
    tip: Tensor | None = None
    hidden: dict[int, Tensor] = field(default_factory=dict)
    far: dict[int, int] = field(default_factory=lambda: {ROOT: 0})


@dataclass(slots=True)
class HeadPass:
    """inputs: what the head reads beside the tokens, by segment: features of the target at a span, or its own
    output `[n, hidden]`.  wanted: whose rows come out."""

    room: int
    segments: list[Segment] = field(default_factory=list)
    inputs: list[Span | Tensor] = field(default_factory=list)
    wanted: list[tuple[DraftSequence, int]] = field(default_factory=list)

    def add(self, segment: Segment, inputs: Span | Tensor) -> None:
        self.segments.append(segment)
        self.inputs.append(inputs)
        self.room -= len(segment.tokens) + len(segment.tree_tokens)

    def hidden(self, source: FeatureSource, decoder: HeadDecoder) -> Tensor:
        """`[tokens, hidden]` of all segments, good until the decoder is called again. All is fused
        in one call."""
        spans = [each for each in self.inputs if isinstance(each, tuple)]
        if not spans:
            return joined([each for each in self.inputs if isinstance(each, Tensor)])
        fused = decoder.fuse(source.features(spans))
        if len(spans) == len(self.inputs):
            return fused
        parts, at = [], 0
        for each in self.inputs:
            if isinstance(each, Tensor):
                parts.append(each)
            else:
                _, start, end = each
                parts.append(fused[at : at + end - start])
                at += end - start
        return joined(parts)
