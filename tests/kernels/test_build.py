"""Building the native kernels: cached, safe under concurrency, and clear about what went wrong."""

from __future__ import annotations

import concurrent.futures
import stat
from pathlib import Path

import pytest

from paceline.errors import KernelError
from paceline.kernels.cpu import build

FAKE = """#!/bin/sh
[ "$1" = --version ] && {{ echo fake 1.0; exit 0; }}
echo run >> {log}
while [ "$1" != -o ]; do shift; done
{action}
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make(action: str) -> Path:
        path = tmp_path / "fake-c++"
        path.write_text(FAKE.format(log=tmp_path / "log", action=action))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CXX", str(path))
        return path

    return make


def runs(tmp_path: Path) -> int:
    log = tmp_path / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_builds_once(compiler, tmp_path: Path) -> None:
    compiler('echo library > "$2"')
    first = build.build(tmp_path / "cache")
    assert first.read_text() == "library\n"
    assert build.build(tmp_path / "cache") == first
    assert runs(tmp_path) == 1


def test_another_compiler_is_another_build(compiler, tmp_path: Path) -> None:
    path = compiler('echo library > "$2"')
    first = build.build(tmp_path / "cache")
    path.write_text(path.read_text().replace("fake 1.0", "fake 1.1"))
    assert build.build(tmp_path / "cache") != first


def test_concurrent_builds_agree_and_leave_nothing_behind(compiler, tmp_path: Path) -> None:
    compiler('sleep 0.2; echo library > "$2"')
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(lambda _: build.build(tmp_path / "cache"), range(4)))
    assert len(paths) == 1
    assert list((tmp_path / "cache").iterdir()) == list(paths)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelError, match=r"no C\+\+ compiler on PATH .*Install one"):
        build.build(tmp_path)


def test_a_library_built_earlier_needs_no_compiler(
    compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler('echo library > "$2"')
    first = build.build(tmp_path / "cache")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.build(tmp_path / "cache") == first


def test_cxx_names_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelError, match="'no-such-compiler', which is not on PATH"):
        build.build(tmp_path)


def test_a_compile_error_shows_the_last_lines(compiler, tmp_path: Path) -> None:
    compiler("for i in $(seq 30); do echo line $i >&2; done; exit 3")
    with pytest.raises(KernelError, match="exit status 3") as caught:
        build.build(tmp_path / "cache")
    message = str(caught.value)
    assert "line 30" in message
    assert "line 18" not in message
    assert "CXX" in message
    assert "plain torch serves" in message
    assert not list((tmp_path / "cache").iterdir())


def test_a_full_disk(compiler, tmp_path: Path) -> None:
    compiler("echo 'fatal error: No space left on device' >&2; exit 1")
    with pytest.raises(KernelError, match=r"no space left on device.*Free some space"):
        build.build(tmp_path / "cache")


def test_a_cache_that_cannot_be_written(compiler, tmp_path: Path) -> None:
    compiler('echo library > "$2"')
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelError, match="PACELINE_CACHE_DIR"):
        build.build(tmp_path / "file" / "cache")


def test_a_library_that_cannot_be_loaded(compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler('echo library > "$2"')
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(KernelError, match="Delete that file"):
        build.load_library()


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))
    assert build.cache_dir() == tmp_path
    monkeypatch.delenv("PACELINE_CACHE_DIR")
    assert build.cache_dir().name == "paceline"
