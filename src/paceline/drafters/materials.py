"""What a drafter is made from, and its making."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

from paceline.config import SpeculationConfig
from paceline.drafters.registry import DrafterKind

if TYPE_CHECKING:
    from paceline.core.scheduler import Limits
    from paceline.drafters.base import Drafter
    from paceline.drafters.features import FeatureSource
    from paceline.drafters.tree_drafter import CandidateModel
    from paceline.execution.model_runner import ModelRunner
    from paceline.execution.target_view import TargetView
    from paceline.models.head import HeadDecoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Materials:
    """What a drafter is made from.

    limits: what the target serves, fitted to this machine's memory.  tree: a drafter that grows trees by the
    configured rule.  runner: of the drafter's own model, for so many tokens of context and no more than
    `context_length`.  head: on `head_device`, with the `features` that it reads.  target: for a kind that
    runs layers of the target.  vocabulary: the target's fingerprint, where the drafter is in its process.
    """

    speculation: SpeculationConfig
    limits: Limits
    target_vocab_size: int
    eos_token_ids: Sequence[int]
    tree: Callable[[CandidateModel], Drafter]
    runner: Callable[[int], ModelRunner] | None = None
    context_length: int = 0
    head: HeadDecoder | None = None
    head_device: str = "cpu"
    features: FeatureSource | None = None
    target: TargetView | None = None
    vocabulary: Callable[[], str] = str


def make(kind: DrafterKind, materials: Materials) -> Drafter:
    """Raises what its factory raises."""
    module, _, function = kind.factory.partition(":")
    factory = cast("Callable[[Materials], Drafter]", getattr(import_module(module), function))
    return factory(materials)
