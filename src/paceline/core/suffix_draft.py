"""Suffix decoding (arXiv 2411.04975): the continuation that a context's own past makes likeliest."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import log

import numpy as np

from paceline.core.suffix_index import NO_TOKEN, Context, Places, SuffixIndex, tokens_of
from paceline.core.token_tree import ROOT, TokenTree


@dataclass(frozen=True, slots=True)
class SuffixRule:
    """factor, offset: a context that was matched for m tokens is worth `factor * m + offset` guesses (1 and 0
    in the paper).
    min_token_prob: of being reached, below which nothing is guessed.  branching: the likeliest nodes of the
    tree of continuations, not only the likeliest path.  most_places: of each n-gram, the latest ones that are
    counted."""

    factor: float = 1.0
    offset: float = 3.0
    min_token_prob: float = 0.1
    branching: bool = True
    most_places: int = 32

    def guesses(self, matched: int) -> int:
        return max(0, int(self.factor * matched + self.offset + 1e-6))


@dataclass(slots=True)
class Draft:
    """reached: the probability of each node, from the root.  score: their sum, the tokens expected to be
    accepted.  matched: tokens of context that it rests on."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    reached: list[float] = field(default_factory=list)
    score: float = 0.0
    matched: int = 0

    def tree(self) -> TokenTree:
        tree = TokenTree()
        for token, parent, reached in zip(self.tokens, self.parents, self.reached, strict=True):
            tree.add(parent, token, log(reached / (self.reached[parent] if parent != ROOT else 1.0)))
        return tree


def best_draft(
    sources: Sequence[tuple[SuffixIndex, int]],
    context: Context,
    rule: SuffixRule,
    max_nodes: int,
    max_depth: int,
) -> Draft:
    """Over all sources, each with the owner whose texts count, and all lengths of the match: the draft of the
    best score; of equal ones that of the longer match, then of the earlier source."""
    best = Draft()
    for index, owner in sources:
        above: Places | None = None
        for level in reversed(range(len(index.grams))):
            if min(rule.guesses(index.longest(level)), max_nodes) <= best.score:
                break
            found = index.places(context, level, rule.most_places, owner)
            # The same places again are worth no more to a shorter match.
            if found is None or (above is not None and np.array_equal(found.places, above.places)):
                continue
            best, above = _best_of(best, index, found, rule, max_nodes, max_depth), found
    return best


def _best_of(
    best: Draft, index: SuffixIndex, found: Places, rule: SuffixRule, max_nodes: int, max_depth: int
) -> Draft:
    """Longer matches are some of the places of shorter ones: only where there are more is there news."""
    order = sorted(range(len(found.matched)), key=found.matched.__getitem__, reverse=True)
    read: list[bytes] | None = None
    counts: dict[bytes, int] = {}
    tokens: dict[bytes, list[int]] = {}
    firsts: dict[int, int] = {}
    upto = counted = 0
    while upto < len(order):
        length = found.matched[order[upto]]
        most = min(rule.guesses(length), max_nodes)
        if most <= best.score:
            break
        while upto < len(order) and found.matched[order[upto]] == length:
            first = found.next[order[upto]]
            firsts[first] = firsts.get(first, 0) + 1
            upto += 1
        if most * max(firsts.values()) <= best.score * (upto + 1):
            continue  # no node is likelier than the likeliest first one
        if read is None:
            read = index.following(found.places, min(most, max_depth))
        for place in order[counted:upto]:
            row = read[place]
            if row not in counts:
                tokens[row] = tokens_of(row)
            counts[row] = counts.get(row, 0) + 1
        counted = upto
        draft = _grown([(tokens[row], count) for row, count in counts.items()], upto, most, rule, max_depth)
        if draft.score > best.score:
            draft.matched = length
            best = draft
    return best


Rows = list[tuple[list[int], int]]
"""What followed, and at how many places it did."""


def _grown(rows: Rows, places: int, most: int, rule: SuffixRule, max_depth: int) -> Draft:
    """The likeliest nodes, the likeliest first, of the tree of what followed at `places` places.

    A token's chance after its parent is the share of the places there that it follows. Where the context
    stands now is one more place, of which nobody knows yet what follows."""
    draft, depth = Draft(), min(max_depth, len(rows[0][0]))
    nodes: list[tuple[float, int, int, int, int, int, Rows]] = []
    made, parent, level, reached, alive = 0, ROOT, 0, 1.0, rows
    places += 1
    while True:
        if level < depth:
            for token, (count, following) in _by_token(alive, level, likeliest=not rule.branching):
                chance = reached * count / places
                if chance >= rule.min_token_prob:
                    made += 1
                    heapq.heappush(nodes, (-chance, made, token, parent, level, count, following))
        if not nodes or len(draft.tokens) == most:
            return draft
        negative, _, token, above, level, places, alive = heapq.heappop(nodes)
        parent, level, reached = len(draft.tokens), level + 1, -negative
        draft.tokens.append(token)
        draft.parents.append(above)
        draft.reached.append(reached)
        draft.score += reached


def _by_token(rows: Rows, level: int, *, likeliest: bool) -> Iterable[tuple[int, tuple[int, Rows]]]:
    """Places and rows of each token at `level`, in the order of its first row; or only the most frequent."""
    if len(rows) == 1:
        ((row, count),) = rows
        return [(row[level], (count, rows))] if row[level] != NO_TOKEN else []
    groups: dict[int, tuple[int, Rows]] = {}
    for row, count in rows:
        before, group = groups.get(row[level], (0, []))
        group.append((row, count))
        groups[row[level]] = before + count, group
    groups.pop(NO_TOKEN, None)
    if likeliest and groups:
        return [max(groups.items(), key=lambda group: group[1][0])]
    return groups.items()
