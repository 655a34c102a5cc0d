"""What a decode step costs besides the forward pass: scheduling, sampling, text.

python benchmarks/step_overhead.py --dtype bfloat16
"""

from __future__ import annotations

import argparse
import time

from paceline import LLM, SamplingParams
from paceline.kernels.batch import TokenBatch
from paceline.kernels.kv_cache import KVCache
from paceline.models.native_decoder import NativeDecoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "int8"])
    parser.add_argument("--tokens", type=int, default=256)
    args = parser.parse_args()
    forward, inside, count = NativeDecoder.forward, 0.0, 0

    def timed(self: NativeDecoder, batch: TokenBatch, kv: KVCache) -> object:
        nonlocal inside, count
        begin = time.perf_counter()
        logits = forward(self, batch, kv)
        inside, count = inside + time.perf_counter() - begin, count + 1
        return logits

    NativeDecoder.forward = timed  # type: ignore[method-assign,assignment]
    with LLM(draft="none", dtype=args.dtype) as llm:
        prompt = llm.chat_prompt([{"role": "user", "content": "Write a long story about a dragon."}])
        params = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True)
        llm.generate([prompt], params)
        inside, count = 0.0, 0
        begin = time.perf_counter()
        llm.generate([prompt], params)
        total = time.perf_counter() - begin
    rest = (total - inside) / count
    print(
        f"{args.dtype}: {total / count * 1e3:.2f} ms per step, {rest * 1e3:.2f} ms of it outside the pass "
        f"({rest * count / total:.1%})"
    )


if __name__ == "__main__":
    main()
