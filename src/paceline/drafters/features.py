"""Where a head finds the target's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from paceline.drafters.base import Drafter
from paceline.execution.rows import joined, taken
from paceline.execution.target_view import Span


class FeatureSource(Protocol):
    """`execution.target_view.TargetView` in the target's process, what was received of it elsewhere."""

    def computed(self, request_id: str) -> int:
        """Of how many tokens of the request, from the first one on, features can be read now."""
        ...

    def features(self, spans: Sequence[Span]) -> Tensor:
        """`[positions, num_captured, hidden]` of all spans, one after the other: positions below `computed`.
        To be read, and no longer than until the next that come."""
        ...


@runtime_checkable
class FeatureDrafter(Drafter, Protocol):
    """A drafter that reads hidden states of a target in another process."""

    def take_features(self, request_id: str, generation: int, start: int, features: Tensor) -> None:
        """`[n, num_captured, hidden]` of the positions from `start` on, for the announcement `generation`,
        which may come after them. Raises ValueError for what does not follow on what came before."""
        ...


class FeatureColumns:
    """Some places in the residual stream, of a source that holds more."""

    def __init__(self, source: FeatureSource, columns: list[int]) -> None:
        self._source = source
        self._columns = columns

    def computed(self, request_id: str) -> int:
        return self._source.computed(request_id)

    def features(self, spans: Sequence[Span]) -> Tensor:
        return taken(self._source.features(spans), (slice(None), self._columns))


class ReceivedFeatures:
    """What came of the target's process so far, of each request that was announced: kept as long as the
    request, since a drafter that loses its KV to another request reads it again."""

    def __init__(self) -> None:
        self._of: dict[str, _Received] = {}

    def take(self, request_id: str, generation: int, start: int, features: Tensor) -> None:
        """features: of positions from `start` on. generation: of the announcement; a new one begins anew, and
        so does position 0, which another engine with the same ids may send.

        Raises ValueError where they do not follow those of before.
        """
        known = self._of.get(request_id)
        if known is None or known.generation != generation or start == 0:
            known = self._of[request_id] = _Received(generation, features[:0])
        if start != known.length:
            raise ValueError(f"features start at {start}, expected {known.length}")
        known.append(features)

    def forget(self, request_id: str, generation: int) -> None:
        known = self._of.get(request_id)
        if known is not None and known.generation == generation:
            del self._of[request_id]

    def computed(self, request_id: str) -> int:
        known = self._of.get(request_id)
        return known.length if known is not None else 0

    def features(self, spans: Sequence[Span]) -> Tensor:
        return joined([self._of[request_id].buffer[start:end] for request_id, start, end in spans])


class _Received:
    """buffer: with room for more than the first `length` positions."""

    def __init__(self, generation: int, buffer: Tensor) -> None:
        self.generation, self.buffer, self.length = generation, buffer, 0

    def append(self, features: Tensor) -> None:
        end = self.length + len(features)
        if end > len(self.buffer):
            grown = features.new_empty((max(end, 2 * len(self.buffer)), *features.shape[1:]))
            grown[: self.length] = self.buffer[: self.length]
            self.buffer = grown
        self.buffer[self.length : end] = features
        self.length = end
