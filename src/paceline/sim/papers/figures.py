"""The figures of a study (arXiv 2601.11580) computed again, each value beside the published one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from paceline.errors import ConfigError
from paceline.sim.acceptance import TraceSet
from paceline.sim.costs.model import CostModel
from paceline.sim.costs.published import published
from paceline.sim.guesses import NGRAM, head_of
from paceline.sim.papers import real_match, study
from paceline.sim.papers.study import COMBINED, Charge, Setting
from paceline.sim.papers.study_values import DATASETS, HEAD, MEASURED, SIMULATED

Figure = Literal["figure1", "figure10", "figure12"]

_LENGTHS = (1, 3, 5, None)
_SIMULATED_WITHIN = 0.01
_MEASURED_WITHIN: dict[tuple[str, int | None], float] = {(NGRAM, 3): 0.03, (NGRAM, 5): 0.04, (HEAD, 3): 0.06}


class Within(NamedTuple):
    """How far from the published value counts as the same; relative: as a share of that value."""

    most: float
    relative: bool


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a figure. ours, theirs: speed-ups by batch size; theirs is None for what nobody published.

    requests: of the traces that are in it.  within: None = not to be compared.
    """

    traces: str
    drafter: str
    length: str
    batches: tuple[int, ...]
    ours: tuple[float, ...]
    theirs: tuple[float, ...] | None
    within: Within | None
    requests: int

    @property
    def differences(self) -> list[float]:
        """Ours less theirs, or the share by which ours is larger."""
        relative = self.within is not None and self.within.relative
        pairs = zip(self.ours, self.theirs or (), strict=False)
        return [ours / theirs - 1.0 if relative else ours - theirs for ours, theirs in pairs]

    @property
    def agrees(self) -> bool | None:
        if self.within is None or self.theirs is None:
            return None
        return all(abs(each) <= self.within.most for each in self.differences)


def dataset_of(traces: TraceSet) -> str | None:
    """The published data set that a file's name speaks of. Records with a header are of another run."""
    if traces.header is not None:
        return None
    return next((each for each in DATASETS if each in traces.name.lower()), None)


def figure(
    name: Figure, sets: Iterable[TraceSet], *, charge: Charge = "published", costs: CostModel | None = None
) -> Iterator[Row]:
    """Row by row, as they are done. charge: of the oracle over both drafters, in figure 12.
    costs: of figure 1; None = the calibrated ones.

    Raises ConfigError for traces of which nothing in the figure can be computed.
    """
    if charge != "published" and name != "figure12":
        raise ConfigError(f"{name} has no oracle over both drafters to charge: ask for figure12.")
    if costs is not None and name != "figure1":
        raise ConfigError(f"{name} is what others simulated, at their own costs: leave other costs out.")
    for traces in sets:
        if not any(request.output for request in traces.requests):
            raise ConfigError(f"{traces.name}: no request generates a token: give traces with an answer.")
        if name == "figure1":
            yield from _measured(traces, costs or published("llama3.1-8b@h100-calibrated"))
        else:
            yield from _simulated(traces, combined=name == "figure12", charge=charge)


def _head(traces: TraceSet) -> str | None:
    return next((head for request in traces.requests if (head := head_of(request))), None)


def _settings(traces: TraceSet, lengths: Sequence[int | None]) -> list[Setting]:
    drafters = [NGRAM, *filter(None, [_head(traces)])]
    return [Setting(drafter, length) for drafter in drafters for length in lengths]


def _simulated(traces: TraceSet, *, combined: bool, charge: Charge) -> Iterator[Row]:
    dataset = dataset_of(traces)
    settings = _settings(traces, _LENGTHS)
    if combined and _head(traces):
        settings.append(Setting(COMBINED, None))
    found = study.chance_found(dataset, traces.requests)
    for setting in settings:
        usable = study.usable(traces.requests, setting)
        if not usable:
            continue
        ours = study.speedups(usable, setting, found, charge=charge)
        theirs = SIMULATED.get((dataset or "", _series(setting), setting.guesses))
        other = setting.drafter == COMBINED and charge != "published"
        yield Row(
            traces.name,
            f"{COMBINED}, {charge}" if other else setting.drafter,
            setting.length,
            study.BATCHES,
            tuple(ours),
            theirs,
            None if other or theirs is None else Within(_SIMULATED_WITHIN, False),
            min(len(usable), study.SAMPLED),
        )


def _measured(traces: TraceSet, costs: CostModel) -> Iterator[Row]:
    dataset = dataset_of(traces)
    settings = [Setting(NGRAM, 3), Setting(NGRAM, 5)]
    head = _head(traces)
    if head:
        settings.append(Setting(head, 3))
    for setting, found in real_match.predicted(traces.requests, settings, costs).items():
        theirs = MEASURED.get((dataset or "", _series(setting), setting.guesses))
        within = _MEASURED_WITHIN[_series(setting), setting.guesses]
        yield Row(
            traces.name,
            setting.drafter,
            setting.length,
            real_match.BATCHES,
            tuple(found.speedups),
            theirs,
            Within(within, True) if theirs else None,
            found.requests,
        )


def _series(setting: Setting) -> str:
    return setting.drafter if setting.drafter in (NGRAM, COMBINED) else HEAD
