"""The coordinator's copy of the tree that a drafter keeps growing for one request."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan

from paceline.core.token_tree import ROOT, Landing, TokenTree
from paceline.core.work import DraftNodes

MOST_NODES = 1024
"""Nodes that one request's copy may hold; further ones are dropped, and a message of more is refused. A
drafter's mistake costs no more."""
_MOST_PLACES = 2 * MOST_NODES
"""Numbers that a copy may know; those of equal nodes share a place, so that nodes alone do not bound them."""
_SWEEP_NODES = 256
_LONG_UNSWEPT = 32
"""Committed tokens after which what died is swept out even if nobody had the time."""
_LEAST_SCORE = -1e300
"""Sums of as many as a tree holds stay finite."""
_KNOWN_TOKENS = 64
"""How far behind what is committed a drafter may be: more than a draft pass and a message take."""


def check_guesses(
    tokens: Sequence[int], parents: Sequence[int], scores: Sequence[float], vocab_size: int
) -> None:
    """Raises ValueError or TypeError for what no drafter in its senses sends; parents are not looked at."""
    if not len(tokens) == len(parents) == len(scores):
        raise ValueError("tokens, parents and scores differ in number")
    if len(tokens) > MOST_NODES:
        raise ValueError(f"{len(tokens)} nodes at once, of {MOST_NODES} at most")
    if not tokens:
        return
    if set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= vocab_size:
        raise ValueError("a token is not in the vocabulary")
    # Where one is not a number, neither is their sum.
    if min(scores) < _LEAST_SCORE or max(scores) > 0.0 or isnan(sum(scores)):
        raise ValueError("a score is not a log-probability")


class DraftMirror:
    """Committing moves the root down the tree and touches nothing else, so that the next subtree can be
    chosen at once; what died is swept out later, while the target is busy.

    `_places[number]` says where a drafter's node is: a node of the tree, or, as `-n`, the committed token at
    position `n - 1`. `_spine` are the tree's nodes for the tokens committed since the last sweep; guesses
    hang below the last of them (or ROOT). A token that was committed without having been drafted becomes a
    node too: guesses that were under way to it find it.
    """

    def __init__(self, generation: int, num_tokens: int) -> None:
        self.generation = generation
        self.tree = TokenTree()
        self.num_tokens = num_tokens
        """Committed tokens, up to and with the root."""
        self._first = num_tokens
        self._committed: list[int] = []  # the tokens from position `_first` on
        self._spine: list[int] = []
        self._places: dict[int, int] = {}
        self._next = 0

    @property
    def root(self) -> int:
        return self._spine[-1] if self._spine else ROOT

    def extend(self, nodes: DraftNodes, vocab_size: int) -> int:
        """Takes in streamed nodes; those below what is dead are dropped. Returns how many were kept.

        Raises ValueError or TypeError for what no drafter in step can send; nothing of it is kept.
        """
        if nodes.first != self._next:
            raise ValueError(f"nodes start at {nodes.first}, expected {self._next}")
        self._next += len(nodes.tokens)
        check_guesses(nodes.tokens, nodes.parents, nodes.scores, vocab_size)
        if not all(parent < nodes.first + at for at, parent in enumerate(nodes.parents)):
            raise ValueError("a parent is not an earlier node")
        kept = 0
        for number, (token, parent, score) in enumerate(
            zip(nodes.tokens, nodes.parents, nodes.scores, strict=True), nodes.first
        ):
            if len(self._places) >= _MOST_PLACES:
                break
            above = self._places.get(parent) if parent >= 0 else parent
            place = self._place_below(above, token, score) if above is not None else None
            if place is not None:
                self._places[number] = place
                kept += 1
        return kept

    def _place_below(self, above: int, token: int, score: float) -> int | None:
        """None for what is dead, or too much."""
        at = -above - self._first
        if above < 0 and 0 <= at < len(self._committed):
            return above - 1 if self._committed[at] == token else None
        if len(self.tree) >= MOST_NODES or (above < 0 and -above != self.num_tokens):
            return None
        return self.tree.add(above if above >= 0 else self.root, token, score)

    def commit(self, tokens: Sequence[int]) -> Landing:
        """Moves the root down along newly committed tokens, the last of which is the bonus token."""
        landing = Landing.MISS
        for token in tokens:
            below = self.tree.child(self.root, token)
            if below is None:
                landing = Landing.MISS
                below = self.tree.add(self.root, token)
            else:
                landing = Landing.HIT if self.tree.children(below) else Landing.LEAF_HIT
            self._spine.append(below)
            self._committed.append(token)
            self.num_tokens += 1
        return landing

    @property
    def crowded(self) -> bool:
        """Whether to sweep when there is time."""
        return len(self.tree) > _SWEEP_NODES or len(self._places) > MOST_NODES

    @property
    def overdue(self) -> bool:
        """Whether to sweep at once: the drafter says nothing, and so there was never time."""
        return len(self._spine) > _LONG_UNSWEPT and self.crowded

    def sweep(self) -> None:
        """Drops what is not below the root. What was committed is known by its position from now on."""
        if not self._spine:
            return  # nothing died since the last time
        tree, place = self.tree.rerooted(self.root)
        base = self.num_tokens - len(self._spine)
        place |= {node: -(base + at) for at, node in enumerate(self._spine, 1)}
        self._places = {
            number: place[node] if node >= 0 else node
            for number, node in self._places.items()
            if node in place or (node < 0 and -node > self.num_tokens - _KNOWN_TOKENS)
        }
        self.tree, self._spine = tree, []
