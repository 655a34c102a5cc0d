"""All drafters' guesses in one tree: a drafter is asked when what it is expected to add pays for what it
takes, and a guess is verified when it pays for its place in the pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log

from paceline.core.draft_cost import Costs
from paceline.core.followers import Followers
from paceline.core.recent import Recent
from paceline.core.selection import Ask, Drafted, accepted_of, best_nodes
from paceline.core.survival import Survival

_FIRST_SIZE = 4
"""Guesses asked of a drafter of which nothing was measured."""
_WIDE = 8
"""Guesses per request over which the price of one more is averaged: what is measured is not smooth."""
_CHEAP = 0.02
"""A drafter that takes less than this share of a step is always asked, for as much as may be verified."""
_MARGIN = 1.05
"""By how much more than it costs a drafter has to bring that was not asked the last time."""
_PROBE_SHARE = 0.01
"""Of the time, to look whether a drafter that is not asked has become worth it. A look in vain halves it."""
_LEAST_WAIT = 16
_STEPS_BETWEEN = 4
_REST_MEMORY = 0.8
_SHORT_REST, _LONG_REST = 4, 16
"""Steps between two rests, at least, and of a rest; each in vain doubles the next."""
_MOST_VAIN = 2


@dataclass(slots=True)
class _Known:
    """Of one drafter. waited: steps in which it was there and not asked.  vain: looks at it in a row that did
    not pay.  worth: whether it was worth asking the last time.  cheap: so that it is not weighed.  look_s:
    what the look at it in this step takes, 0 = there is none.  brought_s: what guesses saved that no other
    drafter had, less what verifying them took.  again: whether the last look paid, so that the next comes at
    once."""

    survival: Survival = field(default_factory=Survival)
    waited: int = 0
    vain: int = 0
    worth: bool = True
    cheap: bool = False
    look_s: float = 0.0
    brought_s: float = 0.0
    again: bool = False

    def on_step(self) -> None:
        self.waited += 1
        if self.look_s:
            self.again = self.brought_s > self.look_s
            self.vain = 0 if self.again else self.vain + 1
            self.look_s = self.brought_s = 0.0


class Rest:
    """Drafters are left alone for some steps when guesses of late saved less than guessing took: what many
    requests' guesses take besides the drafters' own seconds would be lost otherwise."""

    def __init__(self) -> None:
        self._saved_s = self._spent_s = 0.0
        self._steps = 0
        self._left, self._length = 0, _SHORT_REST

    def on_step(self, saved_s: float, spent_s: float, plain_s: float) -> bool:
        """What verified guesses were expected to save in the last step, and what guessing took. Returns
        whether nobody is asked in the next."""
        if self._left:
            self._left -= 1
            return self._left > 0
        self._saved_s = _REST_MEMORY * self._saved_s + saved_s
        self._spent_s = _REST_MEMORY * self._spent_s + spent_s
        self._steps += 1
        if self._steps < _STEPS_BETWEEN:
            return False
        if self._saved_s >= self._spent_s or spent_s < _CHEAP * plain_s:
            self._length = _SHORT_REST
            return False
        self._left, self._length = self._length, min(2 * self._length, _LONG_REST)
        self._saved_s = self._spent_s = 0.0
        self._steps = 0
        return True


class Combined:
    """A step is to save most time: what its tokens are worth (`core.draft_cost.Pace`) less what it takes."""

    def __init__(self, followers: Followers, costs: Costs, recent: Recent) -> None:
        self._followers = followers
        self._costs = costs
        self._recent = recent
        self._known = [_Known() for _ in costs.drafts]
        self._queue: list[int] = []
        self._worth: dict[str, float] = {}  # of a token of each request, in seconds; empty = not known
        self._place_s = 0.0
        self._rest = Rest()
        self._saved_s = 0.0

    # ------------------------------------------------------------ what is asked

    def begin(self, step: Sequence[Drafted], drafters: Sequence[int]) -> None:
        target, requests, pace = self._costs.target, len(step), self._costs.pace
        self._worth, plain_s = {}, 0.0
        if target.known:
            plain_s, wide = target.of(requests), _WIDE * requests
            self._place_s = (target.of(requests + wide) - plain_s) / wide
            for each in step:
                name = each.request.request_id
                worth = self._worth[name] = pace.worth(name, requests, plain_s)
                if each.free and self._place_s > 0.0:
                    each.floor = log(0.5 * self._place_s / worth)
        rests = bool(self._worth) and self._rest.on_step(self._saved_s, pace.drafting_s, plain_s)
        self._saved_s = 0.0
        drafts = self._costs.drafts
        if rests and all(each.free for each in step):
            self._queue = []
            return
        self._queue = sorted(drafters, key=lambda drafter: drafts[drafter].of(1, 1, 1, 1))
        for drafter in drafters:
            self._known[drafter].on_step()

    def next_ask(self, step: Sequence[Drafted], drafters: Sequence[int]) -> Ask | None:
        while self._queue:
            drafter = self._queue.pop(0)
            if drafter not in drafters:
                continue
            able = [(each, most) for each in step if (most := self._most(drafter, each)) > 0]
            sizes = self._sizes(drafter, able) if able else None
            if sizes:
                known = self._known[drafter]
                known.waited = 0
                unread = 0 if known.cheap else sum(self._unread(drafter, each) for each, _ in sizes)
                return Ask(drafter, sizes, unread)
        return None

    def _most(self, drafter: int, each: Drafted) -> int:
        room = self._followers.room(drafter, each.request)
        return each.most if room is None else min(each.most, room)

    def _unread(self, drafter: int, each: Drafted) -> int:
        return each.num_tokens - self._followers.num_told(drafter, each.request)

    def _sizes(self, drafter: int, able: list[tuple[Drafted, int]]) -> list[tuple[Drafted, int]]:
        known, cost = self._known[drafter], self._costs.drafts[drafter]
        if not cost.known or not self._worth:
            return [(each, min(most, _FIRST_SIZE) if each.free else most) for each, most in able]
        requests = len(able)
        plain_s = self._costs.target.of(requests)
        known.cheap = cost.of(requests, 2, 2 * requests, 2 * requests) < _CHEAP * plain_s
        if known.cheap:
            return able
        sizes = self._worthwhile(drafter, able)
        if sizes:
            known.vain, known.worth = 0, True
            return sizes
        known.worth = False
        unread = sum(self._unread(drafter, each) for each, _ in able)
        look_s = cost.of(requests, _FIRST_SIZE, _FIRST_SIZE * requests, unread)
        wait = max(_LEAST_WAIT, look_s / (_PROBE_SHARE * plain_s)) * 2 ** min(known.vain, _MOST_VAIN)
        if known.waited < wait and not known.again:
            return []
        known.look_s = look_s
        known.survival.fade()
        return [(each, min(most, _FIRST_SIZE)) for each, most in able]

    def _worthwhile(self, drafter: int, able: list[tuple[Drafted, int]]) -> list[tuple[Drafted, int]]:
        """For whom the drafter is worth asking, and how far; empty when it is not. All in seconds."""
        cost, known = self._costs.drafts[drafter], self._known[drafter]
        wanted: list[tuple[Drafted, int]] = []
        levels: list[float] = []  # what all requests gain by depth
        spent = cost.fixed
        for each, most in able:
            if not each.free:
                wanted.append((each, most))
                continue
            own_s = cost.per_request + cost.per_token * self._unread(drafter, each)
            gains = self._gains(drafter, each, most)
            total, best, size = 0.0, own_s, 0
            for depth, gain in enumerate(gains, 1):
                total += gain
                if total > best:
                    best, size = total, depth
            if size:
                wanted.append((each, size))
                spent += own_s
                levels += [0.0] * (size - len(levels))
                for depth in range(size):
                    levels[depth] += gains[depth]
        total, best, deepest = 0.0, 0.0, 0
        for depth, gain in enumerate(levels, 1):
            total += gain - cost.per_level
            if total > best:
                best, deepest = total, depth
        if best <= (1.0 if known.worth else _MARGIN) * spent:
            deepest = 0
        sizes = [(each, min(size, deepest) if each.free else size) for each, size in wanted]
        return [(each, size) for each, size in sizes if size]

    def _gains(self, drafter: int, each: Drafted, most: int) -> list[float]:
        """By depth, seconds that one more guess of the drafter saves, what it takes itself included."""
        name = each.request.request_id
        worth, late = self._worth[name], self._recent.of(name)[drafter]
        least, guess_s = self._place_s / worth, self._costs.drafts[drafter].per_guess
        gains = self._known[drafter].survival.gains(each.merged.covered(), most, least, late)
        return [(gain - least) * worth - guess_s if gain > least else -guess_s for gain in gains]

    def on_answer(self, ask: Ask, seconds: float) -> None:
        ask.teach(self._costs.drafts[ask.drafter], seconds)
        self._costs.pace.on_answer(seconds)

    # ------------------------------------------------------------ what is verified

    def kept(self, step: Sequence[Drafted]) -> list[list[int]]:
        """The best nodes of the whole batch, as long as the next one pays."""
        best = [best_nodes(each) for each in step]
        if not self._worth:
            return best
        counts = [0 if each.free else len(nodes) for each, nodes in zip(step, best, strict=True)]
        ranked: list[tuple[float, int]] = []
        for place, (each, nodes) in enumerate(zip(step, best, strict=True)):
            if each.free:
                values, worth = each.merged.tree.values, self._worth[each.request.request_id]
                ranked += [(-worth * exp(values[node]), place) for node in nodes]
        ranked.sort()
        start = len(step) + sum(counts)
        costs = self._costs.target.between(start, start + len(ranked))
        saved, most, at_best = costs[0], 0.0, 0
        for count, (worth, _) in enumerate(ranked, 1):
            saved -= worth
            if saved - costs[count] > most:
                most, at_best = saved - costs[count], count
        self._saved_s = most
        for _, place in ranked[:at_best]:
            counts[place] += 1
        kept = [nodes[:count] for nodes, count in zip(best, counts, strict=True)]
        self._charge_looks(step, kept)
        return kept

    def _charge_looks(self, step: Sequence[Drafted], kept: list[list[int]]) -> None:
        """With the places in the pass of guesses that nobody else had."""
        for drafter, known in enumerate(self._known):
            if known.look_s:
                only = 1 << drafter
                places = sum(
                    each.merged.proposers[node] == only
                    for each, nodes in zip(step, kept, strict=True)
                    for node in nodes
                )
                known.brought_s -= places * self._place_s

    # ------------------------------------------------------------ what is learnt

    def on_commit(self, each: Drafted, tokens: Sequence[int]) -> None:
        earlier, late = 0, self._recent.of(each.request.request_id)
        for drafter, size in each.asked.items():
            known = self._known[drafter]
            if known.look_s:
                self._count_look(each, drafter, tokens)
            if not known.cheap:
                known.survival.learn(each.merged, drafter, earlier, tokens[:size], late[drafter])
            earlier |= 1 << drafter

    def _count_look(self, each: Drafted, drafter: int, tokens: Sequence[int]) -> None:
        others = max(accepted_of(each, other, tokens) if other != drafter else 0 for other in each.asked)
        more = accepted_of(each, drafter, tokens) - others
        self._known[drafter].brought_s += max(more, 0) * self._worth.get(each.request.request_id, 0.0)

    def on_end(self, request_id: str) -> None:
        """Nothing to forget."""

    def follows(self, drafter: int) -> bool:
        return self._known[drafter].vain < 2
