"""From a drafter's name to a drafter: its weights first, which the target's memory depends on, the rest when
the limits are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.config import Config
from paceline.core.growth import GrowthRule
from paceline.core.scheduler import Limits
from paceline.drafters.base import Drafter
from paceline.drafters.features import FeatureColumns, FeatureSource, ReceivedFeatures
from paceline.drafters.materials import Materials, make
from paceline.drafters.registry import HEAD, DrafterKind, NamedDrafter
from paceline.drafters.tree_drafter import CandidateModel, TreeDrafter
from paceline.engine.device_groups import DeviceGroup
from paceline.engine.head_setup import HeadSetup, head_precision
from paceline.engine.machine import resolve_precision
from paceline.engine.model_setup import ModelSetup
from paceline.engine.outputs import ModelMemory
from paceline.errors import ConfigError
from paceline.execution.target_view import TargetView
from paceline.loading import LoadedModel, check_same_vocabulary, load
from paceline.loading.heads import LoadedHead, check_mtp, is_head, load_head, load_mtp, shipped_head
from paceline.modes import Mode, growth_rule, most_guesses

_PASS_LEAVES = 64


@dataclass(frozen=True, slots=True)
class TargetTerms:
    """What a drafter must know of the target, wherever it runs. view: of the target itself, where it runs in
    its process.  received: what is sent of it elsewhere.  vocabulary: as `Materials.vocabulary`."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    view: TargetView | None = None
    received: ReceivedFeatures | None = None
    vocabulary: Callable[[], str] = str


@dataclass(frozen=True, slots=True)
class ChosenDrafter:
    """setup: of a drafter with weights."""

    kind: DrafterKind
    setup: ModelSetup | HeadSetup | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        return self.setup.kv_bytes_per_token if self.setup is not None else 0

    def memory(self, target: ModelSetup) -> ModelMemory:
        weights = self.setup.weight_bytes if self.setup is not None else 0
        features = target.slot_bytes(self.capture) - target.slot_bytes()
        return ModelMemory(weights, self.kv_bytes_per_token, features)

    @property
    def capture(self) -> tuple[int, ...]:
        """Places in the target's residual stream that it reads."""
        return self.setup.capture if self.setup is not None else ()

    def affordable(self, limits: Limits) -> Limits:
        """See `model_setup.fitted`."""
        return self.setup.affordable(limits) if self.setup is not None else limits

    def target_slots(self, limits: Limits) -> int:
        """Of the target's cache, beyond the core's: no more than two passes of the target could verify."""
        return min(self.kind.target_slots * limits.max_num_seqs, 2 * limits.max_batch_tokens)

    def make(
        self,
        config: Config,
        mode: Mode,
        limits: Limits,
        target: TargetTerms,
        *,
        rule: GrowthRule | None = None,
    ) -> Drafter:
        """rule: by which its trees grow, if not by the mode's.

        Raises KernelError, ConfigError or EngineError when it cannot run so.
        """

        def tree(model: CandidateModel) -> Drafter:
            return TreeDrafter(
                model,
                rule or growth_rule(mode, config.tree, most_guesses(config, mode)),
                # In turn with the target, features are there before the next guesses, which are better so.
                keep_tree=mode.keep_tree and not (self.kind.features and mode.ahead == "off"),
                top_up=mode.top_up,
                pass_leaves=min(_PASS_LEAVES, limits.max_batch_tokens),
                thrifty=mode.overlapped,
                received=target.received,
            )

        materials = Materials(
            speculation=config.speculation,
            limits=limits,
            target_vocab_size=target.vocab_size,
            eos_token_ids=target.eos_token_ids,
            tree=tree,
            vocabulary=target.vocabulary,
            target=target.view,
            features=self._features(target),
        )
        return make(self.kind, self.setup.supply(materials) if self.setup is not None else materials)

    def _features(self, target: TargetTerms) -> FeatureSource | None:
        """Each place of `capture` in its order, of a target that keeps none twice."""
        source = target.received or target.view
        # In another process than the target there is no other drafter to keep any for.
        kept = target.view.capture if target.view is not None else all_captured([self])
        if source is None or self.capture in ((), kept):
            return source
        return FeatureColumns(source, [kept.index(place) for place in self.capture])


