"""Milliseconds per forward pass over new tokens x context x dtype, and the share of memory bandwidth reached.

    python benchmarks/forward_pass.py [--dtypes bfloat16 int8] [--threads 2] [--seconds 1.0]

Random weights in the shape of SmolLM2-135M. Times are minima over repeated passes. The bandwidth is what
the same threads reach when they only read the packed weights; "share" is that time over the pass's.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from paceline.kernels.batch import TokenBatch
from paceline.kernels.kv_cache import KVCache
from paceline.models.native_decoder import NativeDecoder
from paceline.models.spec import DecoderSpec, DecoderWeights, LayerSpec, LayerWeights, RopeSpec

NEW_TOKENS = (1, 2, 4, 8, 16, 32, 256)
CONTEXTS = (16, 256, 1024)
PROMPT, CHUNK = 1000, 512


def smollm2_shape() -> DecoderSpec:
    inv_freq = tuple(float(100_000.0 ** (-2 * i / 64)) for i in range(32))
    return DecoderSpec(
        family="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        context_length=8192,
        layers=(LayerSpec(),) * 30,
        ropes=(RopeSpec(inv_freq),),
        norm_eps=1e-5,
        attn_scale=0.125,
    )


def random_weights(spec: DecoderSpec) -> DecoderWeights:
    def matrix(out: int, inputs: int) -> Tensor:
        return (torch.randn(out, inputs) * inputs**-0.5).to(torch.bfloat16)

    h, i = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    layers = [
        LayerWeights(
            attn_norm=torch.ones(h),
            q=matrix(q, h),
            k=matrix(kv, h),
            v=matrix(kv, h),
            o=matrix(h, q),
            mlp_norm=torch.ones(h),
            gate=matrix(i, h),
            up=matrix(i, h),
            down=matrix(h, i),
        )
        for _ in spec.layers
    ]
    return DecoderWeights(matrix(spec.vocab_size, h), torch.ones(h), layers)


def tree_batch(count: int, context: int) -> TokenBatch:
    """A chain of `count` uncommitted nodes below `context` committed tokens; logits of all."""
    nodes = np.arange(count, dtype=np.int32)
    lengths = nodes + 1
    paths = np.concatenate([context + nodes[: i + 1] for i in range(count)]).astype(np.int32)
    return TokenBatch(
        tokens=nodes * 131 + 7,
        positions=context + nodes,
        slots=context + nodes,
        rows=np.zeros(count, dtype=np.int32),
        prefix_len=np.full(count, context, dtype=np.int32),
        path_start=(np.cumsum(lengths) - lengths).astype(np.int32),
        path_len=lengths.astype(np.int32),
        path_slots=paths,
        tables=np.arange(context, dtype=np.int32)[None],
        logit_rows=nodes,
    )


def prompt_batch(count: int, context: int) -> TokenBatch:
    """The next `count` tokens of a prompt; logits of the last."""
    positions = context + np.arange(count, dtype=np.int32)
    zeros = np.zeros(count, dtype=np.int32)
    return TokenBatch(
        tokens=positions * 7,
        positions=positions,
        slots=positions,
        rows=zeros,
        prefix_len=positions + 1,
        path_start=zeros,
        path_len=zeros,
        path_slots=zeros[:0],
        tables=np.arange(context + count, dtype=np.int32)[None],
        logit_rows=np.array([count - 1], dtype=np.int32),
    )


def fastest(run: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of at least three runs within about `seconds`."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def prefill(decoder: NativeDecoder, cache: KVCache) -> None:
    for start in range(0, PROMPT, CHUNK):
        decoder.forward(prompt_batch(min(CHUNK, PROMPT - start), start), cache)


def measure(decoder: NativeDecoder, seconds: float) -> None:
    spec = decoder.spec
    cache = KVCache(spec.num_layers, 2048, spec.num_kv_heads, spec.head_dim, decoder.kv_dtype)
    cache.keys.normal_()
    cache.values.normal_()
    floor = fastest(decoder.read_weights, seconds)
    size = decoder.weight_bytes
    rate = size / floor / 1e9
    print(f"\n{decoder.dtype}: {size / 1e6:.0f} MB, read in {floor * 1e3:.2f} ms = {rate:.1f} GB/s")
    print(f"{'new tokens':>12}" + "".join(f"{f'context {c}':>26}" for c in CONTEXTS))
    for count in NEW_TOKENS:
        cells = []
        for context in CONTEXTS:
            batch = tree_batch(count, context) if count <= 32 else prompt_batch(count, context)
            taken = fastest(lambda batch=batch: decoder.forward(batch, cache), seconds)  # type: ignore[misc]
            cells.append(f"{taken * 1e3:9.2f} ms {size / taken / 1e9:5.1f} GB/s {floor / taken:4.0%}")
        print(f"{count:>12}" + "".join(f"{cell:>26}" for cell in cells), flush=True)
    print(
        f"prompt of {PROMPT} in chunks of {CHUNK}: {fastest(lambda: prefill(decoder, cache), seconds):.3f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=1.0, help="per cell of the table")
    options = parser.parse_args()
    spec = smollm2_shape()
    weights = random_weights(spec)
    for dtype in options.dtypes:
        start = time.perf_counter()
        decoder = NativeDecoder(spec, weights, dtype=dtype, threads=options.threads)
        print(f"\npacked in {time.perf_counter() - start:.2f} s", end="")
        measure(decoder, options.seconds)


if __name__ == "__main__":
    main()
