"""Builds the C++ kernels once per machine and source version, and loads them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from paceline.cache_dir import cache_dir
from paceline.errors import KernelError

_SOURCE = Path(__file__).parent
_COMPILERS = ("g++", "c++", "clang++")
# Contraction is off so that a sum has the same bits in every loop it is compiled into; fused multiply-adds
# are written out where they are wanted.
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-w")
_BUILD_SECONDS = 300


def load_library() -> ctypes.CDLL:
    """The compiled kernels, built now if this machine has no build of this source yet.

    Raises KernelError when there is no compiler, it fails, or the result cannot be stored or loaded.
    """
    return _load(str(cache_dir()), os.environ.get("CXX", ""))


@functools.cache
def _load(cache: str, _cxx: str) -> ctypes.CDLL:
    library = build(Path(cache))
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelError(
            f"cannot load {library}: {error}. Delete that file so that it is built again."
        ) from error


def find_compiler() -> str:
    """Path of `$CXX` or of the first C++ compiler on PATH."""
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else _COMPILERS:
        path = shutil.which(name)
        if path:
            return path
    looked = f"$CXX names {wanted!r}, which is not on PATH" if wanted else "no C++ compiler on PATH"
    raise KernelError(
        f"{looked} (looked for {', '.join(_COMPILERS)}). Install one (Debian: apt install g++) or set CXX; "
        "without one plain torch serves, slower, and int8 weights cannot be used."
    )


def build(cache: Path) -> Path:
    """The library for this source, compiler and processor, compiled into `cache` unless it is there.

    Without a compiler, a library that any compiler built there before will do.

    Any number of processes may build at once: each compiles into a file of its own and renames it into place.
    """
    name = f"kernels-{_source_key()}"
    try:
        compiler = find_compiler()
    except KernelError:
        for built in sorted(cache.glob(f"{name}-*.so")):
            return built
        raise
    sources = sorted(_SOURCE.glob("*.cpp"))
    target = cache / f"{name}-{_compiler_key(compiler)}.so"
    if target.exists():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix="build-") as scratch:
            draft = Path(scratch) / "kernels.so"
            _compile([compiler, *_FLAGS, *map(str, sources), "-o", str(draft)], scratch)
            os.replace(draft, target)
    except OSError as error:
        raise KernelError(
            f"cannot store the compiled kernels in {cache}: {error}. Free some space there, or point "
            "PACELINE_CACHE_DIR at a writable directory."
        ) from error
    return target


def _compile(command: list[str], scratch: str) -> None:
    env = {**os.environ, "TMPDIR": scratch, "LC_ALL": "C"}
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, env=env)
    except subprocess.TimeoutExpired as error:
        raise KernelError(
            f"{command[0]} did not finish within {_BUILD_SECONDS} s; try another CXX."
        ) from error
    if result.returncode == 0:
        return
    if "No space left on device" in result.stderr:
        raise OSError("no space left on device")
    tail = "\n".join(result.stderr.strip().splitlines()[-12:])
    raise KernelError(
        f"{command[0]} could not compile the kernels (exit status {result.returncode}):\n{tail}\n"
        "Try another compiler with CXX (GCC 11 or newer); without one plain torch serves, slower, and int8 "
        "weights cannot be used."
    )


def _source_key() -> str:
    digest = hashlib.sha256("\0".join((*_FLAGS, platform.machine(), _cpu_flags())).encode())
    for path in sorted(_SOURCE.iterdir()):
        if path.suffix in {".cpp", ".h"}:
            digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _compiler_key(compiler: str) -> str:
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(
            f"{compiler} --version failed: {error}. Set CXX to a working C++ compiler."
        ) from error
    return hashlib.sha256(f"{compiler}\0{version}".encode()).hexdigest()[:8]


def _cpu_flags() -> str:
    with (
        contextlib.suppress(OSError),
        open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info,
    ):
        for line in info:
            if line.startswith(("flags", "Features")):
                return line
    return platform.processor()
