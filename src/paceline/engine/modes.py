"""How draft and target work together: every way that is to be compared, as one row of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.config import Config, TreeConfig
from paceline.core.draft_lane import DraftPolicy
from paceline.core.drafting import DrafterNeeds, DraftLength, FixedLength, LengthByBatchSize
from paceline.core.growth import BestFirst, Calibrated, Chain, FixedShape, GrowthRule, Layers
from paceline.core.outcomes import OutcomeCache
from paceline.engine.draft_messages import AheadMode
from paceline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mode:
    """separate: the drafter needs a process of its own.  overlapped: the target waits for nobody.
    ahead: what the drafter does while the target is busy: nothing, grow and send the nodes, or grow and keep
    them until it is asked.  growth: the rule, unless another is chosen.  keep_tree, top_up: see
    `drafters.tree_drafter.TreeDrafter`.  num_guesses: per verification, unless another number is chosen.
    planned: whether that is a bound, within which `core.planner` decides."""

    name: str
    growth: str
    separate: bool = False
    overlapped: bool = False
    ahead: AheadMode = "off"
    keep_tree: bool = True
    top_up: bool = False
    num_guesses: int = 7
    planned: bool = False


MODES = {
    mode.name: mode
    for mode in (
        Mode("autoregressive", "chain"),
        Mode("serial-chain", "chain", planned=True),
        # SpecExec, arXiv 2406.02532: the best nodes of a tree grown before each verification.
        Mode("serial-tree", "best-first"),
        # SwiftSpec, arXiv 2506.11309, as published: a persistent tree, one meeting per round.
        Mode("swiftspec", "best-first", separate=True, ahead="silent", top_up=True),
        # PipeInfer, arXiv 2407.11798: at the same time, but a verdict ends what was drafted meanwhile.
        Mode("discard", "best-first", separate=True, ahead="silent", top_up=True, keep_tree=False),
        # Saguaro, arXiv 2603.03251: a chain for each likely outcome.
        Mode("outcome-cache", "outcomes", separate=True, ahead="silent"),
        Mode(
            "overlapped",
            "calibrated",
            separate=True,
            overlapped=True,
            ahead="stream",
            num_guesses=15,
            planned=True,
        ),
    )
}

_WITHOUT_A_NAME = {"serial": "serial-chain", "disaggregated": "overlapped"}


def mode_of(config: Config) -> Mode:
    """The mode asked for, or the best known for the placement. Raises ConfigError for a contradiction."""
    placement, name = config.groups.placement, config.groups.mode
    if placement == "auto":
        raise ConfigError("groups.placement is auto: it must be settled before.")
    mode = MODES[name or _WITHOUT_A_NAME[placement or "serial"]]
    if placement == "serial" and mode.separate:
        raise ConfigError(
            f"groups.mode is {mode.name}, which runs draft and target at the same time, but groups.placement "
            "is serial: leave placement out, or choose disaggregated."
        )
    if config.tree.growth != "auto" and config.speculation.draft in ("ngram", "none"):
        raise ConfigError(
            f"tree.growth is {config.tree.growth} but the drafter is {config.speculation.draft}: only a "
            "draft model grows trees."
        )
    if config.tree.growth != "auto" and mode.growth == "outcomes":
        raise ConfigError(
            f"tree.growth is {config.tree.growth} but groups.mode is {mode.name}, which drafts chains for "
            "outcomes: leave one of them out."
        )
    return mode


def draft_policy(config: Config, mode: Mode, needs: DrafterNeeds | None) -> DraftPolicy:
    """needs: of the drafter, None = there is none."""
    speculation = config.speculation
    fixed = speculation.num_speculative_tokens is not None or bool(speculation.length_by_batch_size)
    # Where the target waits for nobody, the request's own text fills up what the drafter leaves open.
    lookup = (speculation.prompt_lookup_min, speculation.prompt_lookup_max) if mode.overlapped else None
    # A length that somebody fixed is kept; otherwise it is a bound, but for modes that are there to be
    # compared with.
    return DraftPolicy(needs, _draft_length(config, mode), lookup, mode.planned and not fixed)


def most_guesses(config: Config, mode: Mode) -> int:
    """Per verification, whatever the batch."""
    sizes = [1, *(size for size, _ in config.speculation.length_by_batch_size)]
    return max(_draft_length(config, mode).wanted(size) for size in sizes)


def _draft_length(config: Config, mode: Mode) -> DraftLength:
    speculation = config.speculation
    if speculation.length_by_batch_size:
        return LengthByBatchSize(speculation.length_by_batch_size)
    given = speculation.num_speculative_tokens
    return FixedLength(mode.num_guesses if given is None else given)


def growth_rule(mode: Mode, tree: TreeConfig, num_speculative_tokens: int) -> GrowthRule:
    """num_speculative_tokens: guesses per verification."""
    name = mode.growth if tree.growth == "auto" else tree.growth
    return _RULES[name](mode, tree, num_speculative_tokens)


def _passes(mode: Mode, tree: TreeConfig) -> int:
    """Where passes are counted elsewhere, or nothing waits for them, the rule has no end of its own."""
    return tree.tree_passes if mode.ahead == "off" else 0


def _levels(mode: Mode, count: int) -> int:
    """How deep a tree may get: a drafter that works ahead of the target needs two verifications' worth."""
    return count if mode.ahead == "off" else 2 * count + 1


_RULES: dict[str, Callable[[Mode, TreeConfig, int], GrowthRule]] = {
    "chain": lambda mode, _, count: Chain(_levels(mode, count)),
    "fixed-shape": lambda _, tree, __: FixedShape(tree.tree_shape),
    "best-first": lambda mode, tree, _: BestFirst(tree.tree_width, _passes(mode, tree)),
    "layers": lambda mode, tree, count: Layers(
        tree.tree_width, min(tree.tree_passes or count, count) if mode.ahead == "off" else 2 * count + 1
    ),
    "calibrated": lambda mode, tree, _: Calibrated(tree.tree_width, _passes(mode, tree)),
    "outcomes": lambda _, tree, count: OutcomeCache(count, tree.fan_out),
}
