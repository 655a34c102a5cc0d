"""The head over cached slots against the head computed anew from the whole text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.models.torch_head import TorchHead

from .heads import VARIANTS, HeadWorld, fuse, make_head, recompute
from .worlds import Chunk, Tree


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fuse(variant: str) -> None:
    spec, weights = make_head(variant)
    features = 3 * torch.randn(7, len(spec.capture), spec.target_hidden_size, generator=torch.manual_seed(1))
    got = TorchHead(spec, weights).fuse(features)
    assert got.shape == (7, spec.hidden_size)
    assert got.dtype == torch.float32
    close(got, fuse(spec, weights, features))


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_of_several_texts(variant: str) -> None:
    spec, weights = make_head(variant)
    world = HeadWorld(TorchHead(spec, weights), seed=2)
    generator = torch.manual_seed(2)
    texts = [torch.randint(0, spec.vocab_size, (n,), generator=generator).tolist() for n in (9, 1, 40)]
    hidden = [torch.randn(len(text), spec.hidden_size, generator=generator) for text in texts]
    got: list[list[tuple[Tensor, Tensor]]] = [[], [], []]
    for cut in ([(0, 0, 4), (1, 0, 1)], [(2, 0, 31), (0, 4, 5)], [(0, 5, 9), (2, 31, 40)]):
        pieces = [(Chunk(row, texts[row][a:b]), hidden[row][a:b]) for row, a, b in cut]
        for (row, _, _), result in zip(cut, world.step(*pieces), strict=True):
            got[row].append(result)
    for row, text in enumerate(texts):
        logits, out = recompute(spec, weights, text, hidden[row])
        close(torch.cat([part for part, _ in got[row]]), logits)
        close(torch.cat([part for _, part in got[row]]), out)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tree_fed_its_own_output(variant: str) -> None:
    """Three draft steps below two texts; each node is fed what its parent put out."""
    spec, weights = make_head(variant)
    world = HeadWorld(TorchHead(spec, weights), seed=3)
    generator = torch.manual_seed(3)
    text = torch.randint(0, spec.vocab_size, (12,), generator=generator).tolist()
    hidden = torch.randn(12, spec.hidden_size, generator=generator)
    ((_, out),) = world.step((Chunk(0, text), hidden))
    tokens, parents = [3, 4, 5, 6, 7, 8], [-1, -1, 0, 0, 1, 3]
    fed = [out[-1], out[-1]]
    for node in range(len(tokens)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        states = torch.stack([*hidden, *(fed[i] for i in path)])
        logits, back = recompute(spec, weights, text + [tokens[i] for i in path], states)
        for child, parent in enumerate(parents):
            if parent == node:
                assert len(fed) == child
                fed.append(back[-1].float())
        # All nodes up to this one in one pass, as a tree.
        got = world.step((Tree(0, tokens[: node + 1], parents[: node + 1]), torch.stack(fed[: node + 1])))
        close(got[0][0][node], logits[-1])
        close(got[0][1][node], back[-1])


def test_modules_have_weights_and_keys_of_their_own() -> None:
    spec, weights = make_head("two modules")
    world = HeadWorld(TorchHead(spec, weights))
    hidden = torch.randn(5, spec.hidden_size, generator=torch.manual_seed(4))
    batch, _ = world.batch(Chunk(0, [1, 2, 3, 4, 5]))
    for module in (0, 1):
        logits, out = world.decoder.forward(batch, hidden, world.cache, module)
        want, want_out = recompute(spec, weights, [1, 2, 3, 4, 5], hidden, module)
        close(logits, want)
        close(out, want_out)
    assert not torch.equal(world.cache.keys[0], world.cache.keys[1])


def test_only_wanted_rows_come_back() -> None:
    spec, weights = make_head("eagle3")
    world = HeadWorld(TorchHead(spec, weights))
    hidden = torch.randn(4, spec.hidden_size, generator=torch.manual_seed(5))
    batch, _ = world.batch(Chunk(0, [1, 2, 3, 4]))
    object.__setattr__(batch, "logit_rows", batch.logit_rows[[1, 3]])
    logits, out = world.decoder.forward(batch, hidden, world.cache)
    want, want_out = recompute(spec, weights, [1, 2, 3, 4], hidden)
    close(logits, want[[1, 3]])
    close(out, want_out[[1, 3]])


@pytest.mark.parametrize("variant", ["eagle3", "mtp"])
def test_bfloat16_stays_near(variant: str) -> None:
    spec, weights = make_head(variant)
    world = HeadWorld(TorchHead(spec, weights, dtype=torch.bfloat16))
    assert world.cache.keys.dtype == torch.bfloat16
    hidden = torch.randn(20, spec.hidden_size, generator=torch.manual_seed(6))
    ((logits, out),) = world.step((Chunk(0, list(range(20))), hidden))
    want, want_out = recompute(spec, weights, list(range(20)), hidden)
    assert (logits - want).square().mean().sqrt() < 0.03 * want.std()
    assert (out - want_out).square().mean().sqrt() < 0.03 * want_out.std()
