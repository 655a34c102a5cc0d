"""What an engine really accepted, from its event log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline import LLM, SamplingParams
from paceline.core.work import StepDone
from paceline.engine.replay import read_log
from paceline.sim.acceptance import RequestTrace


def steps_of(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    **options: object,
) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    """Of each prompt its output, and every later step: tokens generated before, tokens emitted."""
    log = folder / "events.jsonl"
    with LLM(record=log, **options) as llm:  # type: ignore[arg-type]
        outputs = llm.generate([list(each) for each in prompts], params)
    texts = [list(output.token_ids) for output in outputs]
    steps: dict[str, list[tuple[int, int]]] = {output.request_id: [] for output in outputs}
    known = dict.fromkeys(steps, 0)
    for _, event, _ in read_log(log)[1]:
        for verdict in event.verdicts if isinstance(event, StepDone) else ():
            if known[verdict.request_id]:
                steps[verdict.request_id].append((known[verdict.request_id], len(verdict.tokens)))
            known[verdict.request_id] += len(verdict.tokens)
    return texts, [steps[output.request_id] for output in outputs]


def assert_recorded(
    trace: RequestTrace, drafter: str, k: int, output: Sequence[int], steps: Sequence[tuple[int, int]]
) -> int:
    """That the trace says what each step of a real run with `k` guesses emitted; how many were accepted."""
    assert list(trace.output) == list(output)
    accepted = trace.drafters[drafter].accepted
    assert steps
    said = [(place, min(k + 1, accepted[place])) for place, _ in steps]
    assert said == [(place, min(count, len(output) - place)) for place, count in steps]
    return sum(count - 1 for _, count in said)
