"""From a configuration to what is simulated: the policy that an engine with this configuration serves."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.config import Config
from paceline.core.engine_core import CoreConfig
from paceline.core.placement import OverlappedPlacement, SerialPlacement
from paceline.core.scheduler import Limits
from paceline.drafters.registry import HEAD, KINDS, NamedDrafter
from paceline.errors import ConfigError, shown
from paceline.modes import Mode, ahead_passes, draft_policy, growth_rule, mode_of, most_guesses
from paceline.sim.costs.model import CostModel
from paceline.sim.run.drafters import PricedRecord, RecordedDrafter, RecordedTree, SimDrafter, model_free
from paceline.sim.run.requests import VOCAB_SIZE
from paceline.sim.run.simulator import Lanes

CONTEXT_LENGTH = 2**17
KV_TOKENS = 2**19
MODEL_FREE = ("ngram", "suffix")


@dataclass(frozen=True, slots=True)
class Setup:
    """What `simulate` takes."""

    core: CoreConfig
    drafters: tuple[SimDrafter, ...]
    lanes: Lanes
    mode: Mode

    @property
    def names(self) -> str:
        return "+".join(each.needs.name for each in self.drafters) or "none"


def drafter_names(config: Config) -> list[str]:
    """Of `speculation.draft`. Recorded drafters have the names of their records, whatever they are."""
    draft = config.speculation.draft
    if draft == "auto":
        return ["ngram"]
    names = [name.strip() for name in draft.split("+")]
    if names == ["none"]:
        return []
    if not all(names) or len(set(names)) < len(names) or {"auto", "none"} & {*names}:
        raise ConfigError(f"speculation.draft is {shown(draft)}: name each drafter once, joined by +.")
    return names


def composed(
    config: Config,
    costs: CostModel,
    *,
    trees: bool = False,
    shares: tuple[float, float] | None = None,
    kv_tokens: int = 0,
    with_root: int = 0,
) -> Setup:
    """As `engine.assembly` composes an engine. trees: whether candidates were recorded, so that trees can
    grow; else a recorded drafter that is asked in turn proposes chains.  shares: see `Lanes`.  with_root: see
    `RecordedCandidates`.  kv_tokens: what memory there is holds, unless the configuration says how much is
    used; 0 = not known.

    Raises ConfigError for a contradiction, and for a drafter of which the costs hold nothing.
    """
    names = drafter_names(config)
    if config.groups.draft_address:
        raise ConfigError("groups.draft_address is set, but a simulation reaches nobody: leave it out.")
    mode = mode_of(config, drafters=[NamedDrafter(name, KINDS.get(name, HEAD)) for name in names])
    if mode.name == "autoregressive":
        names = []
    separate = bool(names) and (mode.separate or config.groups.placement == "disaggregated")
    drafters = tuple(_made(name, config, mode, costs, trees, with_root) for name in names)
    core = CoreConfig(
        limits=_limits(config, kv_tokens),
        vocab_size=VOCAB_SIZE,
        prefix_cache=config.scheduler.prefix_cache,
        drafting=draft_policy(config, mode, tuple(each.needs for each in drafters)),
        placement=OverlappedPlacement() if mode.overlapped else SerialPlacement(),
    )
    lanes = Lanes(separate, mode.ahead if separate else "off", ahead_passes(config), shares)
    return Setup(core, drafters, lanes, mode)


def _made(name: str, config: Config, mode: Mode, costs: CostModel, trees: bool, with_root: int) -> SimDrafter:
    price = costs.draft(name)
    found = model_free(name, config.speculation, price)
    if found is not None:
        return found
    rule = growth_rule(mode, config.tree, most_guesses(config, mode))
    if mode.ahead == "off" and (rule.straight or not trees):
        return PricedRecord(RecordedDrafter(name), price)
    return RecordedTree(
        name,
        price,
        rule,
        keep_tree=mode.keep_tree,
        top_up=mode.top_up,
        thrifty=mode.overlapped,
        with_root=with_root,
    )


def _limits(config: Config, kv_tokens: int) -> Limits:
    scheduler = config.scheduler
    return Limits(
        context_length=scheduler.context_length or CONTEXT_LENGTH,
        num_slots=scheduler.kv_tokens or kv_tokens or KV_TOKENS,
        max_num_seqs=scheduler.max_num_seqs,
        max_batch_tokens=scheduler.max_batch_tokens,
    )
