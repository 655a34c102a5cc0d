"""Ways to decode that a plan chooses among: each is what an engine can be told, and the devices it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.config import Config, load_config

Drive = Literal["lookup", "head", "model"]
"""What a drafter runs on: nothing but the text, the target's own devices, or devices of its own too."""


@dataclass(frozen=True, slots=True)
class DrafterOption:
    """name: as in the records and the costs.  trees: whether its candidates are recorded."""

    name: str
    drive: Drive
    trees: bool = False


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one replica runs. target, draft: devices of either group; those of the drafter are the target's
    own unless `apart`.  shares: speeds of both while they share devices at the same time, 1 = as if alone;
    None = they take turns, or share nothing.  replicas: so many of this, each with its part of the load."""

    target: int = 1
    draft: int = 0
    apart: bool = False
    shares: tuple[float, float] | None = None
    replicas: int = 1

    @property
    def devices(self) -> int:
        return self.target + (self.draft if self.apart else 0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """length: guesses per verification, None = as many as are expected to pay, decided at each step.
    width, passes: leaves that a draft pass of a tree expands, and draft passes per verification; 0 = the mode
    decides.  chunk: tokens in one pass of the target."""

    drafters: tuple[str, ...] = ()
    mode: str = "autoregressive"
    length: int | None = None
    width: int = 0
    passes: int = 0
    placed: Placed = field(default_factory=Placed)
    chunk: int = 2048

    @property
    def plain(self) -> bool:
        return not self.drafters

    def options(self, max_num_seqs: int) -> dict[str, object]:
        """Keys of `Config` by their flat names."""
        found: dict[str, object] = {
            "draft": "+".join(self.drafters) or "none",
            "max_num_seqs": max_num_seqs,
            "max_batch_tokens": max(self.chunk, max_num_seqs),
        }
        if self.plain:
            return found
        found["mode"] = self.mode
        if self.length is not None:
            found["num_speculative_tokens"] = self.length
        if self.width:
            found["tree_width"] = self.width
        if self.passes:
            found["tree_passes"] = self.passes
        return found

    def config(self, max_num_seqs: int) -> Config:
        """Raises ConfigError."""
        return load_config(options=self.options(max_num_seqs))

    def __str__(self) -> str:
        placed = self.placed
        words = ["+".join(self.drafters) or "plain decoding"]
        if not self.plain:
            length = "as many guesses as pay" if self.length is None else f"k={self.length}"
            words.append(
                f"{length} of trees {self.width} wide and {self.passes} passes deep" if self.width else length
            )
            words.append(_together(self))
        where = f"{placed.target} for the target"
        if placed.draft and not self.plain:
            where += f" + {placed.draft}" if placed.apart else f", the draft model on {placed.draft} of them"
        words.append(where if placed.replicas == 1 else f"{placed.replicas} replicas of {where}")
        return ", ".join([*words, f"passes of {self.chunk}"])


def _together(candidate: Candidate) -> str:
    shares = candidate.placed.shares
    if shares is not None:
        return f"{candidate.mode}, both at once on the same devices ({shares[0]:g} : {shares[1]:g})"
    return candidate.mode


@dataclass(frozen=True, slots=True)
class Space:
    """What is tried. lengths: of chains, None among them = planned.  budgets: of trees, guesses, width and
    draft passes.
    chunks: the first one is tried with everything, the others with what is good at that.
    combined: whether drafters are tried together, two at a time, where they take turns."""

    lengths: tuple[int | None, ...] = (1, 2, 3, 5, 7, 10, None)
    budgets: tuple[tuple[int, int, int], ...] = ((7, 8, 2), (7, 8, 4), (15, 8, 4))
    chunks: tuple[int, ...] = (2048, 512, 8192)
    combined: bool = True
    serial: bool = True
    overlapped: bool = True
    disaggregated: bool = True


def candidates(
    space: Space, drafters: Sequence[DrafterOption], plain: Sequence[Placed], placed: Sequence[Placed]
) -> list[Candidate]:
    """Plain decoding first, then everything else, each at the first chunk.

    plain: where the target alone can run.  placed: where target and a draft model can; what has no model of
    its own runs where the target does.
    """
    found = [Candidate(placed=each, chunk=space.chunks[0]) for each in plain]
    for drafter in drafters:
        for each in placed if drafter.drive == "model" else plain:
            found += [replace(one, chunk=space.chunks[0]) for one in _of(space, drafter, each)]
    if space.combined and space.serial:
        for pair in _pairs(drafters):
            names = tuple(each.name for each in pair)
            model = any(each.drive == "model" for each in pair)
            found += [
                Candidate(names, "serial-chain", None, placed=each, chunk=space.chunks[0])
                for each in (placed if model else plain)
                if not each.apart and each.shares is None
            ]
    return found


def _pairs(drafters: Sequence[DrafterOption]) -> Iterator[tuple[DrafterOption, DrafterOption]]:
    """The cheaper one first. Two of a kind have little to add to each other."""
    rank: dict[Drive, int] = {"lookup": 0, "head": 1, "model": 2}
    ordered = sorted(drafters, key=lambda each: rank[each.drive])
    for at, first in enumerate(ordered):
        for second in ordered[at + 1 :]:
            if first.drive != second.drive:
                yield first, second


def _of(space: Space, drafter: DrafterOption, placed: Placed) -> Iterator[Candidate]:
    names = (drafter.name,)
    if placed.apart or placed.shares is not None:
        wanted = space.disaggregated if placed.apart else space.overlapped
        if wanted:
            yield Candidate(names, "overlapped", None, placed=placed)
        if space.disaggregated and placed.apart:
            yield from (Candidate(names, "swiftspec", *each, placed=placed) for each in space.budgets)
    elif space.serial:
        yield from (Candidate(names, "serial-chain", each, placed=placed) for each in space.lengths)
        if drafter.trees and drafter.drive != "lookup":
            yield from (Candidate(names, "serial-tree", *each, placed=placed) for each in space.budgets)


def with_chunks(space: Space, found: Sequence[Candidate]) -> list[Candidate]:
    """Each at every chunk."""
    return [replace(each, chunk=chunk) for each in found for chunk in space.chunks]
