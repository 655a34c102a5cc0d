"""From a drafter's name to a drafter: its weights first, which the target's memory depends on, the rest when
the limits are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.config import Config
from paceline.core.scheduler import Limits
from paceline.drafters.base import Drafter
from paceline.drafters.registry import DrafterKind, Materials, NamedDrafter, make
from paceline.drafters.tree_drafter import CandidateModel, TreeDrafter
from paceline.engine.device_groups import DeviceGroup
from paceline.engine.machine import resolve_precision
from paceline.engine.model_setup import ModelSetup
from paceline.engine.modes import Mode, growth_rule, most_guesses
from paceline.errors import ConfigError
from paceline.execution.target_view import TargetView
from paceline.loading import LoadedModel, check_same_vocabulary, load

_PASS_LEAVES = 64


@dataclass(frozen=True, slots=True)
class TargetTerms:
    """What a drafter must know of the target, wherever it runs. view: of the target itself, where it runs in
    its process.  vocabulary: as `Materials.vocabulary`."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    view: TargetView | None = None
    vocabulary: Callable[[], str] = str


@dataclass(frozen=True, slots=True)
class ChosenDrafter:
    """weights: of a drafter that has some."""

    kind: DrafterKind
    weights: ModelSetup | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        return self.weights.kv_bytes_per_token if self.weights is not None else 0

    def affordable(self, limits: Limits) -> Limits:
        """As `ModelSetup.affordable`."""
        return self.weights.affordable(limits) if self.weights is not None else limits

    def target_slots(self, limits: Limits) -> int:
        """Of the target's cache, beyond the core's: no more than two passes of the target could verify."""
        return min(self.kind.target_slots * limits.max_num_seqs, 2 * limits.max_batch_tokens)

    def make(self, config: Config, mode: Mode, limits: Limits, target: TargetTerms) -> Drafter:
        """Raises KernelError, ConfigError or EngineError when it cannot run so."""

        def tree(model: CandidateModel) -> Drafter:
            return TreeDrafter(
                model,
                growth_rule(mode, config.tree, most_guesses(config, mode)),
                keep_tree=mode.keep_tree,
                top_up=mode.top_up,
                pass_leaves=min(_PASS_LEAVES, limits.max_batch_tokens),
                thrifty=mode.overlapped,
            )

        weights = self.weights
        materials = Materials(
            speculation=config.speculation,
            limits=limits,
            target_vocab_size=target.vocab_size,
            eos_token_ids=target.eos_token_ids,
            tree=tree,
            runner=(lambda context: weights.runner(limits, context)) if weights is not None else None,
            vocabulary=target.vocabulary,
            context_length=weights.model.context_length if weights is not None else 0,
            target=target.view,
        )
        return make(self.kind, materials)


def check_place(drafters: Sequence[NamedDrafter], *, separate: bool, ranks: int = 1) -> None:
    """Refuses drafters that cannot live where they would have to. separate: in another process than the
    target.  ranks: of the target. Raises ConfigError."""
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


def chosen_drafters(
    config: Config,
    drafters: Sequence[NamedDrafter],
    device: str,
    group: DeviceGroup,
    target: LoadedModel | None = None,
) -> tuple[ChosenDrafter, ...]:
    """Those of `drafters` that are made here, their weights loaded. target: where it is at hand, to be
    compared with.

    Raises ConfigError or ModelError.
    """
    if len(drafters) > 1:
        raise ConfigError(
            f"speculation.draft is {config.speculation.draft}: several drafters at once cannot be served "
            "yet; name one of them."
        )
    return tuple(_chosen(config, each, device, group, target) for each in drafters if each.kind.factory)


def _chosen(
    config: Config, drafter: NamedDrafter, device: str, group: DeviceGroup, target: LoadedModel | None
) -> ChosenDrafter:
    if not drafter.kind.weights:
        return ChosenDrafter(drafter.kind)
    model = load(drafter.name)
    if target is not None:
        check_same_vocabulary(target.tokenizer, model.tokenizer)
    precision = resolve_precision(config.speculation.draft_dtype, device)
    return ChosenDrafter(drafter.kind, ModelSetup(model, precision, device, group, config.exact))
