"""Rules of the house that no linter holds."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import paceline

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))
NATIVE = sorted(path for ending in ("*.cpp", "*.h", "*.cu") for path in (ROOT / "src").rglob(ending))
MOST_LINES_PER_FILE = 400
MOST_LINES_PER_FUNCTION = 60

# Written so that this file does not hold what it looks for.
PRIVATE = re.compile(
    "|".join(
        [
            r"(?<![\w.~])/(?:root|home|work|Users)/\w",
            r"/opt/(?:wheels|pypi)",
            r"py[p]i\.org",
            r"python[h]osted",
            r"download\.py[t]orch",
            r"registry\.npm[j]s",
            r"deb\.[d]ebian",
            r"proxy\.go[l]ang",
        ]
    )
)


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.mark.parametrize("name", names(SOURCES + NATIVE))
def test_files_fit_a_head(name: str) -> None:
    lines = len((ROOT / name).read_text(encoding="utf-8").splitlines())
    assert lines <= MOST_LINES_PER_FILE, f"{name} has {lines} lines: split it."


@pytest.mark.parametrize("name", names(SOURCES))
def test_functions_fit_a_screen(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text(encoding="utf-8"), name)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    too_long = [
        f"{name}:{node.lineno} {node.name} has {length} lines"
        for node in functions
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MOST_LINES_PER_FUNCTION
    ]
    assert not too_long


def tracked_files() -> list[Path]:
    """What the repository holds, or, without git, what lies in its folders."""
    try:
        command = ["git", "-C", str(ROOT), "ls-files", "-z"]
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
        paths = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        folders = ("src", "tests", "docs", "benchmarks")
        paths = [path for folder in folders for path in (ROOT / folder).rglob("*")] + list(ROOT.glob("*.*"))
    return [path for path in paths if path.is_file()]


def test_nothing_names_a_private_path_or_a_registry_host() -> None:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += [
            f"{path.relative_to(ROOT)}:{number}: {match.group()}"
            for number, line in enumerate(text.splitlines(), 1)
            if (match := PRIVATE.search(line))
        ]
    assert not found


def test_the_version_is_written_once_in_truth() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == paceline.__version__


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(d for extra in project["optional-dependencies"].values() for d in extra),
    ]
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    needed = [re.split(r"[<>=\[ ]", line)[0] for line in wanted]
    assert [name for name in needed if f"`{name}`" not in page] == []


def test_start_installs_the_model_that_the_project_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (model,) = project["optional-dependencies"]["embedded"]
    assert f'EMBEDDED_MODEL = "{model}"' in (ROOT / "start.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/dependencies.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", text)]
    missing = [
        target
        for target in targets
        if target and "://" not in target and not ((ROOT / page).parent / target).exists()
    ]
    assert not missing
