"""Where Paceline keeps what it can make again: converted models and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path


def cache_dir() -> Path:
    """The cache folder: `PACELINE_CACHE_DIR` if set, else the user's cache folder. It may not exist yet."""
    override = os.environ.get("PACELINE_CACHE_DIR")
    return Path(override).expanduser() if override else user_cache_path("paceline")
