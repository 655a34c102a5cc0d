"""The n-gram drafter against the definition of vLLM's, on recorded texts; and what a step of it costs.

    python benchmarks/ngram_against_vllm.py TRACE.jsonl [TRACE.jsonl ...] [--seconds-only] [--out FILE]

A trace has one request per line: {"prompt_token_ids", "generated_token_ids"} and perhaps {"acc_ngram":
{"acc_len"}}, what vLLM emitted per step with 20 guesses and n-grams of 3 to 7, by how many tokens there were.
The definition is stated here once more and without an index: every earlier place is compared with the end of
the text. It proposes what followed the longest common suffix of at most `max` and at least `min` tokens, at
the earliest place that has it, up to the end of the text (vllm/v1/spec_decode/ngram_proposer.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline.core.params import SamplingParams
from paceline.core.work import Announcement, DraftItem
from paceline.drafters.ngram import NgramDrafter

SETTINGS = [(3, 7, 3), (3, 7, 5), (1, 7, 5), (2, 4, 5)]  # shortest, longest, guesses
RECORDED = (3, 7, 20)
CONTEXT = 8192
TOLD = Announcement(1, SamplingParams().resolved())


def common_suffixes(text: np.ndarray, first: int) -> Iterator[np.ndarray]:
    """For every end from `first` on: how many tokens before each earlier place equal those before the end.

    Entry j is for the place where text[j] follows. The count at an end is that of one token before, at one
    place before, plus one, if the last tokens are equal."""
    counts = np.zeros(len(text) + 1, dtype=np.int32)
    for end in range(1, len(text) + 1):
        equal = text[:end] == text[end - 1]
        counts[1 : end + 1] = np.where(equal, counts[:end] + 1, 0)
        if end >= first:
            yield counts[:end]


def defined(text: np.ndarray, counts: np.ndarray, setting: tuple[int, int, int]) -> list[int]:
    """What vLLM's method proposes for the text up to len(counts)."""
    shortest, longest, guesses = setting
    capped = np.minimum(counts, longest)
    place = int(capped.argmax())  # the first of the largest
    if capped[place] < shortest:
        return []
    return list(map(int, text[place : min(place + guesses, len(counts))]))


def offered(drafter: NgramDrafter, prompt: list[int], output: list[int], guesses: int) -> Iterator[list[int]]:
    """What the drafter proposes after the prompt and after every further token."""
    seen: list[int] = []
    for position in range(len(output)):
        new = prompt if position == 0 else [output[position - 1]]
        told = TOLD if position == 0 else None
        (proposal,) = drafter.grow([DraftItem("r", len(seen), tuple(new), guesses, guesses, told)])
        seen += new
        yield list(proposal.tokens)
    drafter.release(["r"])


def compare(path: Path) -> dict[str, Any]:
    equal = dict.fromkeys([*SETTINGS, RECORDED], 0)
    drafters = {setting: NgramDrafter(*setting[:2]) for setting in equal}
    positions = recorded = as_recorded = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        request = json.loads(line)
        prompt, output = request["prompt_token_ids"], request["generated_token_ids"]
        lengths = request.get("acc_ngram", {}).get("acc_len")
        text = np.array(prompt + output)
        streams = {setting: offered(drafters[setting], prompt, output, setting[2]) for setting in equal}
        for done, counts in enumerate(common_suffixes(text[:-1], len(prompt))):
            for setting, stream in streams.items():
                ours = next(stream)
                equal[setting] += ours == defined(text, counts, setting)
                if setting == RECORDED and lengths and done:
                    accepted = accepted_of(ours, output[done:])
                    recorded += 1
                    as_recorded += lengths[done] == 1 + accepted
            positions += 1
    shares = {str(setting): count / positions for setting, count in equal.items()}
    share = as_recorded / recorded if recorded else None
    return {"trace": path.name, "positions": positions, "equal": shares, "as_recorded": share}


def accepted_of(draft: list[int], following: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(draft, following, strict=False)) if a != b),
        min(len(draft), len(following)),
    )


def seconds(
    paths: list[Path], setting: tuple[int, int, int], batch: int, steps: int
) -> list[tuple[float, float]]:
    """Per request and step: a step's two new tokens taken in, and a guess, at `CONTEXT` tokens of context. By
    the clock, and of processor time, which is what counts where other programs have the core as well."""
    texts = np.concatenate(
        [
            np.array(request["prompt_token_ids"] + request["generated_token_ids"])
            for path in paths
            for request in map(json.loads, path.read_text(encoding="utf-8").splitlines())
        ]
    )
    shortest, longest, guesses = setting
    drafter = NgramDrafter(shortest, longest)
    stride = max(1, (len(texts) - CONTEXT - 2 * steps) // batch)
    requests = [texts[at * stride :][: CONTEXT + 2 * steps].tolist() for at in range(batch)]
    drafter.advance(
        [DraftItem(str(row), 0, tuple(text[:CONTEXT]), 0, 0, TOLD) for row, text in enumerate(requests)]
    )
    took = []
    for at in range(CONTEXT, CONTEXT + 2 * steps, 2):
        items = [
            DraftItem(str(row), at, tuple(text[at : at + 2]), guesses, guesses)
            for row, text in enumerate(requests)
        ]
        wall, busy = time.perf_counter(), time.thread_time()
        drafter.grow(items)
        took.append(((time.perf_counter() - wall) / batch, (time.thread_time() - busy) / batch))
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--seconds-only", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"traces": [], "microseconds": []}
    for path in [] if args.seconds_only else args.traces:
        result["traces"].append(found := compare(path))
        print(f"{found['trace']}: {found['positions']} positions")
        for setting, share in found["equal"].items():
            print(f"  n-grams (min, max, guesses) {setting}: {share:.4%} equal")
        if found["as_recorded"] is not None:
            print(f"  accepted as recorded: {found['as_recorded']:.4%}")
    for batch in (1, 64):
        for setting in SETTINGS:
            steps = seconds(args.traces, setting, batch, 2000 if batch == 1 else 200)
            row: dict[str, Any] = {"batch": batch, "setting": setting, "context": CONTEXT}
            for name, took in zip(("wall", "cpu"), map(sorted, zip(*steps, strict=True)), strict=True):
                row[name] = {
                    "median": statistics.median(took) * 1e6,
                    "p99": took[int(len(took) * 0.99)] * 1e6,
                }
            result["microseconds"].append(row)
            print(
                f"batch {batch}, {setting}: "
                + ", ".join(
                    f"{name} {row[name]['median']:.1f} us (p99 {row[name]['p99']:.1f})"
                    for name in ("wall", "cpu")
                )
            )
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
