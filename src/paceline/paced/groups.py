"""Target and drafter that answer from a world, and the wait that makes a pass as long as it should be."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterable, Sequence

from paceline.core.drafting import DrafterNeeds
from paceline.core.token_tree import ROOT, TokenTree
from paceline.core.work import RunTarget, StepDone, TargetItem, Verdict
from paceline.drafters.tree_drafter import CandidateModel, Candidates, DraftSequence, Leaf
from paceline.engine.executor import Target
from paceline.paced.world import Text, World


class PassTimes:
    """Seconds of a pass by how many tokens it computes: linear between the points given, constant outside."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self._points = sorted(points)

    def of(self, tokens: int) -> float:
        below = [point for point in self._points if point[0] <= tokens]
        above = [point for point in self._points if point[0] > tokens]
        if not below or not above:
            return (below[-1] if below else above[0])[1]
        (left, low), (right, high) = below[-1], above[0]
        return low + (high - low) * (tokens - left) / (right - left)


class TraceTarget:
    """Greedy only: what it chooses is the world's."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._texts: dict[str, Text] = {}

    def run(self, work: RunTarget) -> StepDone:
        for item in work.items:
            if item.announcement is not None:
                told = item.announcement
                self._texts[item.request_id] = self._world.text(told.tokens[: told.num_prompt])
        return StepDone(work.step, tuple(self._verdict(item) for item in work.items if item.sample))

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._texts.pop(request_id, None)

    def close(self) -> None:
        """Nothing is held."""

    def _verdict(self, item: TargetItem) -> Verdict:
        text = self._texts[item.request_id]
        tree = TokenTree.build(item.tree_tokens, item.tree_parents)
        root = item.start + len(item.tokens)

        def target_token(node: int) -> int:
            last = tree.tokens[node] if node != ROOT else item.tokens[-1]
            return text.target_token(root + tree.depth(node), last)

        path, tokens = tree.walk(target_token)
        return Verdict(item.request_id, tuple(path), tuple(tokens))


class TraceCandidates:
    """A draft model whose candidates are the world's."""

    def __init__(self, world: World, context_length: int) -> None:
        self.needs = DrafterNeeds("trace", context_length=context_length)
        self._world = world
        self._texts: dict[str, Text] = {}

    def problem(self, sequence: DraftSequence) -> str | None:  # noqa: ARG002
        return None

    def moved(self, sequence: DraftSequence, accepted: Sequence[int], place: dict[int, int]) -> None:
        """No KV, nothing to move."""

    def advance(self, sequences: Sequence[DraftSequence]) -> bool:  # noqa: ARG002
        return False

    def expand(self, leaves: Sequence[Leaf]) -> list[Candidates | None]:
        return [self._candidates(leaf) for leaf in leaves]

    def forget(self, sequence: DraftSequence) -> None:
        self._texts.pop(sequence.request_id, None)

    def _candidates(self, leaf: Leaf) -> Candidates:
        sequence, tree = leaf.sequence, leaf.sequence.draft.tree
        text = self._texts.get(sequence.request_id)
        if text is None:
            text = self._world.text(sequence.tokens[: sequence.num_prompt])
            self._texts[sequence.request_id] = text
        last = tree.tokens[leaf.node] if leaf.node != ROOT else sequence.tokens[-1]
        position = len(sequence.tokens) + tree.depth(leaf.node)
        return Candidates(*text.candidates(position, last, leaf.count))


class PacedTarget:
    """Makes every pass of `inner` last as long as `times` says."""

    def __init__(self, inner: Target, times: PassTimes) -> None:
        self._inner = inner
        self._times = times

    def run(self, work: RunTarget) -> StepDone:
        began = time.perf_counter()
        tokens = sum(len(item.tokens) + len(item.tree_tokens) for item in work.items)
        done = self._inner.run(work)
        wait_until(began + self._times.of(tokens))
        return done

    def release(self, request_ids: Iterable[str]) -> None:
        self._inner.release(request_ids)

    def close(self) -> None:
        self._inner.close()


class PacedCandidates:
    """Makes every pass of `inner` last as long as `times` says."""

    def __init__(self, inner: CandidateModel, times: PassTimes) -> None:
        self.needs = inner.needs
        self._inner = inner
        self._times = times

    def problem(self, sequence: DraftSequence) -> str | None:
        return self._inner.problem(sequence)

    def moved(self, sequence: DraftSequence, accepted: Sequence[int], place: dict[int, int]) -> None:
        self._inner.moved(sequence, accepted, place)

    def advance(self, sequences: Sequence[DraftSequence]) -> bool:
        began = time.perf_counter()
        read = self._inner.advance(sequences)
        if read:
            wait_until(began + self._times.of(1))
        return read

    def expand(self, leaves: Sequence[Leaf]) -> list[Candidates | None]:
        began = time.perf_counter()
        found = self._inner.expand(leaves)
        wait_until(began + self._times.of(len(leaves)))
        return found

    def forget(self, sequence: DraftSequence) -> None:
        self._inner.forget(sequence)


_PR_SET_TIMERSLACK = 29
_thread = threading.local()


def wait_until(moment: float) -> None:
    """Sleeps, so that other threads run as they would beside a device, and wakes at once, as one wakes who is
    told by a device: Linux may let a thread sleep 50 microseconds longer than asked (prctl(2)) unless told
    otherwise."""
    if not getattr(_thread, "punctual", False):
        _thread.punctual = True
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)
