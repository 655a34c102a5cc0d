"""Record what a target chooses and what a draft model would have proposed there, on real prompts: the trace
that paced groups answer from (`paceline.paced.world.Recording`, one JSON line per prompt).

    python benchmarks/record_trace.py TARGET DRAFT --prompts 20 --tokens 128 --out trace.jsonl

Greedy. The draft model reads the target's own text; its best 16 candidates are kept per token.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
from tqdm import tqdm

from equality import read_prompts
from paceline import LLM, SamplingParams
from paceline.config import Config, SchedulerConfig, SpeculationConfig
from paceline.engine.build import build
from paceline.execution.forward_batch import Segment
from paceline.execution.model_runner import ModelRunner
from paceline.kernels import ops
from paceline.paced.world import Recording
from prompts import DEFAULT_DATA

CANDIDATES = 16


def recording(runner: ModelRunner, vocab: int, prompt: list[int], output: list[int]) -> Recording:
    """What the draft model proposes in place of every token of `output`, from one pass over all of them."""
    runner.tables.write(0, 0, range(len(prompt)))
    slots = range(len(prompt), len(prompt) + len(output) - 1)
    paths = [list(slots[: depth + 1]) for depth in range(len(slots))]
    logits = runner.forward([Segment(0, 0, prompt, True, output[:-1], paths)])[:, :vocab]
    zeros = [0] * len(output)
    tokens, scores = ops.top_candidates(logits, [0.0] * len(output), zeros, zeros, CANDIDATES)
    rounded = tuple(tuple(round(value, 4) for value in row) for row in scores.tolist())
    return Recording(tuple(prompt), tuple(output), tuple(map(tuple, tokens.tolist())), rounded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with LLM(args.target, draft="none", dtype=args.dtype, context_length=2048) as llm:
        prompts = list(read_prompts(llm, args.data, args.prompts).values())
        params = SamplingParams(max_tokens=args.tokens, temperature=0.0)
        outputs = [llm.generate(ids, params)[0].token_ids for ids in tqdm(prompts, desc="target")]
    config = Config(
        model=args.draft,
        dtype=args.dtype,
        speculation=SpeculationConfig(draft="none"),
        scheduler=SchedulerConfig(context_length=2048),
    )
    built = build(config)
    runner = built.engine._executor._target._runner  # type: ignore[attr-defined]
    ranks = []
    with args.out.open("wb") as file:
        for prompt, output in tqdm(list(zip(prompts, outputs, strict=True)), desc="draft"):
            found = recording(runner, built.model.vocab_size, prompt, output)
            file.write(msgspec.json.encode(found) + b"\n")
            ranks += found.ranks()
    print(f"{len(ranks)} tokens, the draft's first choice in {ranks.count(0) / len(ranks):.1%}")


if __name__ == "__main__":
    main()
