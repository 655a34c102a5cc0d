"""Every drafter there is, by name: what the engine must know of it before it is made, and what makes it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from paceline.config import Config
from paceline.errors import ConfigError, shown
from paceline.shipped import EMBEDDED_HEAD

Weights = Literal["", "named", "shipped", "target"]


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """factory: "module:function" that makes it from `drafters.materials.Materials`, imported only then.

    weights: where it has some of its own from, in the precision `speculation.draft_dtype`: the folder, file
    or id that it is named by, the head that is shipped for the target, the target's own checkpoint; "" = it
    has none.  grows_trees: by the rules and options of `tree`.  looks_up: n-grams, by
    `speculation.prompt_lookup_min` and `_max`.  looks_back: at suffixes, by the options
    `speculation.suffix_*`.  in_process: whether it has to live in the target's.
    features: whether it reads hidden states of the target.  target_slots: slots of the target's own cache,
    beyond the core's, that it computes in, for each running request; 0 = it runs none of the target's layers.
    configurable: whether options say anything of it.
    """

    name: str
    factory: str = ""
    weights: Weights = ""
    grows_trees: bool = False
    looks_up: bool = False
    looks_back: bool = False
    in_process: bool = False
    features: bool = False
    target_slots: int = 0
    configurable: bool = True


_HEAD = "paceline.drafters.head:made"
KINDS = {
    kind.name: kind
    for kind in (
        # Prompt lookup, as vLLM's `ngram`.
        DrafterKind("ngram", "paceline.drafters.without_weights:ngram", looks_up=True),
        # Self-speculative decoding, as in LayerSkip, arXiv 2404.16710.
        DrafterKind(
            "layers",
            "paceline.drafters.early_layers:made",
            grows_trees=True,
            in_process=True,
            target_slots=64,
        ),
        # Suffix decoding, arXiv 2411.04975.
        DrafterKind("suffix", "paceline.drafters.without_weights:suffix", looks_back=True),
        # arXiv 2503.01840.
        DrafterKind("eagle3", _HEAD, weights="shipped", grows_trees=True, features=True),
        # Modules for multi-token prediction that a target brings along, as DeepSeek-V3 (arXiv 2412.19437).
        DrafterKind("mtp", _HEAD, weights="target", grows_trees=True, features=True),
    )
}
MODEL = DrafterKind("model", "paceline.drafters.draft_model:made", weights="named", grows_trees=True)
"""What a folder, a file or a name on a hub stands for."""
HEAD = DrafterKind("head", _HEAD, weights="named", grows_trees=True, features=True)
"""What it turns out to be where the folder holds a head."""
ELSEWHERE = DrafterKind("elsewhere", weights="named", grows_trees=True, looks_up=True, looks_back=True)
"""On another host, whose own choice it is: nothing is known of it."""
OWN = DrafterKind("own", in_process=True, configurable=False)
"""An object of the caller's."""

_NONE = "none"
_AUTO = "auto"
_IN_TURN = ("autoregressive", "serial-chain", "serial-tree")
_MODEL_NAMES = ("embedded", "smollm2")


@dataclass(frozen=True, slots=True)
class NamedDrafter:
    """name: as the configuration has it."""

    name: str
    kind: DrafterKind


def drafters_of(config: Config, *, own_drafter: bool = False) -> tuple[NamedDrafter, ...]:
    """The drafters that `config` names, each once; none = nothing is guessed.

    own_drafter: the caller has an object of its own instead. Raises ConfigError for a name that is none.
    """
    if own_drafter:
        return (NamedDrafter("own", OWN),)
    if config.groups.draft_address and config.speculation.draft != _NONE:
        return (NamedDrafter(config.speculation.draft, ELSEWHERE),)
    draft = config.speculation.draft
    return named(_best(config) if draft == _AUTO else draft)


def _best(config: Config) -> str:
    """What `auto` stands for: lookup, and the head of the embedded model where it is installed and drafters
    are asked in turn."""
    in_turn = config.groups.placement in (None, "serial") and config.groups.mode in (None, *_IN_TURN)
    if not in_turn or config.model.lower() not in _MODEL_NAMES:
        return "ngram"
    return "ngram+eagle3" if find_spec(EMBEDDED_HEAD) else "ngram"


def named(draft: str) -> tuple[NamedDrafter, ...]:
    """What `speculation.draft` stands for: one name, or several joined by `+`. Raises ConfigError."""
    names = [draft] if _exists(draft) else [name.strip() for name in draft.split("+")]
    if names == [_NONE]:
        return ()
    if _AUTO in names:
        raise ConfigError(f"speculation.draft is {draft}: auto stands alone; name the drafters you want.")
    if _NONE in names:
        raise ConfigError(f"speculation.draft is {draft}: none stands alone; leave it out.")
    if not all(names):
        raise ConfigError(f"speculation.draft is {shown(draft)}: give a name on either side of each `+`.")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"speculation.draft is {draft}: name {shown(twice)} once.")
    return tuple(NamedDrafter(name, _kind(name, draft)) for name in names)


def _kind(name: str, draft: str) -> DrafterKind:
    if name in KINDS:
        return KINDS[name]
    # A name on a hub, owner and all, is nobody's typo.
    if name.lower() not in _MODEL_NAMES and "/" not in name and not _exists(name):
        known = [*KINDS, _NONE, _AUTO, *_MODEL_NAMES]
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
        if near:
            raise ConfigError(
                f"speculation.draft is {draft}: there is no drafter {shown(name)}; did you mean `{near[0]}`?"
            )
    return MODEL


def _exists(name: str) -> bool:
    """Nothing does that the system cannot be asked for, because its name is too long or out of reach."""
    try:
        return Path(name).exists()
    except OSError:
        return False
