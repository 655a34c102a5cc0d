"""The loop: every cell that is not finished yet, contender after contender, repeat after repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.bench.matrix import Load, turns
from paceline.bench.prompts import Workload
from paceline.bench.records import Cell
from paceline.bench.settings import Settings
from paceline.bench.store import CellStore, key_of

_ATTEMPTS = 3


class Session(Protocol):
    def measure(self, key: str, workload: Workload, load: Load, repeat: int) -> Cell: ...


class Measured(Protocol):
    """Something that takes requests: an engine with a drafter, or a server."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> Mapping[str, Any]:
        """All of it that figures depend on, as JSON."""
        ...

    def started(self) -> AbstractContextManager[Session]: ...


@dataclass(frozen=True, slots=True)
class Matrix:
    """by: see `matrix.turns`."""

    contenders: Sequence[Measured]
    workloads: Sequence[Workload]
    loads: Sequence[Load]
    repeats: int
    settings: Settings
    by: str = "workload"

    def keys(self) -> Iterator[str]:
        for contender in self.contenders:
            for workload in self.workloads:
                for load in self.loads:
                    yield from (self.key(contender, workload, load, at) for at in range(self.repeats))

    def key(self, contender: Measured, workload: Workload, load: Load, repeat: int) -> str:
        return key_of(
            {
                "contender": {"name": contender.name, **contender.description},
                "workload": {"name": workload.name, "digest": workload.digest},
                "load": {"batch": load.batch, "rate": load.rate, "burstiness": load.burstiness},
                "repeat": repeat,
                "settings": self.settings.description,
            }
        )

    def finished(self, store: CellStore) -> list[Cell]:
        """Of this matrix, in its order; cells of another one, or of another version, are left alone."""
        return [cell for key in self.keys() if (cell := store.get(key)) is not None]


def _undisturbed(session: Session, key: str, workload: Workload, load: Load, repeat: int) -> Cell:
    """Measured again where the process stood still; the last attempt is kept, and a check tells of it."""
    for _ in range(_ATTEMPTS - 1):
        cell = session.measure(key, workload, load, repeat)
        if not cell.disturbed:
            return cell
    return session.measure(key, workload, load, repeat)


def run(matrix: Matrix, store: CellStore, done: Callable[[Cell], None]) -> None:
    """Measures what `store` lacks, and again what had a request that failed: the server may be back. done:
    told of each cell once it is on disk."""
    contenders = {each.name: each for each in matrix.contenders}
    workloads = {each.name: each for each in matrix.workloads}
    for repeat, name, stretch in turns(list(contenders), list(workloads), matrix.repeats, matrix.by):
        contender = contenders[name]
        missing = [
            (key, workloads[workload], load)
            for workload in stretch
            for load in matrix.loads
            if (found := store.get(key := matrix.key(contender, workloads[workload], load, repeat))) is None
            or found.failed
        ]
        if not missing:
            continue
        with contender.started() as session:
            for key, workload, load in missing:
                cell = _undisturbed(session, key, workload, load, repeat)
                store.add(cell)
                done(cell)
