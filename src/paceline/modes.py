"""How draft and target work together: every way that is to be compared, as one row of a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from paceline.config import Config, SpeculationConfig, TreeConfig
from paceline.core.draft_lane import DraftPolicy
from paceline.core.drafting import DrafterNeeds, DraftLength, FixedLength, LengthByBatchSize
from paceline.core.growth import BestFirst, Calibrated, Chain, FixedShape, GrowthRule, Layers
from paceline.core.outcomes import OutcomeCache
from paceline.drafters.registry import NamedDrafter, drafters_of
from paceline.drafters.service import AheadMode
from paceline.errors import ConfigError, shown


@dataclass(frozen=True, slots=True)
class Mode:
    """separate: the drafter needs a process of its own.  overlapped: the target waits for nobody.
    ahead: what the drafter does while the target is busy: nothing, grow and send the nodes, or grow and keep
    them until it is asked.  growth: the rule, unless another is chosen.  keep_tree, top_up: see
    `drafters.tree_drafter.TreeDrafter`.  needs_trees: whether it takes a drafter that grows some.
    num_guesses: per verification, unless another number is chosen.  planned: whether that is a bound, within
    which `core.planner` decides."""

    name: str
    growth: str
    separate: bool = False
    overlapped: bool = False
    ahead: AheadMode = "off"
    keep_tree: bool = True
    top_up: bool = False
    needs_trees: bool = False
    num_guesses: int = 7
    planned: bool = False


MODES = {
    mode.name: mode
    for mode in (
        Mode("autoregressive", "chain"),
        Mode("serial-chain", "chain", num_guesses=15, planned=True),
        # SpecExec, arXiv 2406.02532: the best nodes of a tree grown before each verification.
        Mode("serial-tree", "best-first", needs_trees=True),
        # SwiftSpec, arXiv 2506.11309, as published: a persistent tree, one meeting per round.
        Mode("swiftspec", "best-first", separate=True, ahead="silent", top_up=True, needs_trees=True),
        # PipeInfer, arXiv 2407.11798: at the same time, but a verdict ends what was drafted meanwhile.
        Mode(
            "discard",
            "best-first",
            separate=True,
            ahead="silent",
            top_up=True,
            keep_tree=False,
            needs_trees=True,
        ),
        # Saguaro, arXiv 2603.03251: a chain for each likely outcome.
        Mode("outcome-cache", "outcomes", separate=True, ahead="silent", needs_trees=True),
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


def mode_of(
    config: Config, *, own_drafter: bool = False, drafters: Sequence[NamedDrafter] | None = None
) -> Mode:
    """The mode asked for, or the best known for the placement. own_drafter: it is an object of the caller's.
    drafters: those there are, None = those that `config` names.

    Raises ConfigError for a contradiction.
    """
    placement, name = config.groups.placement, config.groups.mode
    if placement == "auto":
        raise ConfigError("groups.placement is auto: it must be settled before.")
    mode = MODES[name or _WITHOUT_A_NAME[placement or "serial"]]
    if placement == "serial" and mode.separate:
        raise ConfigError(
            f"groups.mode is {mode.name}, which runs draft and target at the same time, but groups.placement "
            "is serial: leave placement out, or choose disaggregated."
        )
    drafters = drafters_of(config, own_drafter=own_drafter) if drafters is None else drafters
    _check_none(config, mode, drafters)
    _check_grows(config, mode, drafters)
    _check_tree(config, mode, drafters)
    _check_speculation(config, mode, drafters)
    return mode


def _check_none(config: Config, mode: Mode, drafters: Sequence[NamedDrafter]) -> None:
    """Refuses what only a drafter could honour where nothing is guessed."""
    if not drafters and not config.groups.draft_address:
        reason = "speculation.draft is none"
        separate = mode.separate or config.groups.placement == "disaggregated"
    elif mode.name == "autoregressive":
        reason, separate = "groups.mode is autoregressive", config.groups.placement == "disaggregated"
    else:
        return
    for name in ("num_speculative_tokens", "length_by_batch_size"):
        if getattr(config.speculation, name):
            raise ConfigError(f"{name} is set but {reason}: leave one of them out.")
    if separate:
        raise ConfigError(
            f"{reason}, so that there is no drafter to run at the same time as the target: leave placement "
            "and mode out, or choose a drafter."
        )


def _check_grows(config: Config, mode: Mode, drafters: Sequence[NamedDrafter]) -> None:
    """Refuses a mode that is about trees where none of the drafters grows one."""
    able = any(each.kind.grows_trees or not each.kind.configurable for each in drafters)
    if mode.needs_trees and drafters and not able:
        raise ConfigError(
            f"groups.mode is {config.groups.mode} but {_reason(drafters, 'grows no trees')}: choose a draft "
            "model, or leave mode out."
        )


def _check_tree(config: Config, mode: Mode, drafters: Sequence[NamedDrafter]) -> None:
    """Refuses options of trees that the mode's rule would not look at."""
    rule = mode.growth if config.tree.growth == "auto" else config.tree.growth
    looked_at: set[str] = set()
    if not any(each.kind.grows_trees for each in drafters):
        reason = _reason(drafters, "grows no trees")
    elif mode.name == "autoregressive":
        reason = "groups.mode is autoregressive: nothing is guessed"
    elif mode.growth == "outcomes" and config.tree.growth != "auto":
        reason = f"groups.mode is {mode.name}, which drafts chains for outcomes"
    else:
        looked_at, reason = {"growth", *_OPTIONS[rule]}, f"trees grow by the rule {rule} in mode {mode.name}"
        looked_at |= {"tree_passes"} if mode.ahead == "silent" else set()
        looked_at -= {"tree_passes"} if mode.ahead == "stream" else set()
    for name in config.tree.__struct_fields__:
        value = getattr(config.tree, name)
        if value != getattr(_DEFAULTS, name) and name not in looked_at:
            written = value if isinstance(value, str) else shown(value)
            raise ConfigError(f"tree.{name} is {written} but {reason}: leave it out.")


