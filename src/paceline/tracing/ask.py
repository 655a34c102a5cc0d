"""Asks a drafter after every token of a text that is known already: draft, record, advance one token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from paceline.core.params import SamplingParams
from paceline.core.token_tree import ROOT
from paceline.core.work import Announcement, DraftItem, FinishedOutput, Proposal
from paceline.drafters.base import Drafter, LearningDrafter
from paceline.sim.acceptance import DrafterTrace
from paceline.tracing.dense_chain import chain_of
from paceline.tracing.text_view import TextView

_DIGITS = 4
"""Of log-probabilities: errors of calibration are a thousand times larger."""
_TEXT = "text"


@dataclass(frozen=True, slots=True)
class KnownText:
    """What the target wrote after `prompt`, by which parameters."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    params: SamplingParams

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.output)

    @property
    def places(self) -> range:
        """How many tokens are known, at each moment at which a drafter is asked."""
        return range(len(self.prompt) + 1, len(self.prompt) + len(self.output))

    def announcement(self) -> Announcement:
        return Announcement(len(self.prompt), self.params)


@dataclass(slots=True)
class Recorder:
    """One drafter. grows_trees: it computes its guesses, and keeps its own KV; else they follow from the text
    it was told.  top: how many candidates of the first place are recorded.  problems: why it drafted nothing,
    where it said so, and how often."""

    name: str
    drafter: Drafter
    grows_trees: bool
    depth: int
    top: int
    problems: dict[str, int] = field(default_factory=dict)

    def record(self, text: KnownText, view: TextView, at_once: int) -> DrafterTrace:
        """view: has computed `text.tokens` but the last.  at_once: places asked for in one question."""
        proposals = self._computed(text, view, at_once) if self.grows_trees else self._told(text)
        accepted = [1]
        confidence: list[tuple[float, ...]] = [()]
        top: list[tuple[tuple[int, float], ...]] = [()]
        for known, proposal in zip(text.places, proposals, strict=True):
            self._note(proposal)
            chain = chain_of(proposal.parents)[: self.depth]
            guesses = [proposal.tokens[node] for node in chain]
            accepted.append(emitted(guesses, text.output[known - len(text.prompt) :]))
            confidence.append(tuple(_rounded(proposal.scores[node]) for node in chain))
            top.append(self._first_place(proposal))
        return DrafterTrace(tuple(accepted), tuple(confidence), tuple(top))

    def learn(self, output: Sequence[int]) -> None:
        """Where it learns from outputs: of a request that is over."""
        if self.drafter.needs.learns_outputs and isinstance(self.drafter, LearningDrafter):
            self.drafter.learn([FinishedOutput(tuple(output))])

    def _first_place(self, proposal: Proposal) -> tuple[tuple[int, float], ...]:
        nodes = [node for node, parent in enumerate(proposal.parents) if parent == ROOT]
        return tuple((proposal.tokens[node], _rounded(proposal.scores[node])) for node in nodes[: self.top])

    def _note(self, proposal: Proposal) -> None:
        if proposal.error is not None:
            self.problems[proposal.error] = self.problems.get(proposal.error, 0) + 1

    # ------------------------------------------------------------ questions

    def _told(self, text: KnownText) -> Iterator[Proposal]:
        """One token after the other: the text itself is what the drafter keeps."""
        tokens, start = text.tokens, 0
        for known in text.places:
            told = text.announcement() if start == 0 else None
            yield from self.drafter.grow([self._item(_TEXT, start, tokens[start:known], told)])
            start = known
        self.drafter.release([_TEXT])

    def _computed(self, text: KnownText, view: TextView, at_once: int) -> Iterator[Proposal]:
        """One request per place. The text is read once and handed to the drafter's own prefix cache, from
        which each of them has all that it knows."""
        tokens, told = text.tokens, text.announcement()
        if not text.places:
            return
        view.place(_TEXT, len(tokens) - 1)
        self.drafter.advance([DraftItem(_TEXT, 0, tokens[:-1], 0, 0, told)])
        self.drafter.release([_TEXT])
        for first in range(text.places.start, text.places.stop, at_once):
            asked = range(first, min(first + at_once, text.places.stop))
            names = [f"{_TEXT}@{known}" for known in asked]
            for name, known in zip(names, asked, strict=True):
                view.place(name, known)
            yield from self.drafter.grow(
                [self._item(name, 0, tokens[:known], told) for name, known in zip(names, asked, strict=True)]
            )
            self.drafter.release(names)

    def _item(self, name: str, start: int, tokens: Sequence[int], told: Announcement | None) -> DraftItem:
        return DraftItem(name, start, tuple(tokens), self.depth, self.depth, told)


def emitted(guesses: Iterable[int], truth: Sequence[int]) -> int:
    """Tokens of a step that verifies `guesses` where the target goes on with `truth`: those accepted, and the
    one after them unless the answer is over."""
    right = 0
    for guess, token in zip(guesses, truth, strict=False):
        if guess != token:
            break
        right += 1
    return min(right + 1, len(truth))


def _rounded(score: float) -> float:
    return min(0.0, round(score, _DIGITS))
