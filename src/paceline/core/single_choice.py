"""Selectors to be compared with: one drafter per request and step, and all that it says is verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, log, sqrt

from paceline.core.acceptance import Logistic, sigmoid
from paceline.core.draft_cost import Costs
from paceline.core.followers import Followers
from paceline.core.planner import PassCost
from paceline.core.recent import Recent
from paceline.core.selection import Ask, Drafted, accepted_of, best_nodes

_RECENT = 0.2
_HOPE = 2.0
"""Accepted guesses per step that a drafter is thought to bring before it was tried, and slowly again."""
_RETURN = 0.02
_SAMPLE = 16
"""One in so many answers of a drafter that is alone is weighed, so that it is known how far it is right."""


class Everyone:
    """Asks every drafter for as many guesses as may be verified, and verifies the best of all."""

    def __init__(self, followers: Followers, costs: Costs, recent: Recent) -> None:  # noqa: ARG002
        self.followers = followers
        self.costs = costs
        self._answers = 0

    def begin(self, step: Sequence[Drafted], drafters: Sequence[int]) -> None:
        for each in step if len(drafters) == 1 else ():
            self._answers += 1
            each.whole = self._answers % _SAMPLE > 0

    def next_ask(self, step: Sequence[Drafted], drafters: Sequence[int]) -> Ask | None:
        for drafter in drafters:
            sizes = [
                (each, size)
                for each in step
                if drafter not in each.asked
                and not (each.whole and each.asked)
                and (size := self.most(drafter, each)) > 0
            ]
            if sizes:
                return Ask(drafter, sizes)
        return None

    def most(self, drafter: int, each: Drafted) -> int:
        room = self.followers.room(drafter, each.request)
        return each.most if room is None else min(each.most, room)

    def on_answer(self, ask: Ask, seconds: float) -> None:
        self.costs.drafts[ask.drafter].count_question(seconds)

    def kept(self, step: Sequence[Drafted]) -> list[list[int]]:
        return [best_nodes(each) for each in step]

    def on_commit(self, each: Drafted, tokens: Sequence[int]) -> None:
        """Nothing to learn."""

    def on_end(self, request_id: str) -> None:
        """Nothing to forget."""

    def follows(self, drafter: int) -> bool:  # noqa: ARG002
        return True


class _One(Everyone):
    """choice: the drafter and the number of guesses of each request, decided in `choose`."""

    def __init__(self, followers: Followers, costs: Costs, recent: Recent) -> None:
        super().__init__(followers, costs, recent)
        self.choice: dict[str, tuple[int, int]] = {}

    def choose(self, each: Drafted, drafters: Sequence[int]) -> tuple[int, int]:
        raise NotImplementedError

    def begin(self, step: Sequence[Drafted], drafters: Sequence[int]) -> None:
        for each in step if drafters else ():
            self.choice[each.request.request_id] = self.choose(each, drafters)

    def next_ask(self, step: Sequence[Drafted], drafters: Sequence[int]) -> Ask | None:
        for drafter in drafters:
            sizes = []
            for each in step:
                chosen, size = self.choice.get(each.request.request_id, (drafters[0], each.most))
                size = min(size, self.most(drafter, each)) if each.free else self.most(drafter, each)
                if chosen == drafter and drafter not in each.asked and size > 0:
                    sizes.append((each, size))
            if sizes:
                return Ask(drafter, sizes)
        return None

    def on_end(self, request_id: str) -> None:
        self.choice.pop(request_id, None)


@dataclass(slots=True)
class _Recent:
    accepted: float = _HOPE
    length: int = 5


class Reactive(_One):
    """Two guesses more after a step in which all were accepted, one less after any other (assisted generation
    in transformers); by the drafter of which most were accepted of late."""

    def __init__(self, followers: Followers, costs: Costs, recent: Recent) -> None:
        super().__init__(followers, costs, recent)
        self._recent: dict[str, list[_Recent]] = {}

    def choose(self, each: Drafted, drafters: Sequence[int]) -> tuple[int, int]:
        recent = self._of(each)
        best = max(drafters, key=lambda drafter: recent[drafter].accepted)
        return best, recent[best].length

    def _of(self, each: Drafted) -> list[_Recent]:
        found = self._recent.get(each.request.request_id)
        if found is None:
            found = self._recent[each.request.request_id] = [_Recent() for _ in self.costs.drafts]
        return found

    def on_commit(self, each: Drafted, tokens: Sequence[int]) -> None:
        for drafter, recent in enumerate(self._of(each)):
            if drafter not in each.asked:
                recent.accepted += _RETURN * (_HOPE - recent.accepted)
                continue
            accepted = accepted_of(each, drafter, tokens)
            recent.accepted += _RECENT * (accepted - recent.accepted)
            if 0 < len(each.merged.tree) <= accepted:
                recent.length = min(recent.length + 2, each.most)
            else:
                recent.length = max(1, recent.length - 1)

    def on_end(self, request_id: str) -> None:
        super().on_end(request_id)
        self._recent.pop(request_id, None)


@dataclass(slots=True)
class _Arm:
    drafter: int
    length: int
    tries: int = 0
    reward: float = 0.0


class Bandit(_One):
    """UCB1 over drafters and lengths, one arm for the whole batch, rewarded by tokens per second (BanditSpec,
    arXiv 2505.15141)."""

    _LENGTHS = (1, 2, 3, 5, 8, 12, 16)

    def __init__(self, followers: Followers, costs: Costs, recent: Recent) -> None:
        super().__init__(followers, costs, recent)
        self._arms: dict[int, list[_Arm]] = {}  # by the magnitude of the batch
        self._pulled: _Arm | None = None
        self._best = 0.0
        self._tokens = self._guesses = self._requests = 0
        self._draft_s = 0.0

    def begin(self, step: Sequence[Drafted], drafters: Sequence[int]) -> None:
        self._reward()
        arms = self._arms.get(len(step).bit_length())
        if arms is None:
            arms = [_Arm(0, 0)]
            arms += [_Arm(each, size) for each in range(len(self.costs.drafts)) for size in self._LENGTHS]
            self._arms[len(step).bit_length()] = arms
        able = [arm for arm in arms if arm.drafter in drafters or not arm.length]
        total = sum(arm.tries for arm in able)
        self._pulled = max(able, key=lambda arm: self._bound(arm, total))
        self._requests = len(step)
        super().begin(step, drafters)

    def _bound(self, arm: _Arm, total: int) -> float:
        if not arm.tries:
            return inf
        return arm.reward / arm.tries + self._best * sqrt(log(total) / (2.0 * arm.tries)) / 4.0

    def choose(self, each: Drafted, drafters: Sequence[int]) -> tuple[int, int]:  # noqa: ARG002
        assert self._pulled is not None
        return self._pulled.drafter, self._pulled.length

    def on_answer(self, ask: Ask, seconds: float) -> None:
        super().on_answer(ask, seconds)
        self._draft_s += seconds

    def kept(self, step: Sequence[Drafted]) -> list[list[int]]:
        kept = super().kept(step)
        self._guesses = sum(map(len, kept))
        return kept

    def on_commit(self, each: Drafted, tokens: Sequence[int]) -> None:  # noqa: ARG002
        self._tokens += len(tokens)

    def _reward(self) -> None:
        target: PassCost = self.costs.target
        if self._pulled is not None and self._tokens and target.known:
            plain = self._requests / target.of(self._requests)
            rate = self._tokens / (self._draft_s + target.of(self._requests + self._guesses))
            self._pulled.tries += 1
            self._pulled.reward += rate / plain
            self._best = max(self._best, rate / plain)
        self._tokens = self._guesses = 0
        self._draft_s = 0.0


@dataclass(slots=True)
class _Text:
    """Of one request: how much of its text drafter's guesses was accepted of late."""

    recent: float = 0.0
    features: tuple[float, float] | None = None


