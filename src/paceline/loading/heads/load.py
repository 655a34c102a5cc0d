"""From a folder or a hub id to a draft head that is ready to run."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import ModelError, shown
from paceline.loading import hub
from paceline.loading.checkpoint import fingerprint, read_json
from paceline.loading.heads.eagle import load_eagle
from paceline.loading.heads.mtp import holds_mtp, load_modules
from paceline.loading.heads.stored import StoredTensors
from paceline.loading.info import Provenance
from paceline.loading.model import LoadedModel
from paceline.loading.source import resolve
from paceline.models.head_spec import HeadSpec, HeadWeights

logger = logging.getLogger(__name__)

_QUANTISED = re.compile(r"[.-](i?q\d\w*|bf16|f16|f32)$")
_HEAD_WORDS = ("eagle", "speculator", "nextn", "mtp")


@dataclass(frozen=True)
class LoadedHead:
    """A head in memory. name: as the user gave it. kind: for people to read."""

    name: str
    kind: str
    spec: HeadSpec
    weights: HeadWeights
    provenance: Provenance


def is_head(name: str | Path) -> bool:
    """Whether a folder or hub id holds a draft head rather than a model, by its config.json (which is fetched
    if need be). Raises ModelError where `name` is nothing at all."""
    source = resolve(str(name))
    if source.kind == "gguf":
        return False
    return _describes_head(_config(_folder(str(name))[0]))


def load_head(name: str | Path, target: LoadedModel, *, unpickle: bool = False) -> LoadedHead:
    """Load the head in a folder or hub repository for `target`, whose embedding and output matrix it shares
    unless it has its own.

    unpickle: take pickled weights (`*.bin`) where there are no others, from authors whom the user trusts.
    Raises ModelError, naming cause and remedy, for a head that is missing, damaged, unsafe, unsupported or
    made for another target.
    """
    name = str(name)
    folder, revision = _folder(name, pickles=unpickle)
    config = _config(folder)
    if not _describes_head(config):
        raise ModelError(
            f"{folder}/config.json describes no draft head (model_type {shown(config.get('model_type'))}). "
            "Give an EAGLE-3 head, or use the model itself as the drafter."
        )
    _check_kind(folder, config)
    if not unpickle:
        _refuse_pickles(folder, fetched=resolve(name).kind == "hub")
    stored = StoredTensors(folder, unpickle=unpickle)
    provenance = Provenance("checkpoint", str(folder), fingerprint(folder, config), revision)
    if holds_mtp(stored.names):
        spec, weights = load_modules(stored, config, target.spec, target.weights, inside=False)
        return LoadedHead(name, "MTP", spec, weights, provenance)
    try:
        spec, weights = load_eagle(folder, config, stored, target.spec, target.weights)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise ModelError(
            f"cannot understand {folder}/config.json: {type(error).__name__}: {error}. Download the file "
            "again, or correct the value."
        ) from error
    _check_verifier(folder, config, target)
    return LoadedHead(name, "EAGLE-3", spec, weights, provenance)


def check_mtp(name: str) -> None:
    """Raises ModelError where the model of that name holds no multi-token prediction modules. Of its weights
    only the names are read."""
    _holding_mtp(name, None if resolve(name).kind == "gguf" else _folder(name)[0])


def load_mtp(target: LoadedModel) -> LoadedHead:
    """The multi-token prediction modules in the target's own checkpoint.

    Raises ModelError, naming cause and remedy, where there are none or they are not supported.
    """
    stored = _holding_mtp(target.name, _own_folder(target))
    spec, weights = load_modules(stored, _config(stored.folder), target.spec, target.weights, inside=True)
    return LoadedHead(target.name, "MTP", spec, weights, target.provenance)


def _holding_mtp(name: str, folder: Path | None) -> StoredTensors:
    """What is stored in the folder of the model `name`."""
    if folder is None or not holds_mtp((stored := StoredTensors(folder)).names):
        raise ModelError(
            f"the checkpoint of {name} holds no multi-token prediction modules. Name a head or a model to "
            "draft with, or choose another drafter."
        )
    return stored


def _own_folder(target: LoadedModel) -> Path | None:
    """Where the target's checkpoint lies; None for a GGUF file, which holds no modules."""
    source = target.provenance
    if source.kind != "checkpoint":
        return None
    folder = Path(source.source)
    return folder if folder.is_dir() else hub.fetch(source.source, source.revision)[0]


def _folder(name: str, *, pickles: bool = False) -> tuple[Path, str | None]:
    """Where a head lies, and the hub's commit. pickles: fetched from there too."""
    source = resolve(name)
    if source.kind == "hub":
        assert source.repo is not None
        return hub.fetch(source.repo, source.revision, pickles=pickles)
    if source.kind != "checkpoint" or source.path is None:
        raise ModelError(f"{name} is a file. Give the folder of the head, with config.json in it.")
    return source.path, None


def _config(folder: Path) -> dict[str, Any]:
    config = read_json(folder / "config.json")
    if config is None:
        raise ModelError(f"{folder} holds no config.json: it is neither a model nor a head. Check the path.")
    return config


def _refuse_pickles(folder: Path, *, fetched: bool) -> None:
    """fetched: from a hub, where pickles are left."""
    pickled = sorted(folder.glob("*.bin"))
    if any(folder.glob("*.safetensors*")) or not (pickled or fetched):
        return
    holds = f"holds only pickled weights ({pickled[0].name})" if pickled else "holds no .safetensors file"
    there = "" if pickled else "pickled weights (*.bin) may be on the hub. "
    raise ModelError(
        f"{folder} {holds}: {there}Pickles can run code when they are loaded. If you trust their author, set "
        "speculation.unpickle_head = true (--unpickle-head), or convert them: "
        "`safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')`."
    )


def _describes_head(config: Mapping[str, Any]) -> bool:
    if any(key in config for key in ("speculators_model_type", "draft_vocab_size", "eagle_config")):
        return True
    architectures = config.get("architectures")
    listed = architectures if isinstance(architectures, list) else [architectures]
    names = [config.get("model_type"), *listed]
    return any(word in str(name).lower() for name in names for word in _HEAD_WORDS)


def _check_kind(folder: Path, config: Mapping[str, Any]) -> None:
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise ModelError(
            f"{folder}/config.json describes a speculator of kind {shown(kind)}, which is not "
            "supported. Choose an eagle3 head."
        )


def _proposal(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("speculators_config")
    return found if isinstance(found, Mapping) else {}


def _check_verifier(folder: Path, config: Mapping[str, Any], target: LoadedModel) -> None:
    """A head made for another model of the same shape runs, only badly: worth saying."""
    verifier = _proposal(config).get("verifier")
    wanted = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    if not isinstance(wanted, str) or not wanted:
        return
    ours = {plain_name(target.name), plain_name(target.provenance.source)}
    if plain_name(wanted) not in ours:
        logger.warning(
            "%s was made for %s, the target is %s. If few guesses are accepted, choose a head made for it.",
            *(folder, wanted, target.name),
        )


def plain_name(name: str) -> str:
    """The last part of a name, without revision, file type and what says how a file is quantised."""
    last = name.rstrip("/").rsplit("/", 1)[-1].lower().split("@")[0]
    return _QUANTISED.sub("", last.removesuffix(".gguf"))
