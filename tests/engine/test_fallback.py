"""A machine without a compiler: slower, said so, and the same tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import write_random

SCRIPT = """
import json, logging, sys
logging.basicConfig(level=logging.WARNING)
from paceline import LLM, SamplingParams
options = {"dtype": "float32", "threads": 1, **json.loads(sys.argv[2])}
prompts = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11] * 6]
params = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
with LLM(sys.argv[1], draft="none", max_num_seqs=1, **options) as plain:
    expected = [output.token_ids for output in plain.generate(prompts, params)]
with LLM(sys.argv[1], draft="ngram", num_speculative_tokens=4, **options) as fast:
    outputs = fast.generate(prompts, params)
print(json.dumps([expected, [output.token_ids for output in outputs]]))
"""


def run(model: Path, cache: Path, compiler: str, **options: object) -> subprocess.CompletedProcess[str]:
    # A process of its own: kernels that were loaded once stay loaded.
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), json.dumps(options)],
        env={"PATH": "/usr/bin:/bin", "CXX": compiler, "PACELINE_CACHE_DIR": str(cache), "HOME": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("fallback") / "random")


def test_without_a_compiler_plain_torch_gives_the_same_tokens(model: Path, tmp_path: Path) -> None:
    missing = run(model, tmp_path / "none", "no-such-compiler", exact=True)
    assert missing.returncode == 0, missing.stderr
    assert "no-such-compiler" in missing.stderr
    assert "Falling back to plain torch" in missing.stderr
    plain, speculative = json.loads(missing.stdout)
    assert plain == speculative
    native = run(model, tmp_path / "native", "g++")
    assert native.returncode == 0, native.stderr
    assert json.loads(native.stdout)[0] == plain


def test_int8_needs_the_kernels(model: Path, tmp_path: Path) -> None:
    refused = run(model, tmp_path, "no-such-compiler", dtype="int8")
    assert refused.returncode != 0
    assert "int8 weights need them" in refused.stderr
    assert "dtype = float32" in refused.stderr
