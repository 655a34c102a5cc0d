"""One text that the target has computed, as every request that has come so far in it would see it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from paceline.execution.forward_batch import Segment
from paceline.execution.model_runner import ModelRunner
from paceline.execution.rows import taken
from paceline.execution.target_view import Span


class TextView:
    """Implements `execution.target_view.TargetView`: many requests, each of which knows the same text up to
    another place. They share its row and slots, which nobody writes to meanwhile."""

    def __init__(self, runner: ModelRunner, chunk_tokens: int) -> None:
        """chunk_tokens: most tokens of one pass."""
        self._runner = runner
        self._chunk_tokens = chunk_tokens
        self._computed: dict[str, int] = {}

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    @property
    def capture(self) -> tuple[int, ...]:
        return self._runner.decoder.capture

    def compute(self, tokens: Sequence[int]) -> None:
        """Passes over a new text, in the first row and the first slots."""
        self._computed.clear()
        self._runner.tables.write(0, 0, range(len(tokens)))
        for start in range(0, len(tokens), self._chunk_tokens):
            part = tokens[start : start + self._chunk_tokens]
            self._runner.forward([Segment(0, start, part, wanted=False)])

    def place(self, request_id: str, known: int) -> None:
        """The request knows the first `known` tokens of the text: the last of them is its root."""
        self._computed[request_id] = known - 1

    def computed(self, request_id: str) -> int:
        return self._computed.get(request_id, 0)

    def row(self, request_id: str) -> int:  # noqa: ARG002 - all are in one
        return 0

    def features(self, spans: Sequence[Span]) -> Tensor:
        kept = self._runner.kv.features
        for request_id, start, end in spans:
            if kept is None or not 0 <= start <= end <= self.computed(request_id):
                raise ValueError(
                    f"features of positions {start} to {end} of {request_id!r}: {self.computed(request_id)} "
                    f"are computed and {len(self.capture)} places captured"
                )
        assert kept is not None
        return taken(kept, np.concatenate([np.arange(start, end) for _, start, end in spans]))
