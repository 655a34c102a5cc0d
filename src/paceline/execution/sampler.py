"""From logits to the tokens the rule of `core.sampling` chooses, many rows at a time where it can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from paceline.core import sampling
from paceline.core.params import SamplingParams
from paceline.kernels import ops


@dataclass(frozen=True, slots=True)
class Row:
    """Whose logits a row holds, and how many tokens precede the one to be chosen."""

    params: SamplingParams
    position: int


class SampledRows:
    """Tokens chosen from one block of logits `[rows, vocab]`.

    Rows whose raw logits decide are settled at once by a kernel; the others one by one when asked for,
    with the prefix the caller gives, so that guesses which are never reached cost nothing.
    """

    def __init__(self, logits: Tensor, rows: Sequence[Row], eos_token_ids: Sequence[int]) -> None:
        self._logits = logits
        self._rows = rows
        self._eos = eos_token_ids
        if any(row.params.plain for row in rows):
            self._tokens, self._finite = ops.coupled_argmax(
                logits,
                [0.0 if row.params.greedy else row.params.temperature or 0.0 for row in rows],
                [row.params.seed or 0 for row in rows],
                [row.position for row in rows],
            )

    def token(self, index: int, prefix: Callable[[], Sequence[int]], num_prompt: int) -> int:
        """The token after `prefix()`, which is asked for only if the rule looks at it.

        Raises Unsampleable.
        """
        params = self._rows[index].params
        if params.plain:
            if not self._finite[index]:
                sampling.check_finite(self.raw(index))
            return int(self._tokens[index])
        return sampling.choose(self.raw(index), params, prefix(), num_prompt, self._eos)

    def raw(self, index: int) -> sampling.Logits:
        row: sampling.Logits = self._logits[index].float().cpu().numpy()
        return row
