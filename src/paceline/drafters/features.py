"""Where a head finds the target's hidden states."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class FeatureSource(Protocol):
    """`execution.target_view.TargetView` in the target's process, what was received of it elsewhere."""

    def computed(self, request_id: str) -> int:
        """Of how many tokens of the request, from the first one on, features can be read now."""
        ...

    def features(self, request_id: str, start: int, end: int) -> Tensor:
        """`[end - start, num_captured, hidden]` of positions below `computed`, a copy."""
        ...
