"""Drafters that are better or worse than recorded: the same texts, and of every guess the chance changed.

A factor below 1 takes right guesses away, each with the probability that is missing. A factor above 1 turns
so many of the guesses at which chains end into right ones that of all guesses, given that those before were
right, the share of right ones grows by the factor, at most to all. Which ones is a function of their place,
so that a chain that is right at one factor is right at every larger one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from paceline.core.token_tree import ROOT
from paceline.core.work import DraftItem, FinishedOutput, Proposal
from paceline.sim.acceptance import DrafterTrace, RequestTrace
from paceline.sim.run.drafters import Priced, PricedRecord, RecordedTree, SimDrafter
from paceline.sim.run.requests import SimRequest

_WRONG = 2**31 - 3


def altered_traces(traces: Iterable[RequestTrace], factor: float) -> tuple[RequestTrace, ...]:
    given = tuple(traces)
    names = dict.fromkeys(name for each in given for name in each.drafters)
    turned = {name: _turned(given, name, factor) for name in names}
    return tuple(
        replace(
            each,
            drafters={
                name: _altered(number, drafter, factor, turned[name])
                for name, drafter in each.drafters.items()
            },
        )
        for number, each in enumerate(given)
    )


def conditional_acceptance(traces: Iterable[RequestTrace], name: str) -> float:
    """Of all guesses whose predecessors were right, the share of right ones."""
    right = wrong = 0
    for trace in traces:
        drafter = trace.drafters.get(name)
        if drafter is not None:
            right += sum(drafter.accepted) - len(drafter.accepted)
            wrong += len(drafter.accepted)
    return right / (right + wrong) if right + wrong else 0.0


def _turned(traces: Sequence[RequestTrace], name: str, factor: float) -> float:
    """Of the guesses that are wrong, how many must turn right."""
    share = conditional_acceptance(traces, name)
    return min(1.0, max(0.0, share * (factor - 1.0) / (1.0 - share))) if share < 1.0 else 0.0


def _altered(number: int, drafter: DrafterTrace, factor: float, turned: float) -> DrafterTrace:
    accepted = drafter.accepted
    if factor < 1.0:
        lost = [_chance(number, at) >= factor for at in range(len(accepted) + max(accepted, default=0) + 1)]
        upto = _next_true(lost)
        found = [min(length, upto[at] - at + 1) for at, length in enumerate(accepted)]
    else:
        found = list(accepted)
        for at in range(len(accepted) - 1, -1, -1):
            wrong = at + accepted[at] - 1
            if wrong < len(accepted) and _chance(number, wrong) < turned:
                # What follows a guess that turned right is what was recorded behind it.
                beyond = found[wrong + 1] if wrong + 1 < len(found) else 1
                found[at] = accepted[at] + beyond
    return replace(drafter, accepted=tuple(found))


def _next_true(flags: Sequence[bool]) -> list[int]:
    """Of each place, the first one from there on that is true; past the end where there is none."""
    found, following = [0] * len(flags), len(flags)
    for at in range(len(flags) - 1, -1, -1):
        following = at if flags[at] else following
        found[at] = following
    return found


def _chance(number: int, at: int) -> float:
    """From 0 to 1, a function of the place."""
    mixed = (number * 0x9E3779B97F4A7C15 + (at + 1) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0x94D049BB133111EB) & (2**64 - 1)
    return ((mixed ^ (mixed >> 31)) >> 11) / 2**53


# ---------------------------------------------------------------- drafters that guess for real


def altered_drafter(drafter: SimDrafter, factor: float) -> SimDrafter:
    """Recorded ones are altered by their traces."""
    if isinstance(drafter, PricedRecord | RecordedTree) or not isinstance(drafter, Priced):
        return drafter
    return Altered(drafter, factor)


class Altered:
    """What another drafter guesses, with guesses made wrong or right."""

    def __init__(self, drafter: Priced, factor: float) -> None:
        self.needs = drafter.needs
        self.meter = drafter.meter
        self._drafter = drafter
        self._factor = factor
        self._known: dict[str, tuple[int, int, Sequence[int]]] = {}
        self._guessed = self._right = 0

    def arrives(self, request: SimRequest) -> None:
        number = sum(map(ord, request.request_id)) * 1_000_003 + len(request.output)
        self._known[request.request_id] = (number, len(request.prompt), request.output)
        self._drafter.arrives(request)

    def leaves(self, request_id: str) -> None:
        self._known.pop(request_id, None)
        self._drafter.leaves(request_id)

    def grow(self, items: Sequence[DraftItem]) -> list[Proposal]:
        return [self._of(proposal) for proposal in self._drafter.grow(items)]

    def _of(self, proposal: Proposal) -> Proposal:
        number, num_prompt, output = self._known[proposal.request_id]
        tokens, depths, right = list(proposal.tokens), list[int](), list[bool]()
        for node, parent in enumerate(proposal.parents):
            depth = depths[parent] + 1 if parent != ROOT else 0
            at = proposal.num_tokens + depth - num_prompt
            depths.append(depth)
            follows = parent == ROOT or right[parent]
            true = output[at] if 0 <= at < len(output) else None
            right.append(follows and true is not None and self._holds(number, at, tokens[node] == true))
            if follows and true is not None:
                if right[node] and true not in _siblings(tokens, proposal.parents, node):
                    tokens[node] = true
                elif not right[node] and tokens[node] == true:
                    tokens[node] = _WRONG
        return replace_tokens(proposal, tokens)

    def _holds(self, number: int, at: int, right: bool) -> bool:
        self._guessed += 1
        self._right += right
        if self._factor < 1.0:
            return right and _chance(number, at) < self._factor
        share = self._right / self._guessed
        turned = share * (self._factor - 1.0) / (1.0 - share) if share < 1.0 else 0.0
        return right or _chance(number, at) < turned

    def advance(self, items: Sequence[DraftItem]) -> None:
        self._drafter.advance(items)

    def release(self, request_ids: Iterable[str]) -> None:
        self._drafter.release(request_ids)

    def learn(self, outputs: Sequence[FinishedOutput]) -> None:
        self._drafter.learn(outputs)


def _siblings(tokens: Sequence[int], parents: Sequence[int], node: int) -> set[int]:
    return {
        token
        for other, (token, parent) in enumerate(zip(tokens, parents, strict=True))
        if parent == parents[node] and other != node
    }


def replace_tokens(proposal: Proposal, tokens: Sequence[int]) -> Proposal:
    return Proposal(
        proposal.request_id, proposal.num_tokens, tuple(tokens), proposal.parents, proposal.scores
    )
