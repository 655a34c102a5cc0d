"""Guesses of several drafters in one tree, and how likely the target takes each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import exp

from paceline.core.acceptance import Logistic, Reliability, log_odds, log_sigmoid, sigmoid
from paceline.core.recent import LateSlopes, Recent
from paceline.core.token_tree import ROOT, TokenTree

Guesses = tuple[Sequence[int], Sequence[int], Sequence[float]]
"""Tokens, parents, scores."""
_LATE = 0.5
"""What is assumed at first of the worth of `core.recent`."""
_CUT = -2
"""Where a guess is that was not worth a node."""
_JUDGED_RANKS = 4
_LESSONS_PER_STEP = 16
"""Requests of one step that are judged: more of them add time, and little knowledge."""


@dataclass(slots=True)
class Merged:
    """tree: its scores are estimates of acceptance.  Of each node, proposers: one bit per drafter.  signal:
    the sum of what the proposers' own models make of it, in log-odds.  rank: among the siblings by the first
    of them.  said: of each drafter and its nodes, what it says itself and what its model makes of that."""

    tree: TokenTree = field(default_factory=TokenTree)
    proposers: list[int] = field(default_factory=list)
    signal: list[float] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    said: dict[int, dict[int, tuple[float, float]]] = field(default_factory=dict)

    def covered(self) -> list[float]:
        """By depth, how likely the committed token there is among the guesses."""
        sums: list[float] = []
        for depth, value in zip(self.tree.depths, self.tree.values, strict=True):
            if depth > len(sums):
                sums.append(0.0)
            sums[depth - 1] += exp(value)
        return sums


class Ensemble:
    """A model for every set of proposers, and of others who proposed something else at the same place:
    whether drafters agree says more than what each of them says.

    A node is judged once its parent is on the committed path and the token after that is committed, whether
    it was verified or not: so nothing of what is learnt depends on what was selected.
    """

    def __init__(self, num_drafters: int) -> None:
        self.reliability = [Reliability() for _ in range(num_drafters)]
        self.recent = Recent(num_drafters)
        self._alone = [Logistic() for _ in range(num_drafters)]
        self._late = [LateSlopes(_LATE) for _ in range(num_drafters)]
        self._joint: dict[tuple[int, int], Logistic] = {}
        self._members = [
            tuple(drafter for drafter in range(num_drafters) if chosen >> drafter & 1)
            for chosen in range(1 << num_drafters)
        ]
        self._stride = 1
        self._turn = 0

    def take(
        self,
        merged: Merged,
        request_id: str,
        drafter: int,
        proposal: Guesses,
        floor: float,
    ) -> int | None:
        """Takes in tokens, parents and scores of one drafter. floor: log-probability of being reached below
        which a guess gets no node. Returns the depth at which the drafter's first choices end for that
        reason; None = they do not.

        Scores that are all 0 say nothing of how sure the drafter is.
        """
        met = bool(merged.proposers)
        if tuple(proposal[1]) == tuple(range(-1, len(proposal[1]) - 1)):
            contact, cut = self._take_chain(merged, request_id, drafter, proposal, floor)
        else:
            contact, cut = self._take_tree(merged, request_id, drafter, proposal, floor)
        if contact and met:
            self._weigh_anew(merged, contact)
        return cut

    def _take_chain(
        self, merged: Merged, request_id: str, drafter: int, proposal: Guesses, floor: float
    ) -> tuple[list[int], int | None]:
        """As `_take_tree`, for the usual case."""
        tree, bit, late = merged.tree, 1 << drafter, self.recent.of(request_id)[drafter]
        tokens, _, scores = proposal
        slope, start, starts = self._alone[drafter].line()
        start += self.recent.correction(request_id, drafter)
        first, later = (start + self._late[drafter].odds(late, depth) for depth in (1, 2))
        raws = list(map(log_odds, scores)) if any(scores) else [0.0] * len(scores)
        said = merged.said[drafter] = {}
        contact: list[int] = []
        above, known, deepest = ROOT, 0, len(starts) - 1
        if merged.proposers:
            for token in tokens:  # what is there already
                node = tree.child(above, token)
                if node is None:
                    break
                raw, known = raws[known], known + 1
                odds = slope * raw + starts[known if known < deepest else deepest]
                odds += later if known > 1 else first
                said[node] = raw, odds
                merged.proposers[node] |= bit
                merged.signal[node] += odds
                contact.append(above)
                above = node
        signals: list[float] = []
        new: list[float] = []
        value, cut, more = tree.value(above), None, later if known else first
        for depth, raw in enumerate(raws[known:], known + 1):
            odds = slope * raw + starts[depth if depth < deepest else deepest] + more
            score = log_sigmoid(odds)
            value += score
            if value < floor:
                cut = depth
                break
            signals.append(odds)
            new.append(score)
            more = later
        if new:
            node, count = len(tree), len(new)
            if node and tree.children(above):
                contact.append(above)
            tree.hang_chain(above, tokens[known : known + count], new)
            merged.proposers += [bit] * count
            merged.signal += signals
            merged.rank += [0] * count
            said.update(zip(range(node, node + count), zip(raws[known:], signals, strict=False), strict=True))
        return contact, cut

    def _take_tree(
        self, merged: Merged, request_id: str, drafter: int, proposal: Guesses, floor: float
    ) -> tuple[list[int], int | None]:
        """Returns the nodes below which drafters may have met, and where first choices were cut."""
        tree, bit, late = merged.tree, 1 << drafter, self.recent.of(request_id)[drafter]
        correction = self.recent.correction(request_id, drafter)
        more = [self._late[drafter].odds(late, depth) + correction for depth in (1, 2)]
        odds_of, says = self._alone[drafter].odds, any(proposal[2])
        said = merged.said.setdefault(drafter, {})
        place: list[int] = []
        ranks: dict[int, int] = {}
        contact: set[int] = set()
        cut: int | None = None
        for token, parent, score in zip(*proposal, strict=True):
            above = place[parent] if parent >= 0 else ROOT
            rank = ranks.get(parent, 0)
            ranks[parent] = rank + 1
            if above == _CUT:
                place.append(_CUT)
                continue
            depth = tree.depth(above) + 1
            raw = log_odds(score) if says else 0.0
            odds = odds_of(raw, rank, depth, more[depth > 1])
            node = tree.child(above, token)
            if node is None:
                score = log_sigmoid(odds)
                if score + tree.value(above) < floor:
                    place.append(_CUT)
                    cut = depth if rank == 0 and cut is None else cut
                    continue
                if tree.children(above):
                    contact.add(above)
                node = tree.add(above, token, score)
                said[node] = raw, odds
                merged.proposers.append(bit)
                merged.signal.append(odds)
                merged.rank.append(rank)
            elif not merged.proposers[node] & bit:
                said[node] = raw, odds
                merged.proposers[node] |= bit
                merged.signal[node] += odds
                contact.add(above)
            place.append(node)
        return list(contact), cut

    def _weigh_anew(self, merged: Merged, contact: Iterable[int]) -> None:
        """Scores below the nodes in `contact`, where drafters met."""
        tree, proposers = merged.tree, merged.proposers
        for above in contact:
            children = tree.children(above)
            there = 0
            for node in children:
                there |= proposers[node]
            for node in children:
                own = proposers[node]
                if own != there or own & (own - 1):
                    model = self._model(own, there)
                    odds = model.odds(merged.signal[node], merged.rank[node], tree.depths[node])
                    tree.scores[node] = log_sigmoid(odds)
        tree.revalue()

    def _model(self, own: int, there: int) -> Logistic:
        """Of nodes by the drafters `own` beside nodes by those of `there` that are not among them."""
        found = self._joint.get((own, there))
        if found is None:
            found = self._joint[own, there] = Logistic()
        return found

    def begin_step(self, num_requests: int) -> None:
        """So many requests have their verdicts, of which a part is judged, each in its turn."""
        self._stride = 1 + (num_requests - 1) // _LESSONS_PER_STEP
        self._turn += num_requests % self._stride == 0  # so that it is not always the same ones

    def judge(self, merged: Merged, request_id: str, tokens: Sequence[int]) -> None:
        """tokens: committed below the root."""
        self._turn += 1
        if self._turn % self._stride == 0:
            self._learn(merged, request_id, tokens)
        tree, proposers = merged.tree, merged.proposers
        answered = 0
        for node in tree.children(ROOT):
            answered |= proposers[node]
        counts = [0 if answered >> drafter & 1 else None for drafter in range(len(self._alone))]
        above, right = ROOT, answered
        for depth, token in enumerate(tokens, 1):
            below = tree.child(above, token)
            right &= proposers[below] if below is not None else 0
            if below is None or not right:
                break
            for drafter in self._members[right]:
                counts[drafter] = depth
            above = below
        self.recent.count(request_id, counts)

    def _learn(self, merged: Merged, request_id: str, tokens: Sequence[int]) -> None:
        tree, proposers = merged.tree, merged.proposers
        above: int | None = ROOT
        for depth, token in enumerate(tokens, 1):
            assert above is not None
            children = tree.children(above)
            there = 0
            for node in children:
                there |= proposers[node]
            above = None
            for node in children:
                accepted = tree.tokens[node] == token
                above = node if accepted else above
                if merged.rank[node] < _JUDGED_RANKS:
                    self._judge_node(merged, node, depth, there, request_id, accepted=accepted)
            if above is None:
                break

    def _judge_node(
        self, merged: Merged, node: int, depth: int, there: int, request_id: str, *, accepted: bool
    ) -> None:
        rank, own, lates = merged.rank[node], merged.proposers[node], self.recent.of(request_id)
        members = self._members[own]
        probability = exp(merged.tree.scores[node])
        for drafter in members:  # whoever else says so: its guesses are weighed before others are asked
            self.reliability[drafter].count(probability, accepted=accepted)
            raw, odds = merged.said[drafter][node]
            error = accepted - sigmoid(odds)
            self._alone[drafter].update(raw, rank, depth, error)
            self._late[drafter].update(lates[drafter], depth, error)
            if rank == 0:
                self.recent.correct(request_id, drafter, error)
        if own != there or len(members) > 1:
            model = self._model(own, there)
            model.update(merged.signal[node], rank, depth, accepted - probability)
