from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.lab import Lab
from tests.tiny import write_random


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for the checkpoints of this run."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def random_model(models: Path) -> Path:
    return write_random(models / "random")


@pytest.fixture(scope="session")
def lab(random_model: Path) -> Lab:
    """The random model with a drafter that follows a rule; for tests that need no engine of their own."""
    return Lab(random_model)
