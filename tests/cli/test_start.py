"""What the command line and the package cost before any model is asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

import paceline
from paceline.cli import _COMMANDS

Run = Callable[..., Result]


def test_help_lists_exactly_the_commands(run: Run) -> None:
    result = run("--help")
    assert result.exit_code == 0
    listed = result.stdout.partition("Commands:")[2].split("\n")
    assert [line.split()[0] for line in listed if line.strip()] == list(_COMMANDS)


@pytest.mark.parametrize("name", list(_COMMANDS))
def test_every_command_exists_and_explains_itself(run: Run, name: str) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"Usage: cli {name}" in result.stdout


def test_version(run: Run) -> None:
    assert run("version").stdout == f"paceline {paceline.__version__}\n"
    assert paceline.__version__ in run("--version").stdout


def test_unknown_command(run: Run) -> None:
    result = run("serv")
    assert result.exit_code == 2
    assert "No such command 'serv'" in result.stderr


@pytest.mark.parametrize(
    "code",
    [
        "import paceline, paceline.config",
        "from paceline.cli import cli; cli(['--help'], standalone_mode=False)",
        "from paceline.cli import cli; cli(['generate', '--help'], standalone_mode=False)",
        "from paceline.cli import cli; cli(['bench', '--help'], standalone_mode=False)",
        "from paceline.cli import cli; cli(['simulate', '--help'], standalone_mode=False)",
        "from paceline.cli import cli; cli(['chat', '--help'], standalone_mode=False)",
        "from paceline.cli import cli; cli(['chat', '--print-config'], standalone_mode=False)",
        "from paceline.cli import cli; cli(['trace', '--help'], standalone_mode=False)",
        "from paceline.cli import cli; cli(['profile', '--help'], standalone_mode=False)",
        "from paceline.cli import cli; cli(['plan', '--help'], standalone_mode=False)",
        "from paceline.cli import cli; "
        "cli(['profile', '--gpu', 'H100', '--target', 'llama-3.1-8b'], standalone_mode=False)",
    ],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    heavy = (
        "{'torch', 'numpy', 'transformers', 'tokenizers', 'huggingface_hub', 'asyncio'} & set(sys.modules)"
    )
    script = f"import sys\n{code}\nprint({heavy} or 'none')"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "none"


def test_every_public_name_can_be_imported() -> None:
    for name in paceline.__all__:
        assert getattr(paceline, name).__name__ == name
    assert set(paceline.__all__) <= set(dir(paceline))


def test_other_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'LLMs'"):
        _ = paceline.LLMs


def test_a_closed_pipe_ends_quietly() -> None:
    code = "import sys; sys.stdin.read(1); from paceline.cli import main; main()"
    command = [sys.executable, "-c", code, "version"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, stderr = process.communicate(b"x")
    assert (process.returncode, stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_line() -> None:
    command = [sys.executable, "-m", "paceline", "version"]
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert re.fullmatch(r"error: .*No space left on device\n", result.stderr)
