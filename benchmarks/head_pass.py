"""Milliseconds per pass of a draft head, per chain of guesses in one call, and per fusion of features.

    python benchmarks/head_pass.py [--dtypes bfloat16 int8] [--threads 1] [--draft-vocab 8192] [--seconds 1.0]

An EAGLE-3 head of random weights in the shape of SmolLM2-135M, below a text of 200 tokens. Times are minima
over repeated calls, from Python. "floor" is the time in which the same threads only read the weights of a
pass; the row "no weights" is a head of next to none: what a call costs by itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from paceline.execution.forward_batch import Segment, SlotTables, build_batch, tree_paths
from paceline.kernels.kv_cache import KVCache
from paceline.models.head_spec import HeadSpec, HeadWeights, ModuleWeights, module_shapes, shared_shapes
from paceline.models.native_head import NativeHead
from paceline.models.spec import LayerWeights, RopeSpec

TEXT, STEPS = 200, 5


def shape(hidden: int, inner: int, heads: int, draft_vocab: int) -> HeadSpec:
    return HeadSpec(
        capture=(2, 15, 27),
        target_hidden_size=hidden,
        vocab_size=49_152,
        draft_vocab_size=draft_vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=-(-heads // 3),
        head_dim=64,
        context_length=8192,
        rope=RopeSpec(tuple(float(100_000.0 ** (-2 * i / 64)) for i in range(32))),
        norm_eps=1e-5,
        attn_scale=0.125,
    )


def random_weights(spec: HeadSpec) -> HeadWeights:
    def tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        return {name: torch.randn(size) * size[-1] ** -0.5 for name, size in shapes.items()}

    shared, module = tensors(shared_shapes(spec)), tensors(module_shapes(spec))
    layer = {name[6:]: module.pop(name) for name in list(module) if name.startswith("layer.")}
    ids = torch.arange(spec.draft_vocab_size)
    return HeadWeights(
        modules=[ModuleWeights(layer=LayerWeights(**layer), **module)], target_ids=ids, **shared
    )


def fastest(call: Callable[[], object], seconds: float) -> float:
    """Milliseconds."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def measure(head: NativeHead, seconds: float) -> list[float]:
    spec = head.spec
    kv = KVCache(1, 512, spec.num_kv_heads, spec.head_dim, head.kv_dtype)
    tables = SlotTables(1, 512)
    tables.write(0, 0, range(TEXT))
    text = build_batch([Segment(0, 0, range(TEXT), False)], tables)
    head.forward(text, torch.randn(TEXT, spec.hidden_size), kv)
    found = [fastest(head.read_weights, seconds)]
    for rows in (1, 4, 16):
        paths = tree_paths([-1] * rows, range(300, 300 + rows))
        batch = build_batch([Segment(0, TEXT, (), True, range(rows), paths)], tables)
        hidden = torch.randn(rows, spec.hidden_size)
        found.append(fastest(lambda b=batch, h=hidden: head.forward(b, h, kv), seconds))
        if rows == 1:
            one, state = batch, hidden
    slots = np.arange(400, 400 + STEPS - 1, dtype=np.int32)[None]
    options = {"temperatures": [1.0], "seeds": [0], "positions": [TEXT + 1], "count": 4}
    found.append(fastest(lambda: head.chain(one, state, kv, slots=slots, **options), seconds))
    features = torch.randn(1, 3, spec.target_hidden_size)
    return [*found, fastest(lambda: head.fuse(features), seconds)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    print(f"{'':12}{'floor':>8}{'1 row':>8}{'4 rows':>8}{'16 rows':>8}{f'chain {STEPS}':>9}{'fuse':>8}  ms")
    spec = shape(576, 1536, 9, arguments.draft_vocab)
    weights, tiny = random_weights(spec), shape(64, 64, 1, 32)
    heads = [(dtype, spec, weights, dtype) for dtype in arguments.dtypes]
    for name, of, own, dtype in [*heads, ("no weights", tiny, random_weights(tiny), "int8")]:
        head = NativeHead(of, own, dtype=dtype, threads=arguments.threads)
        times = measure(head, arguments.seconds)
        print(f"{name:12}" + "".join(f"{each:{9 if i == 4 else 8}.3f}" for i, each in enumerate(times)))


if __name__ == "__main__":
    main()
