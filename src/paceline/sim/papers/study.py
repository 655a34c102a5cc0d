"""The simulator published with "Speculative Decoding: Performance or Illusion?" (arXiv 2601.11580), with what
is known to be wrong in it, so that its figures can be told from what a better model says.

A batch is one request many times; 300 requests are drawn with seed 42; a speed-up is the ratio of the means,
over requests, of tokens per second, prompt included. Kept as published:

* acceptance is read one place too early (`accepted[generated - 1]`), which costs a step per request;
* whether an n-gram was found where nothing is accepted is a coin's toss, per request of the batch and step;
* an EAGLE question costs nearly the same for any length, and is charged for one request's guesses;
* clones that were served earlier in a step have grown (or left) the context that the next one's head reads;
* the oracle that takes the better of both drafters pays for n-gram lookup alone. `Charge` is the switch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from paceline.sim.acceptance import RequestTrace
from paceline.sim.costs.forms import ShareDraft
from paceline.sim.costs.published import published
from paceline.sim.guesses import NGRAM, head_of, ngram_guesses

Charge = Literal["published", "winner", "always"]
"""What the oracle over both drafters pays for drafting: lookup alone; the head where it wins, else lookup;
both at every step."""

COMBINED = "combined"
BATCHES = (1, 8, 16, 32, 64, 128)
SEED = 42
SAMPLED = 300

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_FOUND = {"sharegpt": 0.2, "cnn": 0.4, "gsm8k": 0.2, "instructcoder": 0.8}
"""The published chance that an n-gram is found where nothing is accepted."""


@dataclass(frozen=True, slots=True)
class Setting:
    """drafter: "ngram", the name of a head, or `COMBINED`. guesses: per step; None = as many as will be
    accepted."""

    drafter: str
    guesses: int | None

    @property
    def length(self) -> str:
        return "oracle" if self.guesses is None else f"k={self.guesses}"


@dataclass(frozen=True, slots=True)
class _Walk:
    """One request's steps. at: tokens generated before; length: most that a step verifies, its root
    included; right: what it emits; head_wins: the head's record is the longer one."""

    prompt: int
    total: int
    at: Ints
    length: Ints
    right: Ints
    head_wins: NDArray[np.bool_]


def speedups(
    traces: Sequence[RequestTrace],
    setting: Setting,
    found: float,
    batches: Sequence[int] = BATCHES,
    charge: Charge = "published",
) -> list[float]:
    """By batch size. found: chance that an n-gram is found where nothing is accepted.

    traces: those that have all records that the setting needs (`usable`).
    """
    rng = random.Random(SEED)
    chosen = rng.sample(list(traces), min(SAMPLED, len(traces)))
    walks = [_walk(request, setting) for request in chosen]
    state = rng.getstate()[1]
    return [_speedup(walks, setting, found, batch, charge, state) for batch in batches]


def usable(traces: Sequence[RequestTrace], setting: Setting) -> list[RequestTrace]:
    return [request for request in traces if _total(request, setting)]


def chance_found(dataset: str | None, traces: Sequence[RequestTrace]) -> float:
    """That an n-gram is found where none of it is accepted: as published, for a data set that was; else
    counted in the texts, every place once."""
    if dataset is not None:
        return _FOUND[dataset]
    places = found = 0
    for request in traces:
        guesses = ngram_guesses(request)
        places += guesses.right.count(0)
        found += sum(
            offered > 0 for offered, right in zip(guesses.offered, guesses.right, strict=True) if not right
        )
    return found / places if places else 0.0


# ---------------------------------------------------------------- steps


def _records(request: RequestTrace, setting: Setting) -> list[tuple[int, ...]]:
    """Accepted lengths of the drafters that take part: n-gram, then the head."""
    names = (NGRAM, head_of(request)) if setting.drafter == COMBINED else (setting.drafter,)
    found = []
    for name in names:
        if name is not None and name in request.drafters:
            found.append(request.drafters[name].accepted)
        elif name == NGRAM:
            found.append(tuple(right + 1 for right in ngram_guesses(request).right))
        else:
            return []
    return found


