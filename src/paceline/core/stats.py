"""Counters with one meaning everywhere. Acceptance length includes the bonus token."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import zip_longest

from paceline.core.token_tree import Landing


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """Of one drafter, since the engine's start. num_questions: how often it was asked, and those that had an
    answer took `seconds` in all.  calibration_error: the mean distance between the probability of acceptance
    that its guesses were given and how often they were right; None = none could be judged.  reliability: by
    tenths of that probability, (guesses, its mean, share that was right); empty tenths are left out.

    weight_bytes: of its own weights.  kv_bytes_per_token: in its cache.  feature_bytes_per_token: of hidden
    states that the target keeps for it.  share_of_step: of the time in which target and drafters worked.
    """

    name: str
    num_questions: int = 0
    seconds: float = 0.0
    calibration_error: float | None = None
    reliability: tuple[tuple[int, float, float], ...] = ()
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    feature_bytes_per_token: int = 0
    share_of_step: float | None = None


@dataclass(slots=True)
class SpeculationStats:
    """Of one request, or summed over many.

    num_steps: target passes that emitted tokens after the prompt's.  num_drafts: those among them that
    verified at least one guess.  num_draft_tokens: guesses verified.  num_accepted_tokens: guesses that
    became output (after truncation by a stop or length limit).  accepted_by_depth[d]: drafts whose
    accepted path reached depth d + 1.  num_failed_drafts: proposals dropped as invalid.
    num_drafted_nodes: guesses made, verified or not.  num_hits, num_leaf_hits, num_misses: where the bonus
    token fell in the tree of a drafter that works ahead (`core.token_tree.Landing`).
    """

    num_steps: int = 0
    num_emitted_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_failed_drafts: int = 0
    num_drafted_nodes: int = 0
    num_hits: int = 0
    num_leaf_hits: int = 0
    num_misses: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)

    def count_step(self, num_draft: int, num_accepted: int, num_emitted: int) -> None:
        self.num_steps += 1
        self.num_emitted_tokens += num_emitted
        if num_draft == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_draft
        self.num_accepted_tokens += num_accepted
        missing = num_accepted - len(self.accepted_by_depth)
        self.accepted_by_depth.extend([0] * max(missing, 0))
        for depth in range(num_accepted):
            self.accepted_by_depth[depth] += 1

    def count_landing(self, landing: Landing) -> None:
        self.num_hits += landing is Landing.HIT
        self.num_leaf_hits += landing is Landing.LEAF_HIT
        self.num_misses += landing is Landing.MISS

    def add(self, other: SpeculationStats) -> None:
        for each in fields(self):
            if each.name != "accepted_by_depth":
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        pairs = zip_longest(self.accepted_by_depth, other.accepted_by_depth, fillvalue=0)
        self.accepted_by_depth = [mine + others for mine, others in pairs]

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over verified guesses, in [0, 1]; None when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per draft verified, bonus token included; None when nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per target pass, passes without a draft included; shows what acceptance hides."""
        return self.num_emitted_tokens / self.num_steps if self.num_steps else None
