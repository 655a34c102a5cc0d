"""What a head loses when it works beside the target instead of in turn with it, and what it gains.

    python benchmarks/head_beside_target.py --prompts 8 --tokens 128

Beside the target a head is sent the hidden states of committed tokens with the verdict, and runs on its own
outputs below the last of them: what it guesses is based on states that are a round old. One request at a
time, greedy, the same prompts in every mode (HumanEval, EditEval and held-out questions of Spec-Bench); modes
take turns. `accepted`: tokens per target pass, bonus included.  `by distance`: of the guesses beside the
target, how many were judged and how many of them were right, by how many of the head's own outputs in a row
stood for hidden states.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import chain, islice
from pathlib import Path
from time import perf_counter

from drafters import workloads
from paceline import LLM, SamplingParams
from prompts import DEFAULT_DATA

MODES = ("autoregressive", "serial-chain", "serial-tree", "overlapped")


def prompts(llm: LLM, data: Path, count: int) -> list[list[int]]:
    texts = chain.from_iterable(zip(*workloads(data).values(), strict=False))
    return [llm.chat_prompt([{"role": "user", "content": text}]) for _, text in islice(texts, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--draft", default="eagle3")
    parser.add_argument("--guesses", type=int, default=4, help="most per pass")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    args = parser.parse_args()
    rates: dict[str, list[float]] = {mode: [] for mode in args.modes}
    outputs: dict[str, list[list[int]]] = {}
    said: dict[str, str] = {}
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0)
    for _ in range(args.repeats):
        for mode in args.modes:
            options = {} if mode == "autoregressive" else {"draft": args.draft}
            if mode != "autoregressive":
                options["num_speculative_tokens"] = args.guesses
            with LLM(mode=mode, dtype=args.dtype, max_num_seqs=1, **options) as llm:
                questions = prompts(llm, args.data, args.prompts)
                llm.generate(questions, SamplingParams(max_tokens=8, temperature=0.0))
                began = perf_counter()
                made = llm.generate(questions, params)
                rates[mode].append(sum(len(each.token_ids) for each in made) / (perf_counter() - began))
                outputs[mode] = [each.token_ids for each in made]
                stats = [each.speculation for each in made]
                emitted = sum(each.num_emitted_tokens for each in stats)
                steps = sum(each.num_steps for each in stats)
                said[mode] = f"{emitted / steps:.2f} | {dict(sorted(llm.lanes.drafted_by_distance.items()))}"
    print("| mode | tok/s | accepted | by distance |\n|---|---|---|---|")
    for mode in args.modes:
        print(f"| {mode} | {statistics.median(rates[mode]):.0f} | {said[mode]} |")
    first = outputs[args.modes[0]]
    print(f"outputs equal: {all(each == first for each in outputs.values())}")


if __name__ == "__main__":
    main()
