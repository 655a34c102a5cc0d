"""A drafter that keeps a token tree per request and grows it by a rule, whatever computes the candidates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any, Protocol, runtime_checkable

from paceline.core.drafting import DrafterNeeds
from paceline.core.growth import DraftTree, GrowthRule
from paceline.core.mirror import MOST_NODES
from paceline.core.params import SamplingParams
from paceline.core.planner import PassCost
from paceline.core.prefix_cache import CacheNode
from paceline.core.token_tree import ROOT
from paceline.core.work import DraftItem, DraftNodes, Proposal

_ANY_DEPTH = 2**30


@dataclass(slots=True)
class DraftSequence:
    """One request on the drafter's side. tokens: what the target committed, the last of which is the root.

    ahead_depth: how deep the tree may grow while nothing is asked.  numbers: of each node of the tree, as it
    is streamed. The rest is the model's own: its KV covers `num_held` tokens, by `slots`, and the nodes in
    `node_slots`.
    """

    request_id: str
    generation: int
    num_prompt: int
    params: SamplingParams
    tokens: list[int] = field(default_factory=list)
    max_nodes: int = 0
    max_depth: int = 0
    ahead_depth: int = 0
    draft: DraftTree = field(default_factory=DraftTree)
    numbers: list[int] = field(default_factory=list)
    num_nodes: int = 0
    row: int = -1
    num_held: int = 0
    slots: list[int] = field(default_factory=list)
    cache_node: CacheNode | None = None
    num_cached_slots: int = 0
    num_forgotten: int = 0
    node_slots: dict[int, int] = field(default_factory=dict)
    last_use: int = 0
    # Whether the text holds an id the draft model lacks, such as a padding row of a wider target.
    foreign: bool = False

    def path_tokens(self, node: int) -> list[int]:
        tree = self.draft.tree
        return [tree.tokens[other] for other in tree.path(node)]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A node to expand: ROOT or a node of the sequence's tree."""

    sequence: DraftSequence
    node: int
    count: int


@dataclass(frozen=True, slots=True)
class Candidates:
    """Next tokens after a leaf, likeliest first, with log-probabilities; none where none can be chosen."""

    tokens: Sequence[int] = ()
    scores: Sequence[float] = ()


class CandidateModel(Protocol):
    """What computes candidates: a draft model, or something that stands for one."""

    needs: DrafterNeeds

    def problem(self, sequence: DraftSequence) -> str | None:
        """Why no candidates can be had for this sequence; None = they can."""
        ...

    def moved(self, sequence: DraftSequence, accepted: Sequence[int], place: dict[int, int]) -> None:
        """The sequence's tokens and tree have moved on. accepted: nodes of the old tree that are committed
        now, in order. place: old to new node of what is left; whatever else the model held is dead."""
        ...

    def advance(self, sequences: Sequence[DraftSequence]) -> bool:
        """Reads a part of the known tokens before the roots, if any are missing; whether it did."""
        ...

    def expand(self, leaves: Sequence[Leaf]) -> list[Candidates | None]:
        """Candidates of each leaf, by one pass. The roots' earlier tokens have been read. None = there is no
        room for this leaf now."""
        ...

    def forget(self, sequence: DraftSequence) -> None:
        """The request is over."""
        ...


@runtime_checkable
class JudgedModel(Protocol):
    """Wants to know how its candidates fared."""

    by_distance: dict[int, list[int]]

    def judged(self, sequence: DraftSequence, node: int, *, right: bool) -> None: ...


@runtime_checkable
class ChainModel(CandidateModel, Protocol):
    """Can compute several passes in a row, each below the best candidate of the one before, as one."""

    def chain(
        self, leaves: Sequence[Leaf], steps: int, hang: Callable[[Leaf, Candidates], int | None]
    ) -> bool:
        """Below each leaf, all of them roots; False = it cannot now, and has done nothing. hang: takes in the
        candidates of a leaf and says which node the best of them is, None = there is none."""
        ...