def _check_speculation(config: Config, mode: Mode, drafters: Sequence[NamedDrafter]) -> None:
    """Refuses options of drafters that none of those chosen would look at."""
    kinds = [each.kind for each in drafters]
    ignored = {
        "draft_dtype": ("has no weights", any(kind.weights for kind in kinds)),
        "prompt_lookup_min": ("looks up no n-grams", _lookups(mode, drafters)),
        "prompt_lookup_max": ("looks up no n-grams", _lookups(mode, drafters)),
        "prompt_lookup_branches": ("looks up no n-grams", any(kind.looks_up for kind in kinds)),
        "draft_layers": ("runs no layers of the target", any(kind.target_slots for kind in kinds)),
    }
    _check_selector(config, mode, drafters)
    _check_unpickle(config, mode, drafters)
    default = SpeculationConfig()
    for name in default.__struct_fields__:
        if name.startswith("suffix_"):
            ignored[name] = ("looks at no suffixes", any(kind.looks_back for kind in kinds))
    _check_suffix_cache(config.speculation, separate=mode.separate or _apart(config))
    for name, (lack, looked_at) in ignored.items():
        value = getattr(config.speculation, name)
        if value != getattr(default, name) and not looked_at:
            raise ConfigError(f"speculation.{name} is {value} but {_reason(drafters, lack)}: leave it out.")


def _apart(config: Config) -> bool:
    return config.groups.placement == "disaggregated"


def _check_suffix_cache(speculation: SpeculationConfig, *, separate: bool) -> None:
    """Refuses options of a cache that there is none of, and a file where nobody would write it."""
    default = SpeculationConfig()
    for name in ("suffix_max_cached_requests", "suffix_max_memory", "suffix_cache_file"):
        value = getattr(speculation, name)
        if value != getattr(default, name) and speculation.suffix_cache == "off":
            raise ConfigError(
                f"speculation.{name} is {value} but speculation.suffix_cache is off: choose tenant or "
                "shared, or leave it out."
            )
    if speculation.suffix_cache_file and separate:
        raise ConfigError(
            f"speculation.suffix_cache_file is {speculation.suffix_cache_file} but the drafter runs in a "
            "process of its own, which keeps no files: choose placement = serial, or leave it out."
        )


def _check_unpickle(config: Config, mode: Mode, drafters: Sequence[NamedDrafter]) -> None:
    """What is named may still turn out to be a model."""
    named_here = any(each.kind.weights == "named" and each.kind.factory for each in drafters)
    if not config.speculation.unpickle_head or (named_here and mode.name != "autoregressive"):
        return
    reason = _reason(drafters, "names no head to load")
    if mode.name == "autoregressive":
        reason = "groups.mode is autoregressive: nothing is guessed"
    raise ConfigError(f"speculation.unpickle_head is set but {reason}: leave it out.")


def _check_selector(config: Config, mode: Mode, drafters: Sequence[NamedDrafter]) -> None:
    selector = config.speculation.selector
    if selector == "auto" or (drafters and mode.planned and not mode.overlapped):
        return
    reason = "speculation.draft is none"
    if drafters:
        reason = f"groups.mode is {mode.name}, where nothing is selected before each verification"
    raise ConfigError(f"speculation.selector is {selector} but {reason}: leave it out.")


