"""`start.py`: what it would run, and what it says when it cannot. Nothing is installed here."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
Commands = list[list[str]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, its environment in a folder of the test's."""
    monkeypatch.setenv("PACELINE_VENV", str(tmp_path / "venv"))
    spec = importlib.util.spec_from_file_location("start", ROOT / "start.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ran(start: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Every command that the script would have run; making an environment makes its folder."""
    commands: Commands = []

    def call(command: list[str], **_: object) -> int:
        if command[1:] == ["-c", "import pip"]:
            return 0 if Path(start.VENV).exists() else 1
        if command[1:3] == ["-m", "venv"]:
            Path(start.VENV).mkdir()
        commands.append(command)
        return 0

    def run(command: list[str], cwd: str | None = None) -> int:  # noqa: ARG001
        commands.append(command)
        return 7

    monkeypatch.setattr(start.subprocess, "call", call)
    monkeypatch.setattr(start, "run", run)
    return commands


def test_the_first_run_installs_and_the_second_only_runs(start: ModuleType, ran: Commands) -> None:
    assert start.main([]) == 7
    create, install, model, example = ran
    assert create == [sys.executable, "-m", "venv", "--clear", start.VENV]
    assert install[-2:] == ["--editable", str(ROOT)]
    assert model[-4:] == ["--no-deps", "--editable", start.HEAD, start.EMBEDDED_MODEL]
    assert example == [start.PYTHON, "-m", "paceline", "generate", "--compare", start.PROMPT]
    ran.clear()
    assert start.main(["--max-tokens", "5", "Hello"]) == 7
    assert ran == [[*example[:-1], "--max-tokens", "5", "Hello"]]


def test_the_tests_need_the_development_tools_once(start: ModuleType, ran: Commands) -> None:
    start.main([])
    ran.clear()
    assert start.main(["--test", "-k", "x"]) == 7
    assert ran[0][-2:] == ["--editable", f"{ROOT}[dev]"]
    assert ran[-1] == [start.PYTHON, "-m", "pytest", "-k", "x"]
    ran.clear()
    assert start.main(["--install"]) == 0
    start.main([])
    assert len(ran) == 1


def test_another_project_file_installs_again(
    start: ModuleType, ran: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    start.main([])
    ran.clear()
    monkeypatch.setattr(start, "EMBEDDED_MODEL", "another==1")
    start.main([])
    assert [command[-1] for command in ran[:-1]] == [str(ROOT), "another==1"]


def fail_at(part: str) -> Callable[..., int]:
    def call(command: list[str], **_: object) -> int:
        return int(part in command or "import pip" in command)

    return call


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("venv", "cannot create a virtual environment: .*python3-venv"),
        ("--editable", "pip could not install Paceline: .*no network and a full disk"),
        ("--no-deps", "pip could not install the embedded model"),
    ],
)
def test_what_fails_is_named(
    start: ModuleType, monkeypatch: pytest.MonkeyPatch, part: str, message: str
) -> None:
    monkeypatch.setattr(start.subprocess, "call", fail_at(part))
    with pytest.raises(start.SetupError, match=message):
        start.main([])
    assert not Path(start.STAMP).exists()


def test_a_folder_with_other_things_is_left_alone(start: ModuleType) -> None:
    precious = Path(start.VENV) / "thesis.txt"
    precious.parent.mkdir()
    precious.write_text("x")
    with pytest.raises(start.SetupError, match="is not empty and not a virtual environment"):
        start.main([])
    assert precious.exists()


def test_an_old_python_is_told_so(start: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start.sys, "version_info", (3, 8, 10))
    with pytest.raises(start.SetupError, match=r"is Python 3\.8\.10, Paceline needs 3\.11 or newer"):
        start.main([])


def test_an_old_python_can_read_the_script() -> None:
    ast.parse((ROOT / "start.py").read_text(encoding="utf-8"), feature_version=(3, 7))


def test_help(start: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert start.main(["--help"]) == 0
    assert "--test" in capsys.readouterr().out
