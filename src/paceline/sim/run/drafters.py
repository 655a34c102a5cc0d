"""Drafters of simulated time: model-free ones that guess for real, and recorded ones.

Each is an ordinary drafter (`drafters.base.Drafter`) whose work advances a meter instead of taking time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import log
from typing import Protocol

from paceline.config import SpeculationConfig
from paceline.core.drafting import DrafterNeeds
from paceline.core.growth import GrowthRule
from paceline.core.token_tree import ROOT, depths_of
from paceline.core.work import DraftItem, DraftNodes, FinishedOutput, Proposal
from paceline.drafters import ngram, suffix
from paceline.drafters.base import AheadDrafter, Drafter, LearningDrafter
from paceline.drafters.tree_drafter import Candidates, DraftSequence, Leaf, TreeDrafter
from paceline.sim.acceptance import DrafterTrace
from paceline.sim.costs.forms import DraftTime
from paceline.sim.run.requests import VOCAB_SIZE, SimRequest

_USUAL = log(0.7)
"""Confidence of a guess where none was recorded."""
_WRONG = VOCAB_SIZE - 1
_NOWHERE = 3 * 2**29
"""From here on ids are in no text."""


class Meter:
    """A clock that only work moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


class SimDrafter(Drafter, Protocol):
    """meter: moved by what `grow`, `advance` and `work_ahead` would take."""

    meter: Meter

    def arrives(self, request: SimRequest) -> None:
        """A request that it may be asked about."""
        ...

    def leaves(self, request_id: str) -> None:
        """It has been told that the request is over."""
        ...


def model_free(name: str, options: SpeculationConfig, costs: DraftTime) -> SimDrafter | None:
    """`ngram` or `suffix`, the classes that are served; None = it is another."""
    if name == "ngram":
        return Priced(ngram.configured(options), costs)
    if name == "suffix":
        suffixes = suffix.configured(options)
        return PricedAhead(suffixes, costs)
    return None


class Priced:
    """A drafter that answers for real, and what its answers would take."""

    def __init__(self, drafter: Drafter, costs: DraftTime) -> None:
        self.needs = drafter.needs
        self.meter = Meter()
        self._drafter = drafter
        self._costs = costs

    def arrives(self, request: SimRequest) -> None:
        """It sees what it is told."""

    def leaves(self, request_id: str) -> None:
        """It is told by `release`."""

    def grow(self, items: Sequence[DraftItem]) -> list[Proposal]:
        proposals = self._drafter.grow(items)
        guesses = [each for each in proposals if each.tokens]
        self.meter.spend(
            self._costs.seconds(
                len(items),
                max((_levels(each) for each in guesses), default=0),
                sum(len(each.tokens) for each in guesses),
                sum(len(item.tokens) for item in items),
                sum(item.start + len(item.tokens) for item in items),
            )
        )
        return proposals

    def advance(self, items: Sequence[DraftItem]) -> None:
        """Reading costs those who read with a model; others read when they are asked."""
        self._drafter.advance(items)
        if self.needs.ingests_prompts:
            self.meter.spend(_reading(self._costs, items))

    def release(self, request_ids: Iterable[str]) -> None:
        self._drafter.release(request_ids)

    def learn(self, outputs: Sequence[FinishedOutput]) -> None:
        if isinstance(self._drafter, LearningDrafter):
            self._drafter.learn(outputs)


class PricedAhead(Priced):
    """One that also streams what it finds unasked."""

    def work_ahead(self) -> list[DraftNodes] | None:
        assert isinstance(self._drafter, AheadDrafter)
        grown = self._drafter.work_ahead()
        if grown:
            guesses = sum(len(nodes.tokens) for nodes in grown)
            context = sum(nodes.num_tokens for nodes in grown)
            self.meter.spend(self._costs.seconds(len(grown), 1, guesses, len(grown), context))
        return grown


def _levels(proposal: Proposal) -> int:
    """How deep its guesses go."""
    parents = proposal.parents
    if parents[-1] == len(parents) - 2 and parents[0] == ROOT and _straight(parents):
        return len(parents)
    return max(depths_of(parents))


def _straight(parents: Sequence[int]) -> bool:
    return parents == tuple(range(-1, len(parents) - 1))