def _lookups(mode: Mode, drafters: Sequence[NamedDrafter]) -> bool:
    """Whether n-grams are: by a drafter, or by the core for a target that waits for nobody."""
    return bool(drafters) and (mode.overlapped or any(each.kind.looks_up for each in drafters))


def _reason(drafters: Sequence[NamedDrafter], lack: str) -> str:
    """lack: what is said of every drafter there is."""
    if not drafters:
        return "speculation.draft is none"
    if not all(each.kind.configurable for each in drafters):
        return "the drafter is an object of your own, which no option reaches"
    return f"the drafter is {' + '.join(each.name for each in drafters)}, which {lack}"


def draft_policy(config: Config, mode: Mode, needs: tuple[DrafterNeeds, ...]) -> DraftPolicy:
    """needs: of each drafter."""
    speculation = config.speculation
    # A length that somebody fixed is kept, be it by a shape; otherwise it is a bound, but for modes that are
    # there to be compared with.
    fixed = speculation.num_speculative_tokens is not None or bool(speculation.length_by_batch_size)
    fixed = fixed or config.tree.growth == "fixed-shape"
    # Where the target waits for nobody, the request's own text fills up what the drafter leaves open.
    lookup = (speculation.prompt_lookup_min, speculation.prompt_lookup_max) if mode.overlapped else None
    chosen = speculation.selector
    planned = mode.planned and (not fixed or chosen != "auto")
    selector = "combined" if chosen == "auto" else chosen
    return DraftPolicy(needs, _draft_length(config, mode), lookup, planned, selector)


def most_guesses(config: Config, mode: Mode) -> int:
    """Per verification, whatever the batch."""
    sizes = [1, *(size for size, _ in config.speculation.length_by_batch_size)]
    return max(_draft_length(config, mode).wanted(size) for size in sizes)


def _draft_length(config: Config, mode: Mode) -> DraftLength:
    speculation = config.speculation
    if speculation.length_by_batch_size:
        return LengthByBatchSize(speculation.length_by_batch_size)
    if speculation.num_speculative_tokens is not None:
        return FixedLength(speculation.num_speculative_tokens)
    if config.tree.growth == "fixed-shape":
        return FixedLength(min(_num_nodes(config.tree.tree_shape), _MOST_GUESSES))
    return FixedLength(mode.num_guesses)


def _num_nodes(widths: Sequence[int]) -> int:
    """Of a tree whose nodes at depth i have `widths[i]` children."""
    return sum(accumulate(widths, mul))


def growth_rule(mode: Mode, tree: TreeConfig, num_speculative_tokens: int) -> GrowthRule:
    """num_speculative_tokens: guesses per verification."""
    name = mode.growth if tree.growth == "auto" else tree.growth
    return _RULES[name](mode, tree, num_speculative_tokens)


def ahead_passes(config: Config) -> int:
    """Passes after each answer of a drafter that works ahead unseen. It has to end by itself, since nobody
    could say when it is enough: 0 is the default's number."""
    return config.tree.tree_passes or _DEFAULTS.tree_passes


def _passes(mode: Mode, tree: TreeConfig) -> int:
    """By which the rule itself ends, 0 = when it finds no more worth it. Where passes are counted elsewhere
    (`ahead_passes`), or nothing waits for them, it has no end of its own."""
    return tree.tree_passes if mode.ahead == "off" else 0


def _levels(mode: Mode, count: int) -> int:
    """How deep a tree may get: a drafter that works ahead of the target needs two verifications' worth."""
    return count if mode.ahead == "off" else 2 * count + 1


_DEFAULTS = TreeConfig()
_MOST_GUESSES = 256
"""Of `num_speculative_tokens`."""
_OPTIONS: dict[str, tuple[str, ...]] = {
    "chain": (),
    "fixed-shape": ("tree_shape",),
    "best-first": ("tree_width", "tree_passes"),
    "layers": ("tree_width", "tree_passes"),
    "calibrated": ("tree_width", "tree_passes"),
    "outcomes": ("fan_out",),
}
"""What each rule looks at. Passes are counted by the mode where the drafter works ahead unseen, and by nobody
where it streams."""

_RULES: dict[str, Callable[[Mode, TreeConfig, int], GrowthRule]] = {
    "chain": lambda mode, _, count: Chain(_levels(mode, count)),
    "fixed-shape": lambda _, tree, __: FixedShape(tree.tree_shape),
    "best-first": lambda mode, tree, _: BestFirst(tree.tree_width, _passes(mode, tree)),
    "layers": lambda mode, tree, count: Layers(tree.tree_width, _levels(mode, count), _passes(mode, tree)),
    "calibrated": lambda mode, tree, _: Calibrated(tree.tree_width, _passes(mode, tree)),
    "outcomes": lambda _, tree, count: OutcomeCache(count, tree.fan_out),
}
