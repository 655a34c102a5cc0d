"""What a drafter reads of the target between passes: by the core's own work, whatever becomes of slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.draft_lane import DraftPolicy
from paceline.core.drafting import DrafterNeeds, FixedLength
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.params import SamplingParams
from paceline.core.scheduler import Limits
from paceline.core.token_tree import ROOT
from paceline.core.work import DraftItem, Event, Proposal, RequestArrived, RunTarget, TargetItem
from paceline.engine.executor import LocalExecutor
from paceline.execution.model_runner import ModelRunner
from paceline.execution.target import TargetExecutor
from paceline.execution.target_view import TargetView
from paceline.kernels.kv_cache import KVCache
from paceline.loading import load
from paceline.models.native_decoder import NativeDecoder
from tests.models.worlds import Chunk, World, make_spec, make_weights

CAPTURE = (0, 1, 2)
SPEC = make_spec()
WEIGHTS = make_weights(SPEC)
PROMPTS = [np.random.default_rng(seed).integers(0, 131, 30).tolist() for seed in range(3)]
NEW_TOKENS = 24


def new_decoder() -> NativeDecoder:
    return NativeDecoder(SPEC, WEIGHTS, dtype="float32", threads=1, capture=CAPTURE)


def reference(tokens: Sequence[int]) -> tuple[torch.Tensor, np.ndarray]:
    """Features and logits of a text, by one pass."""
    world = World(new_decoder(), seed=9)
    logits = world.run(Chunk(0, list(tokens)))[0]
    assert world.cache.features is not None
    return world.cache.features[world.tables[0, : len(tokens)].tolist()], logits


class Reader:
    """Guesses what the target will say, with a sibling first that it will not, and looks at every feature."""

    def __init__(self, view: TargetView, *, right: int = 3) -> None:
        self.needs = DrafterNeeds("reader", ingests_prompts=True)
        self.seen: list[int] = []
        self.blind = 0
        self._view = view
        self._right = right
        self._texts: dict[str, list[int]] = {}

    def _take_in(self, item: DraftItem) -> list[int]:
        text = self._texts.setdefault(item.request_id, []) if item.start else []
        assert len(text) == item.start
        text.extend(item.tokens)
        self._texts[item.request_id] = text
        return text

    def grow(self, items: Sequence[DraftItem]) -> list[Proposal]:
        return [self._propose(item) for item in items]

    def _propose(self, item: DraftItem) -> Proposal:
        text = self._take_in(item)
        known = self._view.computed(item.request_id)
        features, _ = reference(text)
        if known:
            assert known == len(text) - 1
            for start in {0, item.start - 1, known - 1} - {-1}:
                assert torch.equal(
                    self._view.features([(item.request_id, start, known)]), features[start:known]
                )
            with pytest.raises(ValueError, match="captures 3 places"):
                self._view.features([(item.request_id, 0, known + 1)])
        else:
            self.blind += 1
        self.seen.append(known)
        guesses: list[int] = []
        for _ in range(min(self._right, item.max_depth)):
            guesses.append(int(reference([*text, *guesses])[1][-1].argmax()))
        tokens = [(guesses[0] + 1) % 131, *guesses] if guesses else []
        parents = [-1, -1, *range(1, len(guesses))][: len(tokens)]
        return Proposal(item.request_id, len(text), tuple(tokens), tuple(parents))

    def advance(self, items: Sequence[DraftItem]) -> None:
        for item in items:
            text = self._take_in(item)
            assert self._view.computed(item.request_id) >= len(text)
            got = self._view.features([(item.request_id, 0, len(text))])
            assert torch.equal(got, reference(text)[0])

    def release(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._texts.pop(request_id, None)
            assert self._view.computed(request_id) == 0


class Lab:
    def __init__(self, *, slots: int = 512, seqs: int = 3, budget: int = 16, **drafter: Any) -> None:
        limits = Limits(256, slots, max_num_seqs=seqs, max_batch_tokens=budget)
        sizes = (SPEC.num_layers, slots, SPEC.num_kv_heads, SPEC.head_dim, torch.float32)
        kv = KVCache(*sizes, num_captured=len(CAPTURE), hidden_size=SPEC.hidden_size)
        runner = ModelRunner(new_decoder(), kv, num_rows=seqs, context_length=256)
        self.target = TargetExecutor(runner, ())
        self.reader = Reader(self.target.view, **drafter)
        policy = DraftPolicy((self.reader.needs,), FixedLength(6))
        self.core = EngineCore(CoreConfig(limits, SPEC.vocab_size, drafting=policy))
        self._executor = LocalExecutor(self.target, [self.reader])
        self.preemptions = self.accepted = self.cached = 0
        self.outputs: dict[str, list[int]] = {}

    def run(self, prompts: dict[str, list[int]], params: SamplingParams | None = None) -> None:
        params = params or SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)
        for name, prompt in prompts.items():
            self.outputs[name] = []
            self._handle(RequestArrived(name, tuple(prompt), params.resolved()))
        while not self.core.idle:
            event = self._executor.poll()
            assert event is not None
            self._handle(event)
            for delta in self.core.take_outputs():
                assert delta.error is None
                self.outputs[delta.request_id].extend(delta.tokens)
                if delta.summary is not None:
                    self.preemptions += delta.summary.num_preemptions
                    self.accepted += delta.summary.speculation.num_accepted_tokens
                    self.cached += delta.summary.num_cached_tokens
        self._executor.poll()

    def _handle(self, event: Event) -> None:
        for work in self.core.handle(event, 0.0):
            self._executor.submit(work)


def expected(prompt: list[int]) -> list[int]:
    text = list(prompt)
    for _ in range(NEW_TOKENS):
        text.append(int(reference(text)[1][-1].argmax()))
    return text[len(prompt) :]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return [expected(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("right", [0, 1, 3])
def test_committed_tokens_can_be_read_after_every_verdict(texts: list[list[int]], right: int) -> None:
    """Prompts in chunks, requests side by side, accepted nodes and those that a wrong sibling preceded."""
    lab = Lab(right=right)
    lab.run({str(index): prompt for index, prompt in enumerate(PROMPTS)})
    assert [lab.outputs[str(index)] for index in range(3)] == texts
    assert lab.accepted > 20 or right == 0
    assert lab.reader.blind == 0
    assert len(lab.reader.seen) > 10


def test_a_prefix_that_others_computed_can_be_read(texts: list[list[int]]) -> None:
    lab = Lab()
    lab.run({"first": PROMPTS[0], "twin": PROMPTS[0]})
    lab.run({"second": PROMPTS[0], "other": [*PROMPTS[0], *texts[0][:7]]})
    assert lab.outputs["first"] == lab.outputs["second"] == lab.outputs["twin"] == texts[0]
    assert lab.outputs["other"][: NEW_TOKENS - 7] == texts[0][7:]
    assert lab.cached > 50
    assert lab.reader.blind == 0


def test_a_preempted_request_is_read_again_once_it_is_back(texts: list[list[int]]) -> None:
    """In between nothing is read that may be another's."""
    lab = Lab(slots=110, budget=64)
    lab.run({str(index): prompt for index, prompt in enumerate(PROMPTS)})
    assert [lab.outputs[str(index)] for index in range(3)] == texts
    assert lab.preemptions > 0


