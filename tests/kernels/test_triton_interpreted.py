"""Runs the checks of `interpreted/` in a process that imports Triton as an interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not published for this system")
FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.slow
def test_the_kernels_agree_with_the_specification_when_interpreted() -> None:
    checks = sorted(map(str, FOLDER.glob("check_*.py")))
    assert len(checks) == 5
    # The interpreter computes in numpy, which warns of the infinities that a GPU just makes.
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *checks],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=FOLDER.parent.parent.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-1000:]
