"""Drafters with a known behaviour: they read a script of what the target is going to say."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from paceline.core.drafting import DrafterNeeds
from paceline.core.token_tree import ROOT, TokenTree
from paceline.core.work import Announcement
from paceline.drafters.base import PerRequestDrafter

Rule = Callable[[list[int], int, int], TokenTree]
"""(tokens known, max_nodes, max_depth) -> guesses."""


class RuleDrafter(PerRequestDrafter[list[int]]):
    """Follows `rule`, which a test may exchange. `asked` keeps (tokens known, max_nodes) of every call."""

    def __init__(self, rule: Rule, *, ingests_prompts: bool = False) -> None:
        super().__init__()
        self.needs = DrafterNeeds("rule", ingests_prompts=ingests_prompts)
        self.rule = rule
        self.asked: list[tuple[int, int]] = []

    def begin(self, announcement: Announcement) -> list[int]:  # noqa: ARG002 - the tokens say it all
        return []

    def take_in(self, state: list[int], tokens: Sequence[int]) -> None:
        state.extend(tokens)

    def guess(self, state: list[int], max_nodes: int, max_depth: int) -> TokenTree:
        self.asked.append((len(state), max_nodes))
        return self.rule(state, max_nodes, max_depth)


class Script:
    """Texts known beforehand, as token ids, prompt included."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def learn(self, *texts: Sequence[int]) -> None:
        self.texts.extend(list(text) for text in texts)

    def continuation(self, known: Sequence[int]) -> list[int]:
        """What the last text that begins like `known` says next; empty if there is none."""
        size = len(known)
        return next((text[size:] for text in reversed(self.texts) if text[:size] == list(known)), [])


def oracle(script: Script) -> Rule:
    """Always right."""
    return lambda known, _, depth: TokenTree.chain(script.continuation(known)[:depth])


def mistaken(script: Script, vocab: int, wrong: Callable[[int], bool] = lambda _: True) -> Rule:
    """A chain that is wrong at the positions (counted from the text's start) where `wrong` says so."""

    def rule(known: list[int], _: int, depth: int) -> TokenTree:
        right = script.continuation(known)[:depth]
        return TokenTree.chain(
            [(token + 1) % vocab if wrong(len(known) + at) else token for at, token in enumerate(right)]
        )

    return rule


def half_right(script: Script, vocab: int, seed: int = 0) -> Rule:
    """Right at about two positions of three, always the same ones."""
    return mistaken(script, vocab, lambda position: random.Random(f"{seed} {position}").random() < 1 / 3)


def constant(*tokens: int) -> Rule:
    """The same guess again and again, whatever the text."""
    return lambda _, __, depth: TokenTree.chain([tokens[at % len(tokens)] for at in range(depth)])


def bushy(script: Script, vocab: int, width: int, depth: int) -> Rule:
    """`width` siblings at every depth, one of them right, at a place drawn per node; siblings of the right
    one have children too, so that accepted nodes are scattered over the tree."""

    def rule(known: list[int], max_nodes: int, _: int) -> TokenTree:
        rng = random.Random(len(known))
        tree, parents = TokenTree(), [ROOT]
        for token in script.continuation(known)[:depth]:
            siblings = [token, *((token + 1 + rng.randrange(vocab - 1)) % vocab for _ in range(width - 1))]
            rng.shuffle(siblings)
            added = [
                tree.add(parent, sibling)
                for parent in parents
                for sibling in siblings
                if len(tree) < max_nodes
            ]
            parents = [node for node in added if tree.tokens[node] == token or rng.random() < 0.3]
        return tree

    return rule
