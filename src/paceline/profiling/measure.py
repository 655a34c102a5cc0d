"""Times of passes, questions and steps on a rig. Cells are measured in rounds, each in an order of its own,
so that a machine that changes its pace favours none; of each cell the median counts, which one disturbance
does not move."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from paceline.engine.engine import Engine
from paceline.profiling.fit import DraftSample, PassSample
from paceline.profiling.plan import CHUNK, DraftCell, PassCell, Plan
from paceline.profiling.rig import GREEDY, Rig, Text

Progress = Callable[[float, str], None]
"""Told the share that is done, and what is being done."""

Cell = TypeVar("Cell")
_SEED = 17
_MOST_OVER = 3
_SHARES = {"passes": 0.4, "drafts": 0.45, "steps": 0.15}
"""Of what is left of the budget when the texts have been read."""


@dataclass(slots=True)
class _Timed:
    seconds: list[float] = field(default_factory=list)
    asked: list[tuple[float, float, float, float]] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        if len(self.seconds) < 3:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / 2 / self.median

    def mean(self, at: int) -> float:
        return statistics.fmean(row[at] for row in self.asked)


@dataclass(frozen=True, slots=True)
class StepSample:
    """What is left of a step beside passes and drafters. requests: that took part, in the mean."""

    requests: float
    seconds: float


@dataclass(slots=True)
class Measured:
    """uneven: by what is measured, the mean of its times over their medians: what disturbs a few of many
    repetitions no median shows, and a run of many steps has its share of."""

    passes: dict[PassCell, PassSample] = field(default_factory=dict)
    drafts: dict[str, list[DraftSample]] = field(default_factory=dict)
    steps: list[StepSample] = field(default_factory=list)
    rounds: dict[str, int] = field(default_factory=dict)
    uneven: dict[str, float] = field(default_factory=dict)


class Measurement:
    """tokens: of a text that is long enough for a row after row's share of it."""

    def __init__(self, engine: Engine, plan: Plan, tokens: Sequence[int], progress: Progress) -> None:
        self._engine = engine
        self._plan = plan
        self._progress = progress
        length = plan.context_length
        self._rig = Rig(engine, length)
        self._rows = [_turned(tokens, 37 * row, length) for row in range(plan.most_requests)]
        self._random = random.Random(_SEED)
        self.measured = Measured()
        self._began = time.perf_counter()
        self._reading: dict[tuple[int, int], _Timed] = {}
        self._counted = 0  # passes of the engine, up to the newest of its runs

    def run(self) -> Measured:
        self._read_texts()
        left = max(self._plan.budget_s - (time.perf_counter() - self._began), 0.2 * self._plan.budget_s)
        self._passes(left * _SHARES["passes"])
        self._drafts(left * _SHARES["drafts"])
        self._rig.release()
        self._steps(left * _SHARES["steps"])
        return self.measured

    def _texts(self, context: int, count: int) -> list[Text]:
        return [self._rig.text(f"{context}/{row}", row, self._rows[row]) for row in range(count)]

    def _tell(self, text: str) -> None:
        spent = (time.perf_counter() - self._began) / self._plan.budget_s
        self._progress(min(spent, 0.99), text)

    # ------------------------------------------------------------ texts

    def _read_texts(self) -> None:
        """Writes the KV of every row; what the passes take is measured, too."""
        longest = self._plan.contexts[-1]
        for text in self._texts(longest, self._plan.most_requests):
            for start in range(0, longest, CHUNK):
                self._tell("reading texts")
                count = min(CHUNK, longest - start)
                seconds = self._rig.read([text], start, count, sample=False)
                self._reading.setdefault((count, start), _Timed()).seconds.append(seconds)

    # ------------------------------------------------------------ passes

    def _passes(self, budget_s: float) -> None:
        cells = self._plan.passes()
        timed = {cell: _Timed() for cell in cells}

        def measure(cell: PassCell) -> None:
            texts = self._texts(cell.context, cell.requests)
            if cell.prompt:
                seconds = self._rig.read(texts, cell.context, cell.each)
            else:
                seconds = self._rig.verify(texts, cell.context, cell.each - 1)
            timed[cell].seconds.append(seconds)

        for cell in cells[::7]:
            measure(cell)
            timed[cell].seconds.clear()  # the first passes find nothing warm
        self.measured.rounds["passes"] = self._rounds(cells, measure, budget_s, "the target's passes")
        self.measured.passes = {
            cell: PassSample(
                *(cell.new_tokens, cell.kv_tokens, cell.requests, found.median, found.spread),
                rows=cell.requests if cell.prompt else None,
            )
            for cell, found in timed.items()
        }
        self.measured.uneven["target"] = _uneven(timed.values())
        for (count, start), found in self._reading.items():
            cell = PassCell(1, count, start, prompt=True)
            sample = PassSample(count, start, 1, found.median, found.spread, rows=0)
            self.measured.passes.setdefault(cell, sample)

    # ------------------------------------------------------------ drafters

    def _drafts(self, budget_s: float) -> None:
        cells = self._plan.drafts()
        drafters = range(len(self._rig.drafters))
        timed = {(drafter, cell): _Timed() for drafter in drafters for cell in cells}
        told = self._tell_texts()

        def measure(cell: DraftCell) -> None:
            texts = self._texts(cell.context, cell.requests)
            start = texts[0].computed
            if start + cell.unread >= len(self._rows[0]) - CHUNK // 4:
                return  # the text is at its end
            self._rig.read(texts, start, cell.unread)
            for drafter in drafters:
                unread = self._rig.unread(drafter, texts)
                kv = sum(text.computed + 1 for text in texts)
                answer = self._rig.ask(drafter, texts, cell.guesses)
                found = timed[drafter, cell]
                found.seconds.append(answer.seconds)
                found.asked.append((answer.levels, answer.guesses, unread, kv))

        self.measured.rounds["drafts"] = self._rounds(cells, measure, budget_s, "the drafters")
        for drafter in drafters:
            samples = told[drafter]
            for cell in cells:
                found = timed[drafter, cell]
                if found.seconds:
                    features = (found.mean(0), found.mean(1), found.mean(2), found.mean(3))
                    samples.append(DraftSample(cell.requests, *features, found.median, found.spread))
            self.measured.drafts[self._rig.drafters[drafter]] = samples
            asked = [found for (other, _), found in timed.items() if other == drafter]
            self.measured.uneven[self._rig.drafters[drafter]] = _uneven(asked)

    def _tell_texts(self) -> list[list[DraftSample]]:
        """Every text that will be asked about, from its beginning to where it will be asked: alone and with
        others, so that what a request takes is told from what its tokens do."""
        contexts = dict.fromkeys((self._plan.contexts[0], self._plan.contexts[-1]))
        samples: list[list[DraftSample]] = [[] for _ in self._rig.drafters]
        warm = False
        for context in contexts:
            texts = self._texts(context, self._plan.most_requests)
            for text in texts:
                self._rig.read([text], context - 1, 1)
            for some in _grouped(texts):
                for drafter, found in enumerate(samples):
                    self._tell("drafters read texts")
                    answer = self._rig.tell(drafter, some)
                    unread = len(some) * context
                    if warm:
                        found.append(DraftSample(len(some), 0, 0, unread, unread, answer.seconds))
                warm = True  # whoever is told something for the first time makes room for it
        return samples

    # ------------------------------------------------------------ steps

    def _steps(self, budget_s: float) -> None:
        """Short runs of the engine itself; what they take beside passes and drafters is a step's own."""
        end, runs = time.perf_counter() + budget_s, 0
        while runs < 2 or (runs < 5 and time.perf_counter() < end):
            for batch in self._plan.some_batches:
                self._tell("whole steps")
                sample = self._run(batch, runs)
                if runs:  # the first one compiles and makes room
                    self.measured.steps.append(sample)
            runs += 1
        self.measured.rounds["steps"] = runs

    def _run(self, batch: int, turn: int) -> StepSample:
        engine = self._engine
        params = replace(GREEDY, max_tokens=self._plan.run_tokens)
        for index in range(batch):
            prompt = self._rows[index % len(self._rows)][3 * turn : 3 * turn + 32]
            engine.add(f"run {turn} {batch} {index}", index, prompt, params)
        before = engine.lanes
        passes, began, busy = 0, time.perf_counter(), 0
        while not engine.idle:
            busy += len(engine.core.requests)
            passes += 1
            engine.step()
        wall = time.perf_counter() - began
        after = engine.lanes
        inside = after.target_busy_s - before.target_busy_s + after.draft_advance_s - before.draft_advance_s
        asked = sum(each.seconds for each in after.drafters) - sum(each.seconds for each in before.drafters)
        count = max(engine.timeline.target.count - self._counted, 1)
        self._counted = engine.timeline.target.count
        return StepSample(busy / max(passes, 1), max(wall - inside - asked, 0.0) / count)

    # ------------------------------------------------------------ rounds

    def _rounds(
        self, cells: Sequence[Cell], measure: Callable[[Cell], None], budget_s: float, what: str
    ) -> int:
        """At least the fewest rounds that are planned, as long as these do not take several times the budget,
        and more while there is time."""
        fewest, most = self._plan.rounds
        began, done = time.perf_counter(), 0
        while done < most:
            spent = time.perf_counter() - began
            if spent >= budget_s * (1 if done >= fewest else _MOST_OVER) and done > 0:
                break
            order = list(cells)
            self._random.shuffle(order)
            for cell in order:
                self._tell(what)
                measure(cell)
            done += 1
        return done


def _uneven(timed: Iterable[_Timed]) -> float:
    cells = [each for each in timed if each.seconds]
    usual = sum(len(each.seconds) * each.median for each in cells)
    return max(sum(sum(each.seconds) for each in cells) / usual, 1.0) if usual else 1.0


def _turned(tokens: Sequence[int], by: int, length: int) -> list[int]:
    """So many tokens of the text, over and over, from another place on."""
    by %= len(tokens)
    turned = [*tokens[by:], *tokens[:by]]
    return (turned * (length // len(turned) + 2))[: length + CHUNK]


def _grouped(texts: list[Text]) -> list[list[Text]]:
    """Ones, twos and fours, and the rest."""
    groups, at = [], 0
    for size in (1, 1, 2, 4):
        if at < len(texts):
            groups.append(texts[at : at + size])
        at += size
    return [*groups, texts[at:]] if at < len(texts) else groups
