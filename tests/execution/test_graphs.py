"""Recorded passes on the CPU: a stand-in for the recorder replays the same function on the same tensors,
which tests everything but the recording itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from paceline.execution.forward_batch import Segment
from paceline.execution.graphs import GraphedDecoder, Replay
from paceline.execution.model_runner import ModelRunner
from paceline.kernels.kv_cache import KVCache
from paceline.models.torch_decoder import TorchDecoder
from tests.models.worlds import make_spec, make_weights

SLOTS = 64


class Recorder:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, function: Callable[[], None]) -> Replay:
        self.count += 1
        return function


def make_runner(decoder: TorchDecoder | GraphedDecoder) -> ModelRunner:
    spec = decoder.spec
    kv = KVCache(
        *(spec.num_layers, SLOTS, spec.num_kv_heads, spec.head_dim, torch.float32),
        num_captured=len(decoder.capture),
        hidden_size=spec.hidden_size,
    )
    runner = ModelRunner(decoder, kv, num_rows=2, context_length=SLOTS)
    runner.tables.write(0, 0, range(32))
    runner.tables.write(1, 0, range(32, 64))
    return runner


def segments(step: int) -> list[Segment]:
    one = Segment(0, 5 + step, [3], True, tree_tokens=[4, 5], tree_paths=[[30], [30, 31]])
    return [one, Segment(1, 2 + step, [7], True)]


def test_recorded_passes_give_the_logits_of_direct_ones() -> None:
    spec = make_spec()
    decoder = TorchDecoder(spec, make_weights(spec))
    recorder = Recorder()
    direct = make_runner(decoder)
    graphed = make_runner(GraphedDecoder(decoder, capture=recorder, max_tokens=8, pad_slots_to=16))
    prompts = [Segment(0, 0, [1, 2, 3, 4, 5], False), Segment(1, 0, [6, 7], True), Segment(1, 2, [], False)]
    prompts += [Segment(0, 20, [1] * 9, False)]
    direct.forward(prompts)
    graphed.forward(prompts)
    assert recorder.count == 0, "a pass wider than the limit runs directly"
    for step in range(6):
        expected, got = direct.forward(segments(step)), graphed.forward(segments(step))
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert recorder.count == 1, "one recording serves a stretch of positions"


def test_recordings_are_bounded_and_follow_their_cache() -> None:
    spec = make_spec()
    decoder = TorchDecoder(spec, make_weights(spec))
    recorder = Recorder()
    graphed = GraphedDecoder(decoder, capture=recorder, pad_slots_to=16, max_recorded=1)
    runner = make_runner(graphed)
    for tokens in ([1], [1, 2], [1]):
        runner.forward([Segment(0, 0, tokens, True)])
    assert recorder.count == 3
    other = make_runner(graphed)
    logits = other.forward([Segment(0, 0, [1], True)]).clone()
    assert recorder.count == 4
    torch.testing.assert_close(logits, make_runner(decoder).forward([Segment(0, 0, [1], True)]))


def test_recorded_passes_capture_and_end_early_too() -> None:
    spec = make_spec()
    decoder = TorchDecoder(spec, make_weights(spec), capture=(0, 1, 2))
    recorder = Recorder()
    direct = make_runner(decoder)
    graphed = make_runner(GraphedDecoder(decoder, capture=recorder, max_tokens=8, pad_slots_to=16))
    for step in range(3):
        for layers in (None, 1):
            expected = direct.forward(segments(step), layers)
            torch.testing.assert_close(
                graphed.forward(segments(step), layers), expected, rtol=1e-5, atol=1e-5
            )
        assert direct.kv.features is not None
        assert graphed.kv.features is not None
        torch.testing.assert_close(graphed.kv.features, direct.kv.features, rtol=1e-5, atol=1e-5)
        assert direct.kv.features[[5 + step, 30, 31]].all()
    assert recorder.count == 2, "one recording for each depth"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_graphs_on_a_gpu() -> None:
    spec = make_spec()
    decoder = TorchDecoder(spec, make_weights(spec), device="cuda")
    kv = KVCache(spec.num_layers, SLOTS, spec.num_kv_heads, spec.head_dim, torch.float32, "cuda")
    direct = ModelRunner(decoder, kv, num_rows=2, context_length=SLOTS)
    graphed = ModelRunner(GraphedDecoder(decoder), kv, num_rows=2, context_length=SLOTS)
    for step in range(4):
        expected = direct.forward([Segment(0, step, [step], True)]).clone()
        torch.testing.assert_close(graphed.forward([Segment(0, step, [step], True)]), expected)
