"""Requests to simulate: recorded answers, as they are or at the lengths of another trace."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from paceline.core.params import SamplingParams
from paceline.errors import ConfigError
from paceline.sim.acceptance import DrafterTrace, RequestTrace
from paceline.workload import Arrivals, Lengths

VOCAB_SIZE = 2**31 - 1
"""Of simulated requests, whatever the model's: ids beyond it stand for what a text has nowhere else."""
_OWN = 2**30
"""From here on ids are given once."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """arrival_s: when it is due.  output: what the target writes.  trace: what drafters would have had
    accepted along it, position by position as in `output`; None = nothing is recorded.

    params: what was asked for; None = as many tokens as the output has.  after: what the target would say
    next, where it is known: guesses may be right beyond an answer's end."""

    request_id: str
    arrival_s: float
    prompt: Sequence[int]
    output: Sequence[int]
    trace: RequestTrace | None = None
    params: SamplingParams | None = None
    after: Sequence[int] = ()


def usable(traces: Iterable[RequestTrace], drafters: Iterable[str] = ()) -> list[RequestTrace]:
    """Those with an output on which each of the drafters was recorded, position by position.

    Raises ConfigError where none is left.
    """
    names, given = list(drafters), list(traces)
    kept = [each for each in given if each.output and all(each.aligned(name) for name in names)]
    if not kept:
        known = sorted({name for each in given for name in each.drafters})
        if not any(each.output for each in given):
            raise ConfigError("no request of the traces has an output: record the traces anew.")
        raise ConfigError(
            f"no request of the traces was recorded with {', '.join(names)}: they hold "
            f"{', '.join(known) or 'no drafter'}; name one of these, or record the traces anew."
        )
    return kept


def sampled(traces: Sequence[RequestTrace], most: int, seed: int = 0) -> list[RequestTrace]:
    """So many of them, each at most once while they last; then anew, in another order."""
    if not traces or most < 1:
        raise ConfigError("the workload is empty: give at least one request to simulate.")
    chance, chosen = random.Random(seed), list[RequestTrace]()
    while len(chosen) < most:
        chosen += chance.sample(traces, min(len(traces), most - len(chosen)))
    return chosen


def arriving(traces: Iterable[RequestTrace], arrivals: Arrivals) -> Iterator[SimRequest]:
    """Request after request as it comes. One that came before comes as another: its first token is its own,
    so that no prefix of the two is shared."""
    seen: set[int] = set()
    for number, (trace, moment) in enumerate(zip(traces, arrivals.times(), strict=False)):
        prompt = trace.prompt
        if id(trace) in seen:
            prompt = (_OWN + number, *prompt[1:])
        seen.add(id(trace))
        yield SimRequest(f"r{number}", moment, prompt, trace.output, trace)


def with_lengths(
    rows: Iterable[Lengths], traces: Sequence[RequestTrace], seed: int = 0, most_context: int = 0
) -> Iterator[SimRequest]:
    """A request for each row, as long as it says: a recorded answer drawn at random, cut or continued to its
    lengths (bootstrap). most_context: prompt and output together, 0 = any; longer prompts lose their start.

    What continues a text is the same text in ids of its own, so that nothing is found in it that the recorded
    one does not hold; its drafters fare as they did.
    """
    if not traces:
        raise ConfigError("the workload is empty: give traces with at least one request.")
    stride = 1 << max(max(max(each.prompt), max(each.output, default=0)) for each in traces).bit_length()
    chance = random.Random(seed)
    for number, row in enumerate(rows):
        trace = traces[chance.randrange(len(traces))]
        output = min(row.output, most_context - 1) if most_context else row.output
        prompt = min(row.prompt, most_context - output) if most_context else row.prompt
        yield _fitted(number, row.at_s, trace, (prompt, output), stride)


def _fitted(
    number: int, moment: float, trace: RequestTrace, lengths: tuple[int, int], stride: int
) -> SimRequest:
    prompt = _tiled(trace.prompt, lengths[0], stride, last=True)
    output = _tiled(trace.output, lengths[1], stride)
    drafters = {
        name: _continued(drafter, lengths[1], stride)
        for name, drafter in trace.drafters.items()
        if trace.aligned(name)
    }
    # The first token is the request's own: texts that are drawn twice share no prefix.
    whole = RequestTrace(f"r{number}", (_OWN + number, *prompt[1:]), output, drafters)
    return SimRequest(whole.request_id, moment, whole.prompt, output, whole)


def _tiled(tokens: Sequence[int], length: int, stride: int, *, last: bool = False) -> tuple[int, ...]:
    """The text again and again, each time in ids of its own. last: the text itself is what comes last."""
    size = len(tokens)
    if length <= size:
        return tuple(tokens[size - length :] if last else tokens[:length])
    tiles = -(-length // size)
    room = max(1, _OWN // stride)
    shifts = [stride * (tile % room) for tile in range(tiles)]
    found = [token + shift for shift in (reversed(shifts) if last else shifts) for token in tokens]
    return tuple(found[len(found) - length :] if last else found[:length])


def _continued(drafter: DrafterTrace, length: int, stride: int) -> DrafterTrace:
    size, room = len(drafter.accepted), max(1, _OWN // stride)
    places = [at % size for at in range(length)]
    ends = [min(size * (at // size + 1), length) for at in range(length)]
    accepted = tuple(
        min(drafter.accepted[place], end - at)
        for at, (place, end) in enumerate(zip(places, ends, strict=True))
    )
    confidence, top = drafter.confidence, None
    if drafter.top is not None:
        top = tuple(
            tuple((token + stride * (at // size % room), score) for token, score in drafter.top[place])
            for at, place in enumerate(places)
        )
    return DrafterTrace(
        accepted, tuple(confidence[place] for place in places) if confidence is not None else None, top
    )
