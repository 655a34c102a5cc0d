"""What the events of an engine say of its two lanes: when each ran, and whether the drafter is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.core.stats import DrafterReport
from paceline.core.work import (
    DraftDone,
    DrafterJoined,
    DrafterLost,
    Event,
    NodesDrafted,
    RequestArrived,
    RequestDelta,
    RunTarget,
    StepDone,
    Work,
    WorkLost,
)
from paceline.engine.draft_group import DraftGroupStats
from paceline.engine.outputs import LaneStats, ModelMemory
from paceline.engine.timeline import Timeline
from paceline.modes import MODES


def priced(
    drafters: Sequence[DrafterReport], lanes: LaneStats, memory: Sequence[ModelMemory]
) -> tuple[DrafterReport, ...]:
    """With what each costs. memory: of each, or of none where it is not known."""
    if len(drafters) == 1 and lanes.placement == "disaggregated":  # nobody asks it: its lane says more
        drafters = [replace(drafters[0], seconds=lanes.draft_busy_s)]
    worked_s = lanes.target_busy_s + sum(each.seconds for each in drafters)
    known = memory or [ModelMemory()] * len(drafters)
    return tuple(
        replace(
            each,
            weight_bytes=bytes_.weight_bytes,
            kv_bytes_per_token=bytes_.kv_bytes_per_token,
            feature_bytes_per_token=bytes_.feature_bytes_per_token,
            share_of_step=each.seconds / worked_s if worked_s > 0 else None,
        )
        for each, bytes_ in zip(drafters, known, strict=True)
    )


class LaneRecord:
    """group: of a drafter in a process of its own, which knows of its loss before the engine asks.
    mode, placement: see `LaneStats`."""

    def __init__(self, mode: str, placement: str, group: DraftGroupStats | None) -> None:
        self.timeline = Timeline()
        self._mode, self._placement = mode, placement
        self._group = group
        self._heard = DraftGroupStats()
        self._lost = False
        self._passes: dict[int, tuple[int, int]] = {}
        self._sample_s = 0.0

    def note(self, now: float, event: Event, work: Sequence[Work], *, idle: bool) -> None:
        """work: what the core asked for after `event`.  idle: whether it has no request left."""
        match event:
            case StepDone():
                self._target_pass(event, goes_on=not idle)
            case DraftDone(proposals=made) if event.seconds:
                self._draft_pass(now, event.seconds, [(each.request_id, each.tokens) for each in made])
            case NodesDrafted(grown=made) if event.seconds:
                self._draft_pass(now, event.seconds, [(each.request_id, each.tokens) for each in made])
            case RequestArrived():
                self.timeline.moment(now, f"{event.request_id} arrives", prompt_tokens=len(event.prompt))
            case DrafterLost() | DrafterJoined():
                self._drafter_event(now, event)
            case WorkLost():
                self._passes.clear()
        if idle:
            self.timeline.pause()
        for item in work:
            if isinstance(item, RunTarget):
                rows = [(len(each.tokens), len(each.tree_tokens)) for each in item.items]
                guesses = sum(count for _, count in rows)
                self._passes[item.step] = (sum(count for count, _ in rows) + guesses, guesses)

    def note_end(self, now: float, delta: RequestDelta) -> None:
        self.timeline.moment(now, f"{delta.request_id} ends", finish_reason=str(delta.finish_reason))

    def _target_pass(self, event: StepDone, *, goes_on: bool) -> None:
        rows, guesses = self._passes.pop(event.step, (0, 0))
        self._sample_s += event.sample_seconds
        if event.seconds:
            made = tuple((verdict.request_id, verdict.tokens) for verdict in event.verdicts)
            self.timeline.target_pass(
                event.ended - event.seconds, event.ended, rows, goes_on=goes_on, guesses=guesses, made=made
            )

    def _draft_pass(self, now: float, seconds: float, made: list[tuple[str, tuple[int, ...]]]) -> None:
        tokens = sum(len(ids) for _, ids in made)
        self.timeline.draft_pass(now - seconds, now, tokens, made=tuple(made))

    def _drafter_event(self, now: float, event: DrafterLost | DrafterJoined) -> None:
        if isinstance(event, DrafterLost):
            self._lost = True
            self._heard.losses += 1
            self._heard.last_loss = event.reason
            self.timeline.moment(now, "drafter lost", reason=event.reason)
        else:
            self._lost = False
            self._heard.joins += 1
            self.timeline.moment(now, "drafter back")

    def stats(self) -> LaneStats:
        target, draft, gaps = self.timeline.target, self.timeline.draft, self.timeline.gaps
        told = self._group or self._heard
        busy_s, idle_share = draft.busy_s, self.timeline.draft_idle_share
        mode = MODES.get(self._mode)
        if self._group is not None and mode is not None and mode.ahead == "silent":
            # Most of its passes are never told of one by one; the worker itself keeps account of them.
            busy_s, idle_share = self._group.busy_s, self._group.idle_share
        return LaneStats(
            mode=self._mode,
            placement=self._placement,
            target_passes=target.count,
            target_busy_s=target.busy_s,
            target_gap_median_s=gaps.median_s if gaps else None,
            target_gap_p99_s=gaps.p99_s if gaps else None,
            draft_passes=draft.count,
            draft_busy_s=busy_s,
            draft_idle_share=idle_share,
            drafted_by_distance=dict(self._group.by_distance) if self._group is not None else {},
            drafter_losses=max(told.losses, self._heard.losses),
            drafter_joins=told.joins,
            drafter_away=self._lost or told.losses > told.joins,
            drafter_loss_reason=told.last_loss or self._heard.last_loss or None,
            sample_s=self._sample_s,
        )