def check_place(drafters: Sequence[NamedDrafter], *, separate: bool, ranks: int = 1) -> None:
    """Refuses drafters that cannot live where they would have to. separate: in another process than the
    target.  ranks: of the target. Raises ConfigError."""
    if separate and len(drafters) > 1:
        raise ConfigError(
            f"the drafters are {' + '.join(each.name for each in drafters)}, but only one works beside the "
            "target: name one, or choose placement = serial and no mode that needs a process."
        )
    for name in [each.name for each in drafters if each.kind.target_slots]:
        if separate:
            raise ConfigError(
                f"the drafter is {name}, which runs layers of the target in the target's process, but is to "
                "run in another: choose placement = serial and no mode or address that needs a process, or "
                "another drafter."
            )
        if ranks > 1:
            raise ConfigError(
                f"the drafter is {name}, which runs layers of a target that is whole, but "
                f"groups.target_devices gives the target {ranks} ranks: give it one, or choose another "
                "drafter."
            )


def resolved(config: Config, drafters: Sequence[NamedDrafter]) -> tuple[NamedDrafter, ...]:
    """`drafters`, where those named by a folder or an id may be heads: found out, like what cannot be done,
    from small files, before any weights are loaded. Raises ConfigError or ModelError."""
    found = tuple(
        replace(each, kind=HEAD) if _named_here(each.kind) and is_head(each.name) else each
        for each in drafters
    )
    if (
        config.speculation.unpickle_head
        and drafters
        and not any(_named_here(each.kind) and each.kind.features for each in found)
    ):
        names = " + ".join(each.name for each in drafters)
        raise ConfigError(
            f"speculation.unpickle_head is set but the drafter is {names}, which is no head: leave it out."
        )
    for each in found:
        if each.kind.weights == "target":
            check_mtp(config.model)
    return found


def _named_here(kind: DrafterKind) -> bool:
    return kind.weights == "named" and bool(kind.factory)


def chosen_drafters(
    config: Config,
    drafters: Sequence[NamedDrafter],
    device: str,
    group: DeviceGroup,
    target: LoadedModel | None = None,
) -> tuple[ChosenDrafter, ...]:
    """Those of `drafters`, as `resolved`, that are made here, their weights loaded. target: where it is at
    hand.

    Raises ConfigError or ModelError.
    """
    return tuple(_chosen(config, each, device, group, target) for each in drafters if each.kind.factory)


def all_captured(drafters: Sequence[ChosenDrafter]) -> tuple[int, ...]:
    """What the target has to keep for all of them."""
    return tuple(dict.fromkeys(place for each in drafters for place in each.capture))


def _chosen(
    config: Config, drafter: NamedDrafter, device: str, group: DeviceGroup, target: LoadedModel | None
) -> ChosenDrafter:
    kind = drafter.kind
    if not kind.weights:
        return ChosenDrafter(kind)
    if not kind.features:
        model = load(drafter.name)
        if target is not None:
            check_same_vocabulary(target.tokenizer, model.tokenizer)
        precision = resolve_precision(config.speculation.draft_dtype, device)
        return ChosenDrafter(kind, ModelSetup(model, precision, device, group, config.exact))
    head = _head(config, drafter, target or load(config.model))
    return ChosenDrafter(kind, HeadSetup(head, head_precision(config, device), device, group))


def _head(config: Config, drafter: NamedDrafter, target: LoadedModel) -> LoadedHead:
    windows = [layer.window for layer in target.spec.layers]
    if all(windows):
        raise ConfigError(
            f"speculation.draft is {drafter.name}, which reads hidden states of each token, but every layer "
            f"of {target.name} forgets what is behind its window: choose a drafter that reads tokens only."
        )
    if drafter.kind.weights == "target":
        return load_mtp(target)
    name = str(shipped_head(target)) if drafter.kind.weights == "shipped" else drafter.name
    return load_head(name, target, unpickle=config.speculation.unpickle_head)