def test_slots_that_another_wrote_are_not_read() -> None:
    lab = Lab()
    view = lab.target.view

    def run(step: int, name: str, row: int, slots: Sequence[int]) -> None:
        tokens = tuple(PROMPTS[0][: len(slots)])
        item = TargetItem(name, row, 0, tokens, 0, tuple(slots), False)
        lab.target.run(RunTarget(step, (item,)))

    run(1, "a", 0, range(10))
    run(2, "b", 1, range(10, 20))
    assert (view.computed("a"), view.computed("b"), view.row("b")) == (10, 10, 1)
    run(3, "c", 2, [30, 5])
    assert (view.computed("a"), view.computed("b"), view.computed("c")) == (0, 10, 2)
    with pytest.raises(ValueError, match="has computed 0"):
        view.features([("a", 0, 1)])
    kept = (0, 1, 2, 3, 4, 6, 7, 8, 9, 10)  # of texts that were computed before, as a cached prefix is
    lab.target.run(RunTarget(4, (TargetItem("d", 1, 10, (1,), 0, (*kept, 40), False),)))
    assert (view.computed("b"), view.computed("d")) == (0, 11), "its row is another's"
    assert view.computed("c") == 2
    lab.target.run(RunTarget(5, (TargetItem("e", 0, 0, (1,), 0, (41,), False, (1,), (ROOT,), (30,)),)))
    assert view.computed("c") == 0, "a guess was computed in its slot"
    assert view.computed("nobody") == 0


@pytest.mark.model
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.05), ("int8", 0.15)])
def test_features_of_the_real_model_are_its_residual_stream(dtype: Any, tolerance: float) -> None:
    from paceline.models.torch_decoder import TorchDecoder

    model = load("embedded")
    tokens = model.tokenizer.encode("The capital of France is Paris, and the sea is blue.")
    places = (0, 1, 8, 15, 29, 30)
    worlds = [
        World(TorchDecoder(model.spec, model.weights, capture=places), num_slots=64),
        World(NativeDecoder(model.spec, model.weights, dtype=dtype, threads=2, capture=places), num_slots=64),
    ]
    for world in worlds:
        world.run(Chunk(0, tokens))
    want, got = (world.cache.features[: len(tokens)].float() for world in worlds)  # type: ignore[index]
    for column in range(len(places)):
        # The first token's residual is hundreds of times larger than the others': each for itself.
        error = (got[:, column] - want[:, column]).norm(dim=-1) / want[:, column].norm(dim=-1)
        assert error.max() < tolerance, places[column]
