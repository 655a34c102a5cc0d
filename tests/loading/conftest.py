from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test converts into a cache of its own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(folder))
    return folder
