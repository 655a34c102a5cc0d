"""Past outputs on disk: they come back, and what is not ours is refused with a remedy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import SpeculationConfig
from paceline.core.suffix_cache import SuffixCache
from paceline.core.work import FinishedOutput
from paceline.drafters import suffix_file
from paceline.drafters.suffix import configured
from paceline.drafters.suffix_file import SuffixFile
from paceline.errors import ConfigError


def cache() -> SuffixCache:
    return SuffixCache(8, 5, 2**20)


def file(path: Path, **changes: Any) -> SuffixFile:
    fields = {"sharing": "tenant", "vocabulary": "abc", "vocab_size": 50, **changes}
    return SuffixFile(path, **fields)


def written(path: Path) -> Path:
    full = cache()
    for number in range(7):
        full.add([number, 2, 3], "one" if number % 2 else "other")
    file(path).write(full)
    return path


def test_outputs_come_back_in_order_with_their_tenants(tmp_path: Path) -> None:
    again = cache()
    file(written(tmp_path / "past")).read(again)
    assert [(text.tolist(), tenant) for text, tenant in again.texts()] == [
        ([number, 2, 3], "one" if number % 2 else "other") for number in range(2, 7)
    ]
    assert again.catch_up(100) == 0, "all of it is found at once"
    assert sorted(os.listdir(tmp_path)) == [".past.lock", "past"]


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    assert written(tmp_path / "past").stat().st_mode & 0o077 == 0


def test_an_empty_cache_can_be_kept_and_none_need_be_there(tmp_path: Path) -> None:
    again = cache()
    file(tmp_path / "none").read(again)
    file(tmp_path / "none").write(again)
    file(tmp_path / "none").read(again)
    assert len(again) == 0


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"vocabulary": "abd"}, "another vocabulary"),
        ({"sharing": "shared"}, "not kept with speculation.suffix_cache = shared"),
        ({"vocab_size": 4}, "tokens that the model does not have"),
    ],
)
def test_outputs_of_another_kind_are_refused(tmp_path: Path, changes: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=f"{cause}.*remove it, or name another file"):
        file(written(tmp_path / "past"), **changes).read(cache())


@pytest.mark.parametrize("keep", [0, 10, 200, -30])
def test_a_broken_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = written(tmp_path / "past")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"cannot be read.*remove it"):
        file(path).read(cache())


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "past.npy", np.arange(3))
    with pytest.raises(ConfigError, match=r"cannot be read.*remove it"):
        file(tmp_path / "past.npy").read(cache())


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "past")
    data = bytearray(path.read_bytes())
    at = data.index(np.array([2, 2, 3, 3, 2, 3], dtype=np.int32).tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="cannot be read"):
        file(path).read(cache())


def test_a_damaged_file_that_another_program_packed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "past.npz"
    np.savez_compressed(path, tokens=np.arange(4000, dtype=np.int32))
    data = bytearray(path.read_bytes())
    data[60:200] = b"\xff" * 140
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"cannot be read.*remove it"):
        file(path).read(cache())


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"version": np.array(2)}, "not of version 1"),
        ({"lengths": np.array([3, 4])}, "do not fit"),
        ({"lengths": np.array([-1, 4, 12])}, "do not fit"),
        ({"tokens": np.zeros(15)}, "do not fit"),
        ({"tokens": np.full(15, -1, np.int32)}, "does not have"),
        ({"tokens": np.array([{}], dtype=object)}, "cannot be read"),
    ],
)
def test_parts_that_make_no_sense_are_refused(tmp_path: Path, changes: dict[str, Any], cause: str) -> None:
    path = written(tmp_path / "past.npz")
    with np.load(path) as archive:
        parts = {**{name: archive[name] for name in archive.files}, **changes}
    np.savez(path, **parts)
    with pytest.raises(ConfigError, match=cause):
        file(path).read(cache())


def test_a_folder_that_is_not_there_is_noticed_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        file(tmp_path / "missing" / "past")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no folder that nobody may write to")
def test_where_nothing_can_be_written_is_noticed_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"no file can be written in /proc: .*\. Allow it, or name another"):
        file(Path("/proc/past"))


# ---------------------------------------------------------------- several engines


def kept(path: Path) -> list[list[int]]:
    whole = cache()
    file(path).read(whole)
    return [text.tolist() for text, _ in whole.texts()]


def test_two_engines_keep_the_outputs_of_both(tmp_path: Path) -> None:
    path = tmp_path / "past"
    start = cache()
    start.add([1, 1], "one")
    file(path).write(start)
    engines = [(file(path), cache()) for _ in range(2)]
    for own, outputs in engines:
        own.read(outputs)
    for number, (own, outputs) in enumerate(engines, 2):
        outputs.add([number, number], "one")
        own.write(outputs)
    assert kept(path) == [[1, 1], [2, 2], [3, 3]]


def test_the_latest_are_kept_of_more_than_there_is_room_for(tmp_path: Path) -> None:
    path = tmp_path / "past"
    engines = [(file(path), cache()) for _ in range(2)]
    for first, (own, outputs) in zip((0, 10), engines, strict=True):
        for number in range(first, first + 4):
            outputs.add([number, number], "one")
        own.write(outputs)
    assert kept(path) == [[number, number] for number in (3, 10, 11, 12, 13)]


def test_of_many_that_write_at_once_none_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "past"
    command = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, str(number)]) for number in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    whole = SuffixCache(8, 100, 2**20)
    file(path, sharing="shared").read(whole)
    assert sorted(text.tolist() for text, _ in whole.texts()) == [
        [number, again] for number in range(4) for again in range(5)
    ]


WRITER = """
import sys
from pathlib import Path
from paceline.config import SpeculationConfig
from paceline.core.suffix_cache import SuffixCache
from paceline.core.work import FinishedOutput
from paceline.drafters import suffix_file
from paceline.drafters.suffix import configured
from paceline.drafters.suffix_file import SuffixFile
for again in range(5):
    cache = SuffixCache(8, 100, 2**20)
    file = SuffixFile(Path(sys.argv[1]), "shared", "abc", 50)
    file.read(cache)
    cache.add([int(sys.argv[2]), again])
    file.write(cache)
"""

HOLDER = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_who_holds_the_file_is_waited_for_and_may_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, outputs = tmp_path / "past", cache()
    outputs.add([1, 2], "one")
    command = [sys.executable, "-c", HOLDER, str(tmp_path / ".past.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        monkeypatch.setattr(suffix_file, "_PATIENCE_S", 0.1)
        with pytest.raises(OSError, match="lock"):
            file(path).write(outputs)
        holder.kill()
    file(path).write(outputs)
    assert kept(path) == [[1, 2]]


def test_one_of_another_kind_that_took_its_place_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "past"
    drafters = [
        configured(SpeculationConfig(suffix_cache=sharing, suffix_cache_file=str(path)), lambda: "abc", 50)
        for sharing in ("shared", "tenant")
    ]
    for drafter in drafters:
        drafter.learn([FinishedOutput([1, 2, 3], "one")])
        drafter.close()
    assert "outputs of this run are not kept" in caplog.text
    assert "was not kept with speculation.suffix_cache = tenant" in caplog.text
    whole = cache()
    file(path, sharing="shared").read(whole)
    assert len(whole) == 1
