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


class FeatureColumns:
    """Some places in the residual stream, of a source that holds more."""

    def __init__(self, source: FeatureSource, columns: list[int]) -> None:
        self._source = source
        self._columns = columns

    def computed(self, request_id: str) -> int:
        return self._source.computed(request_id)

    def features(self, request_id: str, start: int, end: int) -> Tensor:
        return self._source.features(request_id, start, end)[:, self._columns]
