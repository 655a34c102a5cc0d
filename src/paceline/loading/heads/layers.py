"""Which of the target's hidden states a head reads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from paceline.errors import ModelError, shown

logger = logging.getLogger(__name__)

_IDS = "eagle_aux_hidden_state_layer_ids"


def default_capture(num_layers: int) -> tuple[int, ...]:
    """The layers at whose entry EAGLE-3 takes features where nothing else is said."""
    return (2, num_layers // 2, num_layers - 3)


def capture_layers(config: Mapping[str, Any], num_layers: int, where: str) -> tuple[int, ...]:
    """The layers of the target (which has `num_layers`) at whose entry a feature is taken.

    Two conventions are in use. `eagle_aux_hidden_state_layer_ids` at the top level (vLLM, speculators) counts
    entries: 0 is the embedding. The same key inside `eagle_config` (SpecForge, NVIDIA Model-Optimizer,
    SGLang), like `target_layer_ids`, counts layers whose output is taken: one less. Absent or null stands for
    the default. Raises ModelError for ids the target does not have.
    """
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, Mapping) else {}
    default = default_capture(num_layers)
    for key, found, shift in (
        (_IDS, config.get(_IDS), 0),
        (f"eagle_config.{_IDS}", nested.get(_IDS), 1),
        ("target_layer_ids", config.get("target_layer_ids"), 1),
    ):
        if found is not None:
            captured = _shifted(found, shift, key, num_layers, where)
            if captured != default:
                logger.warning(
                    "%s: %s=%s takes the features at the entry of the target's layers %s, not the usual %s. "
                    "If few guesses are accepted, try ids that are one higher or lower.",
                    *(where, key, list(found), list(captured), list(default)),
                )
            return captured
    if num_layers < 4:
        raise ModelError(
            f"{where} does not say which layers the head reads, and a target of {num_layers} layers has not "
            f"the usual ones. Set {_IDS}."
        )
    return default


def _shifted(found: Any, shift: int, key: str, num_layers: int, where: str) -> tuple[int, ...]:
    valid = isinstance(found, list) and found and all(type(each) is int for each in found)
    captured = tuple(each + shift for each in found) if valid else ()
    if not captured or min(captured) < 0 or max(captured) > num_layers:
        raise ModelError(
            f"{where}: {key} is {shown(found)}. It must list layers of the target, which has {num_layers}. "
            "The head was made for another model, or the file is damaged."
        )
    return captured