class Classifier(_One):
    """The cheapest drafter is asked first; whether its guesses are verified or those of the next is told by a
    logistic model of its confidence, how much it says, and how it did of late, learnt online."""

    _LENGTH = 5

    def __init__(self, followers: Followers, costs: Costs, recent: Recent) -> None:
        super().__init__(followers, costs, recent)
        self._model = Logistic()
        self._texts: dict[str, _Text] = {}
        self._first = 0

    def begin(self, step: Sequence[Drafted], drafters: Sequence[int]) -> None:
        drafts = self.costs.drafts
        self._first = min(drafters, key=lambda drafter: drafts[drafter].of(1, 1, 1, 1), default=0)
        super().begin(step, drafters)

    def choose(self, each: Drafted, drafters: Sequence[int]) -> tuple[int, int]:  # noqa: ARG002
        return self._first, each.most

    def on_answer(self, ask: Ask, seconds: float) -> None:
        ask.teach(self.costs.drafts[ask.drafter], seconds)

    def next_ask(self, step: Sequence[Drafted], drafters: Sequence[int]) -> Ask | None:
        ask = super().next_ask(step, drafters)
        others = [drafter for drafter in drafters if drafter != self._first]
        if ask is not None or not others:
            return ask
        for each in step:
            if not self._trusts(each) and self.choice[each.request.request_id][0] == self._first:
                length = min(self._LENGTH, each.most) if each.free else each.most
                self.choice[each.request.request_id] = others[0], length
        return super().next_ask(step, drafters)

    def _trusts(self, each: Drafted) -> bool:
        text = self._texts.setdefault(each.request.request_id, _Text())
        if (
            self._first not in each.asked
            or not each.merged.said.get(self._first)
            or text.features is not None
        ):
            return text.features is not None and self._likely(text.features) > 0.5
        said = min(len(each.merged.tree), 8) / 8.0
        text.features = each.merged.said[self._first][0][0] + said + text.recent, float(len(each.merged.tree))
        return self._likely(text.features) > 0.5

    def _likely(self, features: tuple[float, float]) -> float:
        return sigmoid(self._model.odds(features[0], 0, int(features[1])))

    def kept(self, step: Sequence[Drafted]) -> list[list[int]]:
        kept = []
        for each, nodes in zip(step, super().kept(step), strict=True):
            chosen = self.choice.get(each.request.request_id, (self._first, 0))[0]
            own = each.merged.proposers
            kept.append([node for node in nodes if own[node] >> chosen & 1])
        return kept

    def on_commit(self, each: Drafted, tokens: Sequence[int]) -> None:
        text = self._texts.setdefault(each.request.request_id, _Text())
        if text.features is not None:
            right = accepted_of(each, self._first, tokens) > 0
            error = float(right) - self._likely(text.features)
            self._model.update(text.features[0], 0, int(text.features[1]), error)
            text.recent += _RECENT * ((1.0 if right else -1.0) - text.recent)
        text.features = None

    def on_end(self, request_id: str) -> None:
        super().on_end(request_id)
        self._texts.pop(request_id, None)
