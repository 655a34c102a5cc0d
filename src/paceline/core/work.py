"""What the core is told (events) and what it asks for (work). Ids and numbers only, so that every
message crosses processes and can be recorded."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.params import SamplingParams
from paceline.core.stats import SpeculationStats

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class RequestArrived:
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class RequestAborted:
    request_id: str


@dataclass(frozen=True, slots=True)
class Proposal:
    """Guesses for one request below the token at `num_tokens - 1`. parents: index of an earlier node of
    the same proposal, -1 = the root. scores: log-probabilities given the parent. error: why there is none."""

    request_id: str
    num_tokens: int
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class DraftDone:
    """seconds: what the drafter spent on it.  drafter: which one, as an index into the policy's."""

    round: int
    proposals: tuple[Proposal, ...]
    seconds: float = 0.0
    drafter: int = 0


@dataclass(frozen=True, slots=True)
class DraftNodes:
    """Nodes that a drafter added to the tree it keeps for one request, streamed as they are made.

    generation: of the announcement the drafter follows; nodes of an older one are dropped.
    Nodes are numbered by the drafter, in the order of their making and never anew: these are
    `first, first + 1, ...`. parents: such a number, or `-n` for the committed token at position `n - 1`, so
    that a node says where it belongs whatever has been committed since. scores: log-probabilities given
    the parent. num_tokens: how many committed tokens the drafter knew.
    """

    request_id: str
    generation: int
    num_tokens: int
    first: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class NodesDrafted:
    """One pass of a draft group that works ahead. seconds: what the pass took."""

    grown: tuple[DraftNodes, ...]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the raw distribution: the chosen token's, and the best alternatives'."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target says of one item.

    path: accepted nodes, root's child first.  tokens: the accepted tokens and the bonus token.
    stop_at: number of tokens after which a stop string is complete, found by whoever can read text.
    error: why no token could be chosen after `tokens` (logits not finite, every token masked); the request
    ends with it unless one of `tokens` ends it before, as it would without speculation.
    """

    request_id: str
    path: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    stop_at: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepDone:
    """The target pass `step` is over. Items that only prefilled have no verdict. seconds: what it took.
    ended: when, by the clock of `handle`; 0 = not known.  sample_seconds: those of `seconds` that choosing
    tokens from the logits took."""

    step: int
    verdicts: tuple[Verdict, ...]
    seconds: float = 0.0
    ended: float = 0.0
    sample_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DrafterLost:
    """No work handed out to this drafter so far will be answered, and it forgets every request."""

    reason: str
    drafter: int = 0


@dataclass(frozen=True, slots=True)
class DrafterJoined:
    """A drafter is there (again). It knows no request."""

    drafter: int = 0


@dataclass(frozen=True, slots=True)
class WaitOver:
    """The moment that a `WaitUntil` named has come."""


@dataclass(frozen=True, slots=True)
class WorkLost:
    """No work handed out so far will be answered: a part of it failed or was interrupted half way."""

    reason: str


Event = (
    RequestArrived
    | RequestAborted
    | DraftDone
    | NodesDrafted
    | StepDone
    | DrafterLost
    | DrafterJoined
    | WaitOver
    | WorkLost
)

# ---------------------------------------------------------------- work


@dataclass(frozen=True, slots=True)
class Announcement:
    """What an executor or drafter must know of a request before its first item, again after preemption.

    tokens: all known tokens, for an executor, whose items leave out what the prefix cache holds.
    """

    num_prompt: int
    params: SamplingParams
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftItem:
    """tokens: committed tokens from position `start` on, which the drafter has not seen.
    max_nodes, max_depth: bounds of the guess; 0 = only take note of the tokens.
    generation: told anew with every announcement, for the nodes that a drafter streams."""

    request_id: str
    start: int
    tokens: tuple[int, ...]
    max_nodes: int
    max_depth: int
    announcement: Announcement | None = None
    generation: int = 0


@dataclass(frozen=True, slots=True)
class GrowDrafts:
    """Answered by one DraftDone with the same round.  drafter: who is asked; an index into the policy's."""

    round: int
    items: tuple[DraftItem, ...]
    drafter: int = 0


@dataclass(frozen=True, slots=True)
class AdvanceDrafts:
    """Keeps the drafter in step with what is committed. Not answered, but a drafter that works ahead goes
    on below the last token within the item's bounds, and streams `NodesDrafted`."""

    items: tuple[DraftItem, ...]
    drafter: int = 0


@dataclass(frozen=True, slots=True)
class TargetItem:
    """Known tokens at positions `start ..`, and below the last of them (the root) a tree of guesses.

    A prefill chunk is an item without guesses; only where `sample` is set (the chunk reaches the last
    known token) is there a verdict. slots: of positions `slots_from ..` up to the root, replacing
    whatever the executor holds there; tree_slots: one per node.
    """

    request_id: str
    row: int
    start: int
    tokens: tuple[int, ...]
    slots_from: int
    slots: tuple[int, ...]
    sample: bool
    tree_tokens: tuple[int, ...] = ()
    tree_parents: tuple[int, ...] = ()
    tree_slots: tuple[int, ...] = ()
    announcement: Announcement | None = None


@dataclass(frozen=True, slots=True)
class RunTarget:
    """One pass of the target over all items. Answered by one StepDone with the same step."""

    step: int
    items: tuple[TargetItem, ...]


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    """The whole output of a request that ended by itself, up to its stop, for drafters that learn from it."""

    tokens: tuple[int, ...]
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """Requests that executor and drafter may forget. Not answered. finished: outputs of those of them that
    ended well, where a drafter learns from them."""

    request_ids: tuple[str, ...]
    finished: tuple[FinishedOutput, ...] = ()


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Asks for a `WaitOver` at the time `at` of the clock that `handle` is told; a later one replaces it."""

    at: float


Work = GrowDrafts | AdvanceDrafts | RunTarget | Release | WaitUntil

# ---------------------------------------------------------------- outputs


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """What there is to say of a request once it has ended.

    num_cached_tokens: prompt tokens whose KV came from the prefix cache.  ttft_s: arrival to first token.
    decode_s: first token to last.
    """

    num_cached_tokens: int
    num_preemptions: int
    speculation: SpeculationStats
    ttft_s: float | None = None
    decode_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestDelta:
    """New output of one request, in order. The last one carries `finish_reason` and `summary`.

    error: why it ended. engine_fault: that the cause lies in the engine and not in the request.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    summary: RequestSummary | None = None
    engine_fault: bool = False
