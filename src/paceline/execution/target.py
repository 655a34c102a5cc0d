"""Executes target passes: mirrors what the core decided, runs the model, returns verdicts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.core.params import SamplingParams
from paceline.core.sampling import Unsampleable, logprobs_of
from paceline.core.token_tree import ROOT, TokenTree
from paceline.core.work import RunTarget, StepDone, TargetItem, TokenLogprobs, Verdict
from paceline.execution.devices import settled
from paceline.execution.forward_batch import Segment, tree_paths
from paceline.execution.model_runner import ModelRunner
from paceline.execution.sampler import Row, SampledRows
from paceline.execution.target_view import ComputedTokens, TargetView


@dataclass(slots=True)
class MirroredSequence:
    """The executor's copy of a request. `tokens` grows by the verdicts given, as the core's does."""

    tokens: list[int]
    num_prompt: int
    params: SamplingParams


class TargetExecutor:
    """Holds no policy: rows and slots are the core's."""

    def __init__(self, runner: ModelRunner, eos_token_ids: Sequence[int]) -> None:
        self._runner = runner
        self._eos = tuple(eos_token_ids)
        self._sequences: dict[str, MirroredSequence] = {}
        self._computed = ComputedTokens(runner)

    @property
    def view(self) -> TargetView:
        return self._computed

    def run(self, work: RunTarget) -> StepDone:
        self._computed.begin()
        for item in work.items:
            self._mirror(item)
        logits = self._runner.forward([_segment(item) for item in work.items])
        sampled = [item for item in work.items if item.sample]
        trees = [TokenTree.build(item.tree_tokens, item.tree_parents) for item in sampled]
        rows = [row for item, tree in zip(sampled, trees, strict=True) for row in self._rows(item, tree)]
        logits, computed = settled(logits), time.perf_counter()
        chosen = SampledRows(logits, rows, self._eos) if rows else None
        verdicts, at = [], 0
        for item, tree in zip(sampled, trees, strict=True):
            assert chosen is not None
            verdicts.append(self._verdict(item, tree, chosen, at))
            at += 1 + len(tree)
        return StepDone(work.step, tuple(verdicts), sample_seconds=time.perf_counter() - computed)

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._sequences.pop(request_id, None)
            self._computed.forget(request_id)

    def close(self) -> None:
        self._runner.close()

    def _mirror(self, item: TargetItem) -> None:
        if item.announcement is not None:
            told = item.announcement
            self._sequences[item.request_id] = MirroredSequence(
                list(told.tokens), told.num_prompt, told.params
            )
        self._runner.tables.write(item.row, item.slots_from, item.slots)
        self._computed.note(item)

    def _rows(self, item: TargetItem, tree: TokenTree) -> list[Row]:
        params = self._sequences[item.request_id].params
        root = item.start + len(item.tokens)
        return [Row(params, root), *(Row(params, root + depth) for depth in tree.depths)]

    def _verdict(self, item: TargetItem, tree: TokenTree, chosen: SampledRows, first: int) -> Verdict:
        sequence = self._sequences[item.request_id]
        problems: list[str] = []

        def target_token(node: int) -> int | None:
            def prefix() -> list[int]:
                return [*sequence.tokens, *(tree.tokens[other] for other in tree.path(node))]

            try:
                return chosen.token(first + 1 + node, prefix, sequence.num_prompt)
            except Unsampleable as problem:
                problems.append(str(problem))
                return None

        path, tokens = tree.walk(target_token)
        sequence.tokens.extend(tokens)
        self._computed.accept(item, path)
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sequence.params.logprobs is not None:
            nodes = [ROOT, *path][: len(tokens)]
            logprobs = tuple(
                logprobs_of(chosen.raw(first + 1 + node), token, sequence.params.logprobs)
                for node, token in zip(nodes, tokens, strict=True)
            )
        error = problems[0] if problems else None
        return Verdict(item.request_id, tuple(path), tuple(tokens), logprobs, error=error)


def _segment(item: TargetItem) -> Segment:
    paths = tree_paths(item.tree_parents, item.tree_slots)
    return Segment(item.row, item.start, item.tokens, item.sample, item.tree_tokens, paths)
