"""Worlds in which the best way to decode is known in closed form.

A pass of the target takes `pass_s` and `token_s` for each token in it, the drafter `level_s` for each guess
of a chain, and of a chain always the first `right` guesses are right. So a step with k guesses takes
`pass_s + (1 + k) token_s + k level_s` and brings `1 + min(k, right)` tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.sim.acceptance import DrafterTrace, RequestTrace
from paceline.sim.costs.forms import LinearDraft, LinearPass
from paceline.sim.costs.model import CostModel
from paceline.sim.plan.candidates import Candidate, DrafterOption, Placed, Space, candidates
from paceline.sim.plan.machines import Measured
from paceline.sim.plan.search import Round
from paceline.sim.plan.world import Effort, Objective, Workload, World

ROUNDS = (
    Round(Effort(8, 2, 1.5, (100, 8)), 1, 4),
    Round(Effort(16, 3, 2.0, (200, 16)), 2, 3),
    Round(Effort(24, 4, 2.0, (300, 24)), 3, 3),
)
PROMPT = 8


@dataclass(frozen=True)
class Made:
    """level_s, right: by drafter."""

    pass_s: float
    level_s: Mapping[str, float]
    right: Mapping[str, int]
    token_s: float = 0.0
    output: int = 121
    lengths: tuple[int, ...] = (1, 2, 3, 5, 7, 9)

    def step_s(self, name: str, length: int, batch: int = 1) -> float:
        guessing = length * self.level_s[name] if length else 0.0
        return self.pass_s + batch * (1 + length) * self.token_s + guessing

    def rate(self, name: str, length: int, batch: int = 1) -> float:
        """Tokens per second of decoding, per request."""
        brings = 1 + min(length, self.right[name])
        return brings / self.step_s(name, length, batch)

    def best(self, batch: int = 1) -> tuple[str, int]:
        """Drafter and length; length 0 = plain."""
        ways = [(name, length) for name in self.level_s for length in (0, *self.lengths)]
        return max(ways, key=lambda way: self.rate(*way, batch))

    @property
    def costs(self) -> CostModel:
        return CostModel(
            LinearPass(fixed_s=self.pass_s, per_token_s=self.token_s),
            {name: LinearDraft(per_level_s=each) for name, each in self.level_s.items()},
        )

    def traces(self, requests: int = 12) -> tuple[RequestTrace, ...]:
        return tuple(self._trace(number) for number in range(requests))

    def _trace(self, number: int) -> RequestTrace:
        text = [1000 * number + at for at in range(PROMPT + self.output)]
        drafters = {
            name: DrafterTrace(tuple(1 + min(right, self.output - at) for at in range(self.output)))
            for name, right in self.right.items()
        }
        return RequestTrace(f"t{number}", tuple(text[:PROMPT]), tuple(text[PROMPT:]), drafters)

    def world(self, concurrency: int = 1, seed: int = 0, **workload: object) -> World:
        if not workload:
            workload = {"concurrency": concurrency}
        made = Workload(self.traces(), seed=seed, **workload)  # type: ignore[arg-type]
        return World(made, Measured(self.costs), Objective())

    @property
    def space(self) -> Space:
        return Space(lengths=self.lengths, chunks=(2048,), combined=False)

    @property
    def candidates(self) -> list[Candidate]:
        drafters = [DrafterOption(name, "head") for name in self.level_s]
        return candidates(self.space, drafters, [Placed()], [])


def chain(name: str, length: int) -> Candidate:
    return Candidate((name,), "serial-chain", length)


PLAIN = Candidate()
