"""The simulated target: its tokens are recorded, its passes take what the costs say."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.token_tree import TokenTree
from paceline.core.work import RunTarget, StepDone, TargetItem, Verdict
from paceline.sim.costs.forms import PassShape, ShapedPassTime
from paceline.sim.costs.model import CostModel
from paceline.sim.run.requests import SimRequest

_NO_TOKEN = -1


class SimTarget:
    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        # Asked once: what a protocol promises takes longer to be looked up than a pass to be priced.
        self._shaped = costs.target if isinstance(costs.target, ShapedPassTime) else None
        self._known: dict[str, tuple[int, Sequence[int]]] = {}

    def arrives(self, request: SimRequest) -> None:
        self._known[request.request_id] = (
            len(request.prompt),
            (*request.output, *request.after) if request.after else request.output,
        )

    def leaves(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    def seconds(self, work: RunTarget) -> float:
        if self._shaped is not None:
            return self._shaped.seconds_of(shape_of(work))
        new = context = 0
        for item in work.items:
            new += len(item.tokens) + len(item.tree_tokens)
            context += item.start
        return self._costs.target.seconds(new, context, len(work.items))

    def overhead_s(self, work: RunTarget) -> float:
        return self._costs.overhead_s(len(work.items))

    def answer(self, work: RunTarget, seconds: float, ended: float) -> StepDone:
        verdicts = tuple(self._verdict(item) for item in work.items if item.sample)
        return StepDone(work.step, verdicts, seconds, ended)

    def _verdict(self, item: TargetItem) -> Verdict:
        num_prompt, output = self._known[item.request_id]
        at = item.start + len(item.tokens) - num_prompt
        if not item.tree_tokens:  # what `walk` finds in an empty tree
            return Verdict(item.request_id, (), (output[at],))
        tree = TokenTree.build(item.tree_tokens, item.tree_parents)
        path, tokens = tree.walk(lambda node: _token(output, at + tree.depth(node)))
        return Verdict(item.request_id, tuple(path), tuple(tokens))


def shape_of(work: RunTarget) -> PassShape:
    return PassShape.of(
        (
            len(item.tokens) + len(item.tree_tokens),
            item.start,
            1 + len(item.tree_tokens) if item.sample else 0,
        )
        for item in work.items
    )


def _token(output: Sequence[int], at: int) -> int:
    """Beyond what is known no guess is right, and the answer is over."""
    return output[at] if at < len(output) else _NO_TOKEN


def decodes(work: RunTarget) -> bool:
    """Whether no item of the pass reads a prompt."""
    return all(item.sample and len(item.tokens) == 1 for item in work.items)
