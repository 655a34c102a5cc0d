"""What a precision costs: perplexity of real text under each, and how often the best token changes.

    python benchmarks/perplexity.py --model embedded

Text: long Spec-Bench prompts, GSM8K questions with answers, HumanEval functions with solutions, cut into
windows of 512 tokens. float32 is the reference.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from paceline.execution.forward_batch import Segment, build_batch
from paceline.execution.model_runner import ModelRunner
from paceline.kernels.kv_cache import KVCache
from paceline.loading import LoadedModel, load
from paceline.models.native_decoder import NativeDecoder
from prompts import DEFAULT_DATA

WINDOW = 512


def texts(data: Path) -> dict[str, str]:
    """One long text per kind."""
    spec = [json.loads(line) for line in (data / "spec_bench.jsonl").open(encoding="utf-8")]
    maths = [json.loads(line) for line in (data / "gsm8k_test.jsonl").open(encoding="utf-8")]
    with gzip.open(data / "humaneval.jsonl.gz", "rt", encoding="utf-8") as file:
        code = [json.loads(line) for line in file]
    return {
        "prose": "\n\n".join(turn for entry in spec for turn in entry["turns"] if len(turn) > 600),
        "maths": "\n\n".join(f"{entry['question']}\n{entry['answer']}" for entry in maths),
        "code": "\n\n".join(entry["prompt"] + entry["canonical_solution"] for entry in code),
    }


def windows(model: LoadedModel, text: str, count: int) -> Iterator[list[int]]:
    ids = model.tokenizer.encode(text[: count * WINDOW * 12])
    for index in range(min(count, len(ids) // WINDOW)):
        yield ids[index * WINDOW : (index + 1) * WINDOW]


def measure(model: LoadedModel, dtype: str, chosen: dict[str, list[list[int]]]) -> dict[str, object]:
    """Per kind: negative log-likelihood per token, and the best token at every position."""
    spec = model.spec
    decoder = NativeDecoder(spec, model.weights, dtype=dtype, threads=os.cpu_count() or 1)
    kv = KVCache(spec.num_layers, WINDOW, spec.num_kv_heads, spec.head_dim, decoder.kv_dtype)
    runner = ModelRunner(decoder, kv, num_rows=1, context_length=WINDOW)
    runner.tables.write(0, 0, range(WINDOW))
    found: dict[str, object] = {}
    for kind, parts in chosen.items():
        losses, best = [], []
        for ids in parts:
            batch = build_batch([Segment(0, 0, ids, wanted=True)], runner.tables)
            batch = replace(batch, logit_rows=np.arange(len(ids), dtype=np.int32))
            logits = runner.decoder.forward(batch, runner.kv)
            losses.append(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item())
            best.append(logits.argmax(-1).clone())
        found[kind] = (float(np.mean(losses)), torch.cat(best))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--windows", type=int, default=16, help="windows of 512 tokens per kind of text")
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    args = parser.parse_args()
    model = load(args.model)
    chosen = {kind: list(windows(model, text, args.windows)) for kind, text in texts(args.data).items()}
    results = {dtype: measure(model, dtype, chosen) for dtype in ("float32", "bfloat16", "int8")}
    print("| text | tokens | " + " | ".join(f"{d} perplexity" for d in results) + " | same best token |")
    print("|---" * (len(results) + 3) + "|")
    for kind, parts in chosen.items():
        reference_loss, reference_best = results["float32"][kind]  # type: ignore[misc]
        cells, same = [], []
        for found in results.values():
            loss, best = found[kind]  # type: ignore[misc]
            cells.append(f"{np.exp(loss):.4f} ({np.expm1(loss - reference_loss):+.3%})")
            same.append(f"{(best == reference_best).float().mean().item():.2%}")
        tokens = sum(map(len, parts))
        print(f"| {kind} | {tokens} | " + " | ".join(cells) + f" | {' / '.join(same[1:])} |")


if __name__ == "__main__":
    main()