class FeatureSink(Protocol):
    """Where hidden states of a target elsewhere are kept until the model reads them."""

    def take(self, request_id: str, generation: int, start: int, features: Any) -> None:
        """features: a tensor, as `drafters.features.FeatureDrafter` says."""
        ...

    def forget(self, request_id: str, generation: int) -> None: ...


class TreeDrafter:
    """Persistent trees (SwiftSpec, section 3): committing a token keeps what hangs below it, KV included.

    keep_tree: False = start anew after each verdict, as overlapped systems without a tree cache do
    (PipeInfer, arXiv 2407.11798).  top_up: answer as soon as there are as many nodes as asked for, instead of
    when the rule is done (SwiftSpec, Algorithm 1).  pass_leaves: most leaves one pass expands, over all
    requests.  most_nodes: most nodes computed per request, the others being leaves, unless more are asked
    for.  thrifty: a pass takes no more leaves than pay for themselves, instead of all that the rule wants.
    clock: seconds, by which passes are measured.  received: where a target in another process sends its
    hidden states to, which the model reads.
    """

    def __init__(
        self,
        model: CandidateModel,
        rule: GrowthRule,
        *,
        keep_tree: bool = True,
        top_up: bool = False,
        pass_leaves: int = 64,
        most_nodes: int = 128,
        thrifty: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        received: FeatureSink | None = None,
    ) -> None:
        self.needs = model.needs
        self._model = model
        self._rule = rule
        self._keep_tree = keep_tree
        self._top_up = top_up
        self._pass_leaves = pass_leaves
        self._most_nodes = most_nodes
        self._thrifty = thrifty
        self._clock_s = clock
        self._received = received
        self._judging = model if isinstance(model, JudgedModel) else None
        self._chains = model if rule.straight and isinstance(model, ChainModel) else None
        self._cost = PassCost()
        self._sequences: dict[str, DraftSequence] = {}
        self._clock = 0

    # ------------------------------------------------------------ the drafter's protocol

    def grow(self, items: Sequence[DraftItem]) -> list[Proposal]:
        asked = [self._take_in(item, _ANY_DEPTH) for item in items]
        problems = {sequence.request_id: self._model.problem(sequence) for sequence in asked}
        able = [sequence for sequence in asked if problems[sequence.request_id] is None]
        while self._model.advance(able):
            pass
        self._grow_until_done(able)
        return [self._proposal(sequence, problems[sequence.request_id]) for sequence in asked]

    def advance(self, items: Sequence[DraftItem]) -> None:
        """Where nothing may grow yet the tokens are computed at once, so that no later pass is a long one."""
        told = [self._take_in(item, item.max_depth) for item in items]
        quiet = [
            sequence for sequence in told if not sequence.max_nodes and not self._model.problem(sequence)
        ]
        while self._model.advance(quiet):
            pass

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            sequence = self._sequences.pop(request_id, None)
            if sequence is not None:
                self._model.forget(sequence)
                if self._received is not None:
                    self._received.forget(request_id, sequence.generation)

    def take_features(self, request_id: str, generation: int, start: int, features: Any) -> None:
        if self._received is not None:
            self._received.take(request_id, generation, start, features)

    @property
    def by_distance(self) -> dict[int, list[int]]:
        """See `HeadModel.by_distance`; empty for other models."""
        return self._judging.by_distance if self._judging is not None else {}

    def work_ahead(self) -> list[DraftNodes] | None:
        # Below a root that is closed nothing can grow: reading its text would only take room from others.
        able = [
            sequence
            for sequence in self._sequences.values()
            if ROOT not in sequence.draft.closed and self._model.problem(sequence) is None
        ]
        if self._model.advance(able):
            return []
        depths = {each.request_id: each.ahead_depth for each in able if each.max_nodes > 0}
        return self._expand(self._wanted(depths, asked=False)) or None

    # ------------------------------------------------------------ committed tokens

    def _take_in(self, item: DraftItem, ahead_depth: int) -> DraftSequence:
        if item.announcement is not None:
            self.release([item.request_id])
            told = item.announcement
            self._sequences[item.request_id] = DraftSequence(
                item.request_id, item.generation, told.num_prompt, told.params
            )
        sequence = self._sequences[item.request_id]
        sequence.max_nodes, sequence.max_depth = item.max_nodes, item.max_depth
        sequence.ahead_depth = ahead_depth
        self._clock += 1
        sequence.last_use = self._clock
        if item.tokens:
            self._commit(sequence, item.tokens)
        return sequence

    def _commit(self, sequence: DraftSequence, tokens: Sequence[int]) -> None:
        """Walks the tree along the new tokens and keeps what hangs below the last of them."""
        draft, node, path = sequence.draft, ROOT, []
        for token in tokens:
            if node in draft.expanded:
                self._rule.learn(draft, node, token)
            below = draft.tree.child(node, token)
            if self._judging is not None and node in draft.expanded:
                self._judging.judged(sequence, node, right=below is not None)
            if below is None:
                break
            path.append(below)
            node = below
        if len(path) == len(tokens) and not self._keep_tree:
            path.pop()  # its candidates go with the tree, and are computed with it anew
        sequence.tokens.extend(tokens)
        if len(path) == len(tokens):
            sequence.draft, place = draft.rerooted(node)
            kept = sorted(place.items(), key=lambda pair: pair[1])[1:]
            sequence.numbers = [sequence.numbers[old] for old, _ in kept]
        else:
            sequence.draft, place, sequence.numbers = DraftTree(), {}, []
        self._model.moved(sequence, [node for node in path if node in draft.expanded], place)

    # ------------------------------------------------------------ growth

    def _enough(self, sequence: DraftSequence) -> bool:
        return len(sequence.draft.tree) >= sequence.max_nodes

    def _grow_until_done(self, sequences: Sequence[DraftSequence]) -> None:
        """Passes until the rule wants no more of any tree. Who loses its KV to another on the way is left
        alone until the next round: two could take it from each other without end."""
        going = [(sequence, sequence.draft) for sequence in sequences]
        while going:
            going = [
                (sequence, draft)
                for sequence, draft in going
                if sequence.draft is draft and not (self._top_up and self._enough(sequence))
            ]
            depths = {sequence.request_id: sequence.max_depth for sequence, _ in going}
            leaves = self._wanted(depths, asked=True)
            if not self._chained(leaves, depths):
                self._expand(leaves)
            wanting = {leaf.sequence.request_id for leaf in leaves}
            going = [pair for pair in going if pair[0].request_id in wanting]

    def _chained(self, leaves: Sequence[Leaf], depths: Mapping[str, int]) -> bool:
        """Whether the leaves, and what is wanted below them, could be computed as one."""
        if self._chains is None or not leaves or len(leaves) > self._pass_leaves:
            return False
        steps = min(self._depth(leaf.sequence, depths[leaf.sequence.request_id]) for leaf in leaves)
        if steps < 2 or any(leaf.node != ROOT for leaf in leaves):
            return False

        def hang(leaf: Leaf, found: Candidates) -> int | None:
            self._hang(leaf, found)
            leaf.sequence.draft.passes += 1
            return leaf.sequence.draft.tree.child(leaf.node, found.tokens[0]) if found.tokens else None

        return self._chains.chain(leaves, min(steps, self._most_nodes), hang)

    def _depth(self, sequence: DraftSequence, depth: int) -> int:
        """How deep its tree may get, of `depth`, before the drafter's context is full."""
        length = self.needs.context_length
        return depth if length is None else min(depth, length - len(sequence.tokens))

    def _wanted(self, depths: Mapping[str, int], *, asked: bool) -> list[Leaf]:
        """The best leaves of the requests in `depths`, none of whose trees becomes deeper than it says.
        asked: whether the target waits for them."""
        wanted = [
            leaf
            for name, depth in depths.items()
            for leaf in self._leaves(self._sequences[name], depth, asked=asked)
        ]
        # A root comes first, so that a request that lost its tree waits for nobody.
        wanted.sort(key=lambda leaf: -leaf.sequence.draft.tree.value(leaf.node))
        return wanted

    def _expand(self, wanted: Sequence[Leaf]) -> list[DraftNodes]:
        """One pass over as many of the leaves as it takes; the new nodes of the requests that took part."""
        leaves = wanted[: self._worthwhile(wanted[: self._pass_leaves])]
        first = {leaf.sequence.request_id: leaf.sequence.num_nodes for leaf in leaves}
        started = self._clock_s()
        for leaf, found in zip(leaves, self._model.expand(leaves) if leaves else (), strict=True):
            self._hang(leaf, found)
        self._cost.learn(len(leaves), self._clock_s() - started)
        grown = []
        for name, start in first.items():
            sequence = self._sequences[name]
            sequence.draft.passes += 1
            ends = [*range(start + MOST_NODES, sequence.num_nodes, MOST_NODES), sequence.num_nodes]
            grown += [_news(sequence, *part) for part in zip([start, *ends[:-1]], ends, strict=True)]
        return grown

    def _worthwhile(self, wanted: Sequence[Leaf]) -> int:
        """How many of the leaves, the best first, make a pass most useful per second: by how likely they are
        to be reached, and by what passes over so many leaves took so far. One at least, if there is one."""
        if not self._thrifty or not self._cost.known:
            return len(wanted)
        best, best_rate, likely = min(1, len(wanted)), 0.0, 0.0
        for count, leaf in enumerate(wanted, 1):
            likely += exp(leaf.sequence.draft.tree.value(leaf.node))
            rate = likely / self._cost.of(count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _leaves(self, sequence: DraftSequence, depth: int, *, asked: bool) -> list[Leaf]:
        draft = sequence.draft
        most = max(self._most_nodes, sequence.max_nodes) if asked else self._most_nodes
        room = max(0, most - len(draft.expanded))
        leaves = self._rule.leaves(draft, self._depth(sequence, depth), asked=asked)[:room]
        return [Leaf(sequence, leaf, self._rule.breadth(draft.tree.depth(leaf))) for leaf in leaves]

    def _hang(self, leaf: Leaf, found: Candidates | None) -> None:
        sequence, draft = leaf.sequence, leaf.sequence.draft
        if found is None or not found.tokens:
            draft.closed.add(leaf.node)
        if found is None:
            return
        draft.expanded.add(leaf.node)
        depth, spare = draft.tree.depth(leaf.node) + 1, self._rule.floor - draft.tree.value(leaf.node)
        for rank, (token, confidence) in enumerate(zip(found.tokens, found.scores, strict=True)):
            score = self._rule.score(confidence, rank, depth)
            if rank and score < spare:
                break
            # A token that came before has its node, and that its number.
            if draft.add(leaf.node, token, confidence, rank, score) == len(sequence.numbers):
                sequence.numbers.append(sequence.num_nodes)
                sequence.num_nodes += 1

    def _proposal(self, sequence: DraftSequence, problem: str | None) -> Proposal:
        known = len(sequence.tokens)
        if problem is not None:
            return Proposal(sequence.request_id, known, error=problem)
        tree = self._rule.answer(sequence.draft, sequence.max_nodes, sequence.max_depth)
        return Proposal(
            sequence.request_id, known, tuple(tree.tokens), tuple(tree.parents), tuple(tree.scores)
        )


def _news(sequence: DraftSequence, first: int, end: int) -> DraftNodes:
    """The nodes numbered `first`, .., `end - 1`, of the newest, as they are streamed."""
    tree = sequence.draft.tree
    ahead = len(tree) - sequence.num_nodes
    new = range(first + ahead, end + ahead)
    root = -len(sequence.tokens)
    return DraftNodes(
        request_id=sequence.request_id,
        generation=sequence.generation,
        num_tokens=len(sequence.tokens),
        first=first,
        tokens=tuple(tree.tokens[node] for node in new),
        parents=tuple(
            sequence.numbers[parent] if (parent := tree.parents[node]) != ROOT else root for node in new
        ),
        scores=tuple(tree.scores[node] for node in new),
    )
