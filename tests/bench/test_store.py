"""Finished cells survive a kill, and none is used for what it was not measured with."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.bench import store as store_module
from paceline.bench.store import CELLS, CellStore, key_of
from paceline.errors import ConfigError

from .cells import cell


def test_cells_come_back_as_they_were(tmp_path: Path) -> None:
    CellStore(tmp_path).add(cell(key="a"))
    assert list(CellStore(tmp_path)) == [cell(key="a")]


def test_a_line_cut_by_a_kill_is_forgotten_and_the_next_is_whole(tmp_path: Path) -> None:
    first = CellStore(tmp_path)
    first.add(cell(key="a"))
    first.add(cell(key="b"))
    content = first.path.read_bytes()
    first.path.write_bytes(content[:-20])
    again = CellStore(tmp_path)
    assert again.get("b") is None
    again.add(cell(key="c"))
    assert [each.key for each in CellStore(tmp_path)] == ["a", "c"]


def test_a_line_that_is_no_cell_is_named(tmp_path: Path) -> None:
    CellStore(tmp_path).add(cell())
    with (tmp_path / CELLS).open("ab") as file:
        file.write(b'{"key": 1}\n')
    with pytest.raises(ConfigError, match=r"cells.jsonl, line 2 is no cell .*delete the line"):
        CellStore(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose another --out"):
        CellStore(tmp_path / "file")


def test_keys_follow_the_description_and_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    one = key_of({"a": 1, "b": {"c": 2.5}})
    assert one == key_of({"b": {"c": 2.5}, "a": 1})
    assert one != key_of({"a": 1, "b": {"c": 2.6}})
    monkeypatch.setattr(store_module, "code_digest", lambda: "another")
    assert one != key_of({"a": 1, "b": {"c": 2.5}})