def _reading(costs: DraftTime, items: Sequence[DraftItem]) -> float:
    unread = sum(len(item.tokens) for item in items)
    return costs.seconds(len(items), 0, 0, unread, sum(item.start for item in items) + unread)


# ---------------------------------------------------------------- recorded


class RecordedDrafter:
    """Proposes one chain: the right tokens, as far as its record says, and then wrong ones."""

    def __init__(self, name: str, *, ingests_prompts: bool = True) -> None:
        self.needs = DrafterNeeds(name, ingests_prompts=ingests_prompts)
        self._known: dict[str, tuple[int, Sequence[int], DrafterTrace]] = {}

    def arrives(self, request: SimRequest) -> None:
        self._known[request.request_id] = (
            len(request.prompt),
            request.output,
            recorded(request, self.needs.name),
        )

    def leaves(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    def grow(self, items: Sequence[DraftItem]) -> list[Proposal]:
        return [self._proposal(item) for item in items]

    def _proposal(self, item: DraftItem) -> Proposal:
        known = item.start + len(item.tokens)
        if item.request_id not in self._known:
            return Proposal(item.request_id, known)  # it ended, and who says so is still under way
        num_prompt, output, trace = self._known[item.request_id]
        at, size = known - num_prompt, min(item.max_nodes, item.max_depth)
        right = min(trace.accepted[at] - 1, size) if 0 <= at < len(trace.accepted) else 0
        tokens = (*output[at : at + right], *[_WRONG] * (size - right)) if right else (_WRONG,) * size
        scores: tuple[float, ...] = (_USUAL,) * size
        if trace.confidence is not None and 0 <= at < len(trace.confidence) and trace.confidence[at]:
            said = tuple(min(value, 0.0) for value in trace.confidence[at][:size])
            scores = said + said[-1:] * (size - len(said))
        return Proposal(item.request_id, known, tokens, tuple(range(-1, size - 1)), scores)

    def advance(self, items: Sequence[DraftItem]) -> None:
        """The record says it all."""

    def release(self, request_ids: Iterable[str]) -> None:
        """Forgotten when it leaves."""


def recorded(request: SimRequest, name: str) -> DrafterTrace:
    """An empty record where there is none: nothing it guesses is right."""
    trace = request.trace.drafters.get(name) if request.trace is not None else None
    return trace if trace is not None else DrafterTrace(())


class PricedRecord(Priced):
    def __init__(self, drafter: RecordedDrafter, costs: DraftTime) -> None:
        super().__init__(drafter, costs)
        self._recorded = drafter

    def arrives(self, request: SimRequest) -> None:
        self._recorded.arrives(request)

    def leaves(self, request_id: str) -> None:
        self._recorded.leaves(request_id)


# ---------------------------------------------------------------- recorded trees


class RecordedCandidates:
    """A draft model whose candidates are recorded, with the time its passes would take.

    On the text itself the best candidate is the right token as far as the record at the root says; where its
    candidates were recorded too, they and their log-probabilities are these. Off the text, guesses are ids
    that are in no text, with the log-probabilities of the same place. KV is kept as `DraftModel` does, in a
    cache without end.

    hits, leaf_hits, misses: where commits of one or more tokens have landed in its trees.
    """

    def __init__(self, name: str, costs: DraftTime, meter: Meter, with_root: int = 0) -> None:
        """with_root: so many tokens before a root are read by the pass that expands it; more have a pass of
        their own."""
        self.needs = DrafterNeeds(name, ingests_prompts=True)
        self._with_root = with_root
        self.passes = 0
        self.hits = self.leaf_hits = self.misses = 0
        self._costs = costs
        self._meter = meter
        self._known: dict[str, tuple[int, Sequence[int], DrafterTrace]] = {}

    def arrives(self, request: SimRequest) -> None:
        trace = recorded(request, self.needs.name)
        self._known[request.request_id] = (len(request.prompt), request.output, trace)

    def leaves(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    # ------------------------------------------------------------ the model's protocol

    def problem(self, sequence: DraftSequence) -> str | None:  # noqa: ARG002 - it can always guess
        return None

    def moved(self, sequence: DraftSequence, accepted: Sequence[int], place: dict[int, int]) -> None:
        sequence.num_held += len(accepted)
        if len(sequence.tokens) <= sequence.num_prompt + 1:
            return  # of the prompt and the token that came with it nothing was guessed
        landed = next((node for node, now in place.items() if now == ROOT), None)
        self.misses += landed is None
        self.hits += landed is not None and landed in accepted
        self.leaf_hits += landed is not None and landed not in accepted

    def advance(self, sequences: Sequence[DraftSequence]) -> bool:
        """All of it in one pass: the time is what its tokens take."""
        missing = {each.request_id: len(each.tokens) - 1 - each.num_held for each in sequences}
        reading = [each for each in sequences if missing[each.request_id] > self._with_root]
        if not reading:
            return False
        unread = sum(missing[each.request_id] for each in reading)
        self._meter.spend(
            self._costs.seconds(len(reading), 0, 0, unread, sum(len(each.tokens) for each in reading))
        )
        for each in reading:
            each.num_held = len(each.tokens) - 1
        return True

    def expand(self, leaves: Sequence[Leaf]) -> list[Candidates | None]:
        sequences = {leaf.sequence.request_id: leaf.sequence for leaf in leaves}
        context = sum(len(sequence.tokens) for sequence in sequences.values())
        unread = len(leaves)
        for leaf in leaves:
            if leaf.node == ROOT:
                unread += len(leaf.sequence.tokens) - 1 - leaf.sequence.num_held
                leaf.sequence.num_held = len(leaf.sequence.tokens)
        self.passes += 1
        self._meter.spend(self._costs.seconds(len(sequences), 1, len(leaves), unread, context))
        return [self._candidates(leaf) for leaf in leaves]

    def forget(self, sequence: DraftSequence) -> None:
        """Nothing of it is held but what `leaves` drops."""

    # ------------------------------------------------------------ what is recorded

    def _candidates(self, leaf: Leaf) -> Candidates:
        sequence, tree = leaf.sequence, leaf.sequence.draft.tree
        if sequence.request_id not in self._known:
            return Candidates()  # it ended, and who says so is still under way
        num_prompt, output, trace = self._known[sequence.request_id]
        root, path = len(sequence.tokens) - num_prompt, sequence.path_tokens(leaf.node)
        at = root + tree.depth(leaf.node)
        recorded_here = 0 <= at < len(trace.accepted)
        top = trace.top[at] if trace.top is not None and recorded_here else ()
        scores = [min(score, 0.0) for _, score in top[: leaf.count]] or [_USUAL]
        if not (recorded_here and root >= 0 and list(output[root:at]) == path):
            last = path[-1] if path else sequence.tokens[-1]
            return Candidates([_fake(at, last, rank) for rank in range(len(scores))], scores)
        tokens = [token for token, _ in top[: leaf.count]] or [_WRONG]
        right = output[at] if len(path) < trace.accepted[root] - 1 else None
        return Candidates(*_ranked(tokens, scores, right, output[at]))


def _ranked(
    tokens: list[int], scores: list[float], right: int | None, true: int
) -> tuple[list[int], list[float]]:
    """The candidates with the right one first if the record says that the best is right, else not first."""
    if right is not None and tokens[0] != right:
        tokens = [right, *[token for token in tokens if token != right]][: len(tokens)]
    elif right is None and tokens[0] == true:
        tokens = [*tokens[1:2], tokens[0], *tokens[2:]] if len(tokens) > 1 else [_WRONG]
    return tokens, scores


def _fake(position: int, last: int, rank: int) -> int:
    mixed = (position * 0x9E3779B97F4A7C15 + last * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    return _NOWHERE + ((mixed ^ mixed >> 31) % 2**28) // 64 * 64 + rank


class RecordedTree(TreeDrafter):
    """The served `TreeDrafter` over recorded candidates, by simulated time."""

    def __init__(
        self,
        name: str,
        costs: DraftTime,
        rule: GrowthRule,
        *,
        keep_tree: bool = True,
        top_up: bool = False,
        thrifty: bool = False,
        with_root: int = 0,
    ) -> None:
        self.meter = Meter()
        self.candidates = RecordedCandidates(name, costs, self.meter, with_root)
        super().__init__(
            self.candidates, rule, keep_tree=keep_tree, top_up=top_up, thrifty=thrifty, clock=self.meter
        )

    def arrives(self, request: SimRequest) -> None:
        self.candidates.arrives(request)

    def leaves(self, request_id: str) -> None:
        self.candidates.leaves(request_id)
