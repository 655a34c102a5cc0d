"""Heads that a package ships for a target."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from paceline.errors import ConfigError
from paceline.loading.heads.load import plain_name
from paceline.loading.model import LoadedModel
from paceline.shipped import EMBEDDED_HEAD

_PACKAGES = {"smollm2-135m-instruct": EMBEDDED_HEAD}
"""By the target's name without owner, file type and quantisation: the package whose folder is the head's."""


def shipped_head(target: LoadedModel) -> Path:
    """The folder of the EAGLE-3 head for `target`. Raises ConfigError where there is none, or it is not
    installed."""
    names = [plain_name(target.provenance.source), plain_name(target.name)]
    package = next((_PACKAGES[name] for name in names if name in _PACKAGES), None)
    if package is None:
        raise ConfigError(
            f"speculation.draft is eagle3, but no head is shipped for {target.name}, only for "
            f"{', '.join(_PACKAGES)}: give the folder or Hugging Face id of a head made for it."
        )
    # The head is files only: look, don't import.
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or []) if found else []:
        if (Path(folder) / "config.json").is_file():
            return Path(folder)
    raise ConfigError(
        f"speculation.draft is eagle3, but the head shipped for {target.name} is not installed: install the "
        f"package {package.replace('_', '-')}, or give the folder of a head."
    )
