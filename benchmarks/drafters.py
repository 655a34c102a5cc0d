"""Every drafter, and several together, on the embedded model: five workloads, several batch sizes.

    python benchmarks/drafters.py --drafters none ngram suffix eagle3 ngram+suffix+eagle3 --out drafters.json
    python benchmarks/drafters.py --acceptance --drafters eagle3 --lengths 3 5

Drafters take turns: each repeat starts every one of them anew, so that what drifts on the machine drifts for
all. A batch of so many requests is kept full from a queue of prompts, `--rounds` times as many as the batch
where there are so many; seconds are those of decoding, prompts coming from the prefix cache. Prompts are
those that no head was trained on: EditEval, HumanEval and, of Spec-Bench, question ids divisible by four.
Outputs are compared with those without a drafter, token for token.

`--acceptance`: mean acceptance length of chains of fixed length by category of Spec-Bench, bonus included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from tqdm import tqdm

from paceline import LLM, RequestOutput, SamplingParams
from prompts import DEFAULT_DATA, Question, code, edits

CATEGORIES = {
    "multi-turn": ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    "translation": ("translation",),
    "summarization": ("summarization",),
    "qa": ("qa",),
    "math_reasoning": ("math_reasoning",),
    "rag": ("rag",),
}
"""As Spec-Bench groups them."""
HELD_OUT = 4
"""One question in so many, by its id, is for evaluation only."""


def held_out(data: Path, categories: Iterable[str]) -> Iterator[Question]:
    with open(data / "spec_bench.jsonl", encoding="utf-8") as lines:
        for entry in map(json.loads, lines):
            if entry["category"] in categories and entry["question_id"] % HELD_OUT == 0:
                yield f"spec_bench/{entry['question_id']}", entry["turns"][0]


def workloads(data: Path) -> dict[str, Iterator[Question]]:
    return {
        "chat": held_out(data, CATEGORIES["multi-turn"]),
        "code": code(data),
        "edit": edits(data),
        "maths": held_out(data, CATEGORIES["math_reasoning"]),
        "summary": held_out(data, CATEGORIES["summarization"]),
    }


_WARM_UP = 16


@dataclass
class Result:
    """Of one workload in one run. batch: requests at once, at most."""

    drafter: str
    workload: str
    batch: int
    repeat: int
    tokens: int
    seconds: float
    acceptance_length: float | None
    tokens_per_pass: float | None
    drafted: int
    accepted: int
    outputs: list[list[int]]


def _encoded(llm: LLM, questions: Iterable[Question], count: int, longest: int) -> list[list[int]]:
    prompts = (llm.chat_prompt([{"role": "user", "content": text}]) for _, text in questions)
    return [
        ids for ids, _ in zip((ids for ids in prompts if len(ids) <= longest), range(count), strict=False)
    ]


def run(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> tuple[list[RequestOutput], float]:
    """Outputs and seconds. A few tokens of each are decoded before the clock starts, so that its prompt is in
    the prefix cache, and costs and acceptance have been seen."""
    llm.generate(prompts, SamplingParams(max_tokens=_WARM_UP, temperature=0.0))
    began = perf_counter()
    outputs = llm.generate(prompts, params)
    return outputs, perf_counter() - began


def result(
    drafter: str, workload: str, batch: int, repeat: int, outputs: list[RequestOutput], seconds: float
) -> Result:
    stats = [output.speculation for output in outputs]
    drafts, steps = sum(each.num_drafts for each in stats), sum(each.num_steps for each in stats)
    accepted, emitted = (
        sum(each.num_accepted_tokens for each in stats),
        sum(each.num_emitted_tokens for each in stats),
    )
    return Result(
        drafter,
        workload,
        batch,
        repeat,
        sum(len(output.token_ids) for output in outputs),
        seconds,
        1 + accepted / drafts if drafts else None,
        emitted / steps if steps else None,
        sum(each.num_draft_tokens for each in stats),
        accepted,
        [output.token_ids for output in outputs],
    )


def measure(drafter: str, repeat: int, args: argparse.Namespace) -> list[Result]:
    """One drafter, every workload and batch size."""
    results = []
    params = SamplingParams(
        max_tokens=args.tokens, temperature=args.temperature, seed=7, ignore_eos=args.ignore_eos
    )
    options = {"mode": "autoregressive"} if drafter == "none" else {"draft": drafter}
    for batch in args.batches:
        with LLM(dtype=args.dtype, max_num_seqs=batch, **options) as llm:
            for workload, questions in workloads(args.data).items():
                if workload not in args.workloads:
                    continue
                prompts = _encoded(llm, questions, max(args.prompts, args.rounds * batch), args.longest)
                outputs, seconds = run(llm, prompts, params)
                results.append(result(drafter, workload, batch, repeat, outputs, seconds))
            for each in llm.lanes.drafters:
                print(
                    f"{drafter}: {each.name}: {each.weight_bytes} bytes of weights, per token "
                    f"{each.kv_bytes_per_token} of KV and {each.feature_bytes_per_token} of hidden states; "
                    f"{each.share_of_step or 0.0:.1%} of the time",
                    file=sys.stderr,
                )
    return results


def acceptance(args: argparse.Namespace) -> list[Result]:
    """Chains of fixed length, by category. The decoding rates with and without follow each other directly."""
    results = []
    params = SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=7)
    for drafter in ["none", *args.drafters]:
        for length in [0] if drafter == "none" else args.lengths:
            options = (
                {"mode": "autoregressive"}
                if drafter == "none"
                else {"draft": drafter, "num_speculative_tokens": length}
            )
            with LLM(dtype=args.dtype, max_num_seqs=1, **options) as llm:
                for category, names in tqdm(CATEGORIES.items(), desc=f"{drafter} {length}", leave=False):
                    prompts = _encoded(llm, held_out(args.data, names), args.prompts, args.longest)
                    outputs, seconds = run(llm, prompts, params)
                    results.append(result(f"{drafter} k={length}", category, 1, 0, outputs, seconds))
    return results


def report(results: list[Result]) -> None:
    """tok/s (ratio to none, acceptance length): medians over repeats."""
    names = list(dict.fromkeys(each.drafter for each in results))
    places = list(dict.fromkeys((each.workload, each.batch) for each in results))
    plain = {(each.workload, each.batch): each.outputs for each in results if each.drafter.startswith("none")}
    print("| workload, batch | " + " | ".join(names) + " |")
    print("|---|" + "---|" * len(names))
    rates: dict[str, list[float]] = {name: [] for name in names}
    lengths: dict[str, list[float]] = {name: [] for name in names}
    unequal = 0
    for place in places:
        row, base = [], None
        for name in names:
            runs = [each for each in results if (each.drafter, each.workload, each.batch) == (name, *place)]
            rate = statistics.median(each.tokens / each.seconds for each in runs)
            base = base or rate
            length = runs[0].acceptance_length
            rates[name].append(rate / base)
            lengths[name] += [length] if length is not None else []
            shown = f", {length:.2f}" if length is not None else ""
            row.append(f"{rate:.0f} ({rate / base:.2f}x{shown})")
            if place in plain:
                unequal += sum(
                    one != other
                    for each in runs
                    for one, other in zip(each.outputs, plain[place], strict=True)
                )
        print(f"| {place[0]}, {place[1]} | " + " | ".join(row) + " |")
    means = [
        f"{statistics.geometric_mean(rates[name]):.2f}x"
        + (f", {statistics.mean(lengths[name]):.2f}" if lengths[name] else "")
        for name in names
    ]
    print("| mean | " + " | ".join(means) + " |")
    print(f"outputs that differ from plain decoding: {unequal}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafters", nargs="+", default=["none", "ngram", "suffix", "eagle3"])
    parser.add_argument("--acceptance", action="store_true")
    parser.add_argument("--lengths", nargs="+", type=int, default=[3, 5])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=8, help="per workload, at least")
    parser.add_argument("--rounds", type=int, default=3, help="prompts per request of a batch")
    parser.add_argument("--workloads", nargs="+", default=list(workloads(Path())), help="by name")
    parser.add_argument("--longest", type=int, default=1500, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.acceptance:
        results = acceptance(args)
    else:
        results = []
        for repeat in range(args.repeats):
            for drafter in args.drafters:
                results += measure(drafter, repeat, args)
                print(f"repeat {repeat}: {drafter} done", file=sys.stderr)
                if args.out:
                    args.out.write_text(json.dumps([asdict(each) for each in results]))
    if args.out:
        args.out.write_text(json.dumps([asdict(each) for each in results]))
    report(results)


if __name__ == "__main__":
    main()
