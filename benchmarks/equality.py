"""Token equality with speculation on and off, on real prompts: every drafter, length, batch and temperature.

    python benchmarks/equality.py --dtype float32 --out equality.json
    python benchmarks/equality.py --dtype bfloat16 --prompts 12 --reference DIR

`--reference DIR` also compares the greedy float32 output with `transformers` on a Hugging Face folder of the
same weights. Where the two part, the margin between the reference's two best logits is reported.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from paceline import LLM, RequestOutput, SamplingParams
from paceline.core.stats import SpeculationStats
from prompts import DEFAULT_DATA, arithmetic, code, edits, open_questions
from pruned_draft import write_pruned

LENGTHS = (1, 3, 5, 8)
BATCHES = (1, 8)
TEMPERATURES = (0.0, 0.8)
DROPPED = (14, 20)
"""Layers that the pruned draft lacks."""
SOURCES = {"spec-bench": open_questions, "gsm8k": arithmetic, "humaneval": code, "edit": edits}


@dataclass
class Cell:
    """One setting against plain decoding. equal: outputs whose token ids are the same."""

    draft: str
    num_speculative_tokens: int
    batch: int
    temperature: float
    equal: int = 0
    total: int = 0
    mean_acceptance_length: float | None = None
    differing: list[str] = field(default_factory=list)


def read_prompts(llm: LLM, data: Path, count: int) -> dict[str, list[int]]:
    """`count` prompts in all, in equal parts from every source, as chat prompts of at most 900 tokens."""
    chosen: dict[str, list[int]] = {}
    for source in SOURCES.values():
        fitting = (
            (name, ids)
            for name, text in source(data)
            if len(ids := llm.chat_prompt([{"role": "user", "content": text}])) <= 900
        )
        chosen.update(itertools.islice(fitting, -(-count // len(SOURCES))))
    return dict(list(chosen.items())[:count])


def run(
    llm: LLM, prompts: dict[str, list[int]], temperature: float, k: int, tokens: int
) -> list[RequestOutput]:
    params = [
        SamplingParams(
            max_tokens=tokens, temperature=temperature, seed=1000 + index, num_speculative_tokens=k, top_p=1.0
        )
        for index in range(len(prompts))
    ]
    outputs = llm.generate(list(prompts.values()), params)
    assert all(output.error is None for output in outputs), [output.error for output in outputs]
    return outputs


def compare(prompts: dict[str, list[int]], drafts: dict[str, str], dtype: str, tokens: int) -> Iterator[Cell]:
    """Cells as they are finished. Plain outputs are made once, alone: batch 1, no drafter."""
    with LLM(draft="none", dtype=dtype, max_num_seqs=1) as plain:
        expected = {t: [o.token_ids for o in run(plain, prompts, t, 0, tokens)] for t in TEMPERATURES}
    for (name, draft), batch in itertools.product(drafts.items(), BATCHES):
        options = {"draft_dtype": name.partition(" ")[2]} if " " in name else {}
        with LLM(draft=draft, dtype=dtype, max_num_seqs=batch, **options) as llm:
            for k, temperature in itertools.product(LENGTHS, TEMPERATURES):
                cell = Cell(name, k, batch, temperature, total=len(prompts))
                stats = SpeculationStats()
                outputs = run(llm, prompts, temperature, k, tokens)
                for prompt, output, wanted in zip(prompts, outputs, expected[temperature], strict=True):
                    stats.add(output.speculation)
                    if output.token_ids == wanted:
                        cell.equal += 1
                    else:
                        cell.differing.append(prompt)
                cell.mean_acceptance_length = stats.mean_acceptance_length
                yield cell


def against_reference(folder: Path, prompts: dict[str, list[int]], tokens: int) -> dict[str, object]:
    """Greedy float32 output next to transformers'. A difference where the reference's two best logits lie
    within 1e-3 is a tie that rounding may break either way; any other is an error."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with LLM(draft="ngram", dtype="float32") as llm:
        ours = run(llm, prompts, 0.0, 5, tokens)
    equal, ties, wrong = 0, {}, {}
    for (name, ids), output in tqdm(list(zip(prompts.items(), ours, strict=True)), desc="reference"):
        with torch.inference_mode():
            logits = model(torch.tensor([ids + output.token_ids])).logits[0, len(ids) - 1 : -1].double()
        parted = (logits.argmax(-1) != torch.tensor(output.token_ids)).nonzero()
        if not len(parted):
            equal += 1
            continue
        at = int(parted[0])
        best = logits[at].topk(2).values
        margin = float(best[0] - best[1])
        (ties if margin <= 1e-3 else wrong)[name] = {"token": at, "margin": margin}
    return {"equal": equal, "ties_within_1e-3": ties, "different": wrong}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "int8"])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--drafts", nargs="+", default=["ngram", "embedded int8", "pruned"])
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    started = time.time()
    with LLM(draft="none", dtype=args.dtype) as llm:
        prompts = read_prompts(llm, args.data, args.prompts)
    print(f"{len(prompts)} prompts, {args.tokens} new tokens, {args.dtype}")
    with tempfile.TemporaryDirectory() as scratch:
        pruned = write_pruned(Path(scratch) / "pruned", DROPPED)
        drafts = {"ngram": "ngram", "embedded int8": "embedded", "pruned": str(pruned)}
        cells = []
        drafts = {name: drafts[name] for name in args.drafts}
        for cell in compare(prompts, drafts, args.dtype, args.tokens):
            cells.append(cell)
            length = f"{cell.mean_acceptance_length:.2f}" if cell.mean_acceptance_length else "-"
            print(
                f"{cell.draft:14} k={cell.num_speculative_tokens} batch={cell.batch} T={cell.temperature}: "
                f"{cell.equal}/{cell.total} equal, mean acceptance length {length}",
                flush=True,
            )
    report: dict[str, object] = {"dtype": args.dtype, "cells": [asdict(cell) for cell in cells]}
    if args.reference:
        report["reference"] = against_reference(args.reference, prompts, args.tokens)
        print(report["reference"])
    report["seconds"] = round(time.time() - started)
    equal, total = sum(cell.equal for cell in cells), sum(cell.total for cell in cells)
    print(f"{equal} of {total} outputs equal plain decoding token for token; {report['seconds']} s")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    if equal != total:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