def _total(request: RequestTrace, setting: Setting) -> int:
    """Tokens of the answer; 0 where a record is missing."""
    needed = head_of(request) if setting.drafter == COMBINED else setting.drafter
    if needed != NGRAM and needed not in request.drafters:
        return 0
    if setting.drafter == NGRAM:
        return len(request.output)
    total = len(request.drafters[cast(str, needed)].accepted)
    return min(total, len(request.output)) if setting.drafter == COMBINED else total


def _walk(request: RequestTrace, setting: Setting) -> _Walk:
    total, records = _total(request, setting), _records(request, setting)
    at, rows = 1, []
    while at < total:
        lengths = [record[at - 1] for record in records]
        right = max(lengths)
        length = right if setting.guesses is None else setting.guesses + 1
        rows.append((at, length, right, lengths[-1] > lengths[0]))
        at += min(right, length)
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    return _Walk(len(request.prompt), total, columns[0], columns[1], columns[2], columns[3].astype(bool))


# ---------------------------------------------------------------- seconds


_COSTS = published("llama3.1-8b@h100")
_TARGET: Any = _COSTS.target
_HEAD: Any = _COSTS.draft("eagle")
_LOOKUP = cast(ShareDraft, _COSTS.draft(NGRAM)).share
_OVERHEAD = _COSTS.step_overhead_s
"""Linear forms, which take arrays as well as numbers."""


def _speedup(
    walks: Sequence[_Walk], setting: Setting, found: float, batch: int, charge: Charge, state: tuple[int, ...]
) -> float:
    tosses = np.random.RandomState()
    # Python's generator and this one are the same, once they are in the same state.
    tosses.set_state(("MT19937", np.array(state[:-1], dtype=np.uint32), state[-1], 0, 0.0))
    rates = []
    for walk in walks:
        prefill = _TARGET.seconds(batch * walk.prompt, 0, batch) + _OVERHEAD
        context = batch * (walk.prompt + np.arange(1, walk.total))
        plain = prefill + np.sum(_TARGET.seconds(batch, context, batch) + _OVERHEAD)
        asked = _matched(walk, setting, found, batch, tosses)
        speculative = prefill + np.sum(_steps(walk, setting, asked, batch, charge))
        rates.append((batch * walk.total / plain, batch * walk.total / speculative))
    plain_rate, rate = np.mean(rates, axis=0)
    return float(rate / plain_rate)


def _matched(walk: _Walk, setting: Setting, found: float, batch: int, tosses: np.random.RandomState) -> Ints:
    """Of how many requests of the batch guesses are verified, per step."""
    asked = np.full(len(walk.at), batch)
    if setting.drafter == NGRAM:
        nothing = walk.right == 1
        if setting.guesses is None:
            asked[nothing] = 0
        else:
            drawn = tosses.random_sample((int(nothing.sum()), batch))
            asked[nothing] = (drawn < found).sum(axis=1)
    return asked


def _steps(walk: _Walk, setting: Setting, asked: Ints, batch: int, charge: Charge) -> Floats:
    """Seconds of each step, the mean over the batch."""
    context = batch * (walk.prompt + walk.at)
    verify: Floats = _TARGET.seconds(batch + asked * (walk.length - 1), context, batch)
    lookup: Floats = verify * _LOOKUP * (asked / batch)
    if setting.drafter == NGRAM:
        return verify + lookup + _OVERHEAD
    head: Floats = _HEAD.seconds(1, 0, walk.length, 0, context + (batch - 1) / 2 * _growth(walk))
    if setting.drafter != COMBINED:
        draft: Floats = head
    elif charge == "published":
        draft = lookup
    elif charge == "winner":
        draft = np.where(walk.head_wins, head, lookup)
    else:
        draft = head + lookup
    return verify + draft + _OVERHEAD


def _growth(walk: _Walk) -> Ints:
    """By how much each clone changes the context that the next one in the same step sees: it has grown by
    what was emitted; in the last step the clone has left."""
    growth = np.minimum(walk.right, walk.length)
    if len(growth):
        growth[-1] = -(walk.prompt + walk.at[-1])
    return growth
