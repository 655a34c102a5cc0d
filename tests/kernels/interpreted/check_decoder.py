"""A whole decoder on the Triton kernels against the same one on the specification."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from paceline.execution.graphs import GraphedDecoder, Replay
from paceline.kernels import ops, triton
from paceline.models.torch_decoder import TorchDecoder

from ...models.test_native_decoder import PROMPT, VARIANTS
from ...models.worlds import Chunk, Tree, World, make_spec, make_weights


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    ops.register("cpu", None)


@pytest.mark.parametrize("variant", ["plain", "gemma", "odd sizes"])
def test_logits(variant: str) -> None:
    changes, options = VARIANTS[variant]
    spec = make_spec(**changes)
    decoder = TorchDecoder(spec, make_weights(spec, **options))
    steps = [[Chunk(0, PROMPT[:12]), Chunk(1, PROMPT[:3])]]
    steps.append([Tree(0, [1, 2, 3, 4, 5], [-1, 0, 0, 1, 3]), Chunk(1, [7]), Tree(2, [5], [-1])])
    worlds = [World(decoder), World(decoder, seed=3)]
    for step in steps:
        ops.register("cpu", None)
        want = worlds[0].run(*step)
        ops.register("cpu", triton)
        for got, one in zip(worlds[1].run(*step), want, strict=True):
            np.testing.assert_allclose(got, one, rtol=1e-3, atol=1e-3)


def test_a_recorded_pass_serves_other_trees_of_its_shape() -> None:
    """A recording here runs the pass again on what its tensors then hold."""
    recordings = []

    def capture(run: Callable[[], None]) -> Replay:
        recordings.append(run)
        return run

    spec = make_spec(layers=make_spec().layers[:1])
    decoder = TorchDecoder(spec, make_weights(spec))
    worlds = [World(decoder), World(GraphedDecoder(decoder, capture=capture, pad_slots_to=64), seed=3)]
    ops.register("cpu", triton)
    for step in ([Chunk(0, PROMPT[:5])], [Tree(0, [1, 2, 3], [-1, 0, 0])], [Tree(0, [4, 5, 6], [-1, 0, 1])]):
        want, got = (world.run(*step)[0] for world in worlds)
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
    assert len(recordings) == 2
