"""What n-gram lookup gains over plain decoding, in one process and in turns.

    python benchmarks/lookup_gain.py --prompts ~/peers/prompts.json --sets edit-200 chat-100

Eight prompts per set, one at a time, greedy, 128 new tokens, end of text ignored, default draft length. Rates
are tokens after the first over the time from first to last, summed over the prompts; `median prompt` is the
median of the per-prompt ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from paceline import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=128, temperature=0, ignore_eos=True)


def decode_seconds(llm: LLM, prompts: list[list[int]]) -> tuple[list[float], list[list[int]], float | None]:
    outputs = [llm.generate([prompt], PARAMS)[0] for prompt in prompts]
    drafts = sum(output.speculation.num_drafts for output in outputs)
    accepted = sum(output.speculation.num_accepted_tokens for output in outputs)
    seconds = [output.timing.decode_s or 0.0 for output in outputs]
    return seconds, [output.token_ids for output in outputs], 1 + accepted / drafts if drafts else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=["edit-200", "chat-100"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "int8"])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    sets = json.loads(args.prompts.read_text(encoding="utf-8"))["sets"]
    print("| prompts | precision | plain tok/s | n-gram tok/s | gain | median prompt | acceptance length |")
    print("|---|---|---|---|---|---|---|")
    for dtype in args.dtypes:
        engines = {d: LLM(draft=d, dtype=dtype, prefix_cache=False) for d in ("none", "ngram")}
        for name in args.sets:
            prompts = [prompt["token_ids"] for prompt in sets[name]]
            tokens = len(prompts) * (128 - 1)
            rows = []
            for _ in range(args.repeats):
                plain, expected, _ = decode_seconds(engines["none"], prompts)
                fast, found, length = decode_seconds(engines["ngram"], prompts)
                assert expected == found, "speculation changed the output"
                each = statistics.median(a / b for a, b in zip(plain, fast, strict=True))
                rows.append((tokens / sum(plain), tokens / sum(fast), sum(plain) / sum(fast), each))
            cells = [statistics.median(column) for column in zip(*rows, strict=True)]
            print(
                f"| {name} | {dtype} | {cells[0]:.0f} | {cells[1]:.0f} | {cells[2]:.2f}x | {cells[3]:.2f}x "
                f"| {length:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
