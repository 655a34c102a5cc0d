"""The loop over cells."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.bench.matrix import Load
from paceline.bench.prompts import Workload, workloads_of
from paceline.bench.records import Cell
from paceline.bench.run import Matrix, run
from paceline.bench.settings import Settings
from paceline.bench.store import CellStore
from paceline.core.params import SamplingParams

from .cells import cell


class Disturbed:
    """Stands still for so many seconds, one attempt after the other."""

    name = "none"
    description = {"a": 1}  # noqa: RUF012

    def __init__(self, *stood_still_s: float) -> None:
        self.left = list(stood_still_s)

    @contextmanager
    def started(self) -> Iterator[Disturbed]:
        yield self

    def measure(self, key: str, workload: Workload, load: Load, repeat: int) -> Cell:  # noqa: ARG002
        return cell("none", key=key, stood_still_s=self.left.pop(0))


def found(folder: Path, *stood_still_s: float) -> float | None:
    matrix = Matrix(
        [Disturbed(*stood_still_s)],
        workloads_of(["chat"], None, []),
        [Load(batch=1)],
        1,
        Settings(SamplingParams()),
    )
    store = CellStore(folder)
    run(matrix, store, lambda _: None)
    (kept,) = matrix.finished(store)
    return kept.stood_still_s


def test_a_cell_in_which_the_process_stood_still_is_measured_again(tmp_path: Path) -> None:
    assert found(tmp_path / "one", 0.1, 9.0) == 0.1
    assert found(tmp_path / "two", 9.0, 0.2) == 0.2
    assert found(tmp_path / "three", 9.0, 8.0, 7.0) == 7.0


class Failing(Disturbed):
    """Its first request fails the first time."""

    def measure(self, key: str, workload: Workload, load: Load, repeat: int) -> Cell:
        measured = super().measure(key, workload, load, repeat)
        measured.requests[0].error = "out of memory" if len(self.left) else None
        return measured


def test_a_cell_with_failed_requests_is_measured_again_by_the_same_command(tmp_path: Path) -> None:
    contender = Failing(0.0, 0.0)
    matrix = Matrix(
        [contender], workloads_of(["chat"], None, []), [Load(batch=1)], 1, Settings(SamplingParams())
    )
    for failed in (True, False, False):
        run(matrix, CellStore(tmp_path), lambda _: None)
        (kept,) = matrix.finished(CellStore(tmp_path))
        assert kept.failed is failed
    assert not contender.left
