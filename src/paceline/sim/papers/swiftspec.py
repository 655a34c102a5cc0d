"""SwiftSpec (arXiv 2506.11309, ASPLOS 2026) by simulation, and what our protocol changes of it.

Constants are the paper's: seconds of a pass of each model (tables 1 and 7, section 4.5), seven guesses, eight
leaves to a draft pass. Nothing else takes time. Acceptance is the paper's too, of the serial tree; that of
every other row follows. Table 7 leaves open whether it counts the bonus token: here 3.63 are guesses, since
3.63 tokens per round at 200 tokens per second would be rounds of 18.2 ms, which a pass of 10.34 ms and two
levels of a tree at 3.73 ms fill already, and two levels bring no more than three tokens.

Four draft passes to a round: so many are begun before a verdict is there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log

from paceline.config import load_config
from paceline.sim.acceptance import DrafterTrace, RequestTrace
from paceline.sim.costs.model import CostModel
from paceline.sim.costs.published import published
from paceline.sim.run.requests import arriving
from paceline.sim.run.setup import composed
from paceline.sim.run.simulator import SimResult, simulate
from paceline.workload import AtOnce

DRAFTER = "draft"
ACCEPTED = 3.63
"""Guesses per round of the serial tree, the mean of table 7."""
PASSES = 4
_GUESSES = 7
_CANDIDATES = 8
_ELSEWHERE = 2**29
"""From here on ids are wrong guesses."""
_ANY = 64
"""What a miss leaves unread is read with the root, in one pass (section 3.2)."""


@dataclass(frozen=True, slots=True)
class Pair:
    """published: tokens per second; None = it is ours."""

    name: str
    mode: str
    costs: CostModel
    published: float | None = None


_QWEN2, _LLAMA3 = published("qwen2-72b@h800-6+2"), published("llama3-70b@h800-4+4")
PAIRS = (
    Pair("Qwen2-72B serial", "serial-tree", published("qwen2-72b@h800-8"), 200.0),
    Pair("Qwen2-72B parallel", "swiftspec", _QWEN2, 274.0),
    Pair("Llama-3-70B parallel", "swiftspec", _LLAMA3, 347.0),
    Pair("Qwen2-72B, ours", "overlapped", _QWEN2),
    Pair("Llama-3-70B, ours", "overlapped", _LLAMA3),
)


@dataclass(frozen=True, slots=True)
class Followed:
    """How well a drafter follows a text. ease: mean log-odds that its first choice is the target's token.
    spread: of that, from place to place.  persistence: correlation of neighbouring places.  tail: of the
    tokens that are not the first choice, by what factor each further candidate is less likely."""

    ease: float = 3.47
    spread: float = 0.2
    persistence: float = 0.6
    tail: float = 0.5


def texts(requests: int, tokens: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompts and outputs in which nothing is found again."""
    return [((1, 2, 3, 4), tuple(range(16, 16 + tokens))) for _ in range(requests)]


def records(
    of: Sequence[tuple[Sequence[int], Sequence[int]]], seed: int, followed: Followed | None = None
) -> Iterator[RequestTrace]:
    """A calibrated drafter's record along each text: whether a candidate is right is drawn from the very
    distribution that it gives."""
    how = followed or Followed()
    for number, (prompt, output) in enumerate(of):
        chance = random.Random(f"{seed} {number}")
        state = chance.gauss(0.0, 1.0)
        tops, right = [], []
        for at, token in enumerate(output):
            drift = how.persistence
            state = drift * state + (1 - drift * drift) ** 0.5 * chance.gauss(0.0, 1.0)
            shares = _shares(how, state)
            rank = chance.choices(range(_CANDIDATES + 1), [*shares, max(0.0, 1 - sum(shares))])[0]
            wrong = _ELSEWHERE + 16 * at
            ids = [token if other == rank else wrong + other for other in range(_CANDIDATES)]
            tops.append(tuple(zip(ids, (log(max(share, 1e-9)) for share in shares), strict=True)))
            right.append(rank == 0)
        trace = DrafterTrace(_accepted(right), None, tuple(tops))
        yield RequestTrace(f"s{number}", tuple(prompt), tuple(output), {DRAFTER: trace})


def _shares(how: Followed, state: float) -> list[float]:
    """Of each candidate, the best first."""
    first = 1.0 / (1.0 + exp(-(how.ease + how.spread * state)))
    rest = (1 - first) * (1 - how.tail)
    return [first, *(rest * how.tail**rank for rank in range(_CANDIDATES - 1))]


def _accepted(right: Sequence[bool]) -> tuple[int, ...]:
    run, accepted = 0, []
    for good in reversed(right):
        run = run + 1 if good else 0
        accepted.append(run + 1)
    return tuple(reversed(accepted))


def run(pair: Pair, along: Sequence[RequestTrace]) -> SimResult:
    """One request after the other."""
    options: dict[str, object] = {"mode": pair.mode, "draft": DRAFTER}
    if pair.mode != "overlapped":  # ours chooses for itself
        options |= {"num_speculative_tokens": _GUESSES, "tree_passes": PASSES}
    setup = composed(load_config(None, (), options), pair.costs, trees=True, with_root=_ANY)
    requests = arriving(along, AtOnce())
    return simulate(setup.core, requests, pair.costs, setup.drafters, lanes=setup.lanes, concurrency=1)


def decode_rate(result: SimResult) -> float:
    """Tokens per second after the first one of each request."""
    tokens = sum((each.tokens or 1) - 1 for each in result.finished)
    return tokens / sum(each.decode_s or 0.0 for each in result.finished)
