"""What a plan says, in the words of other engines: files that vLLM and SGLang accept, and our own options.

The checks here hold the formats as those engines read them (vLLM 0.33, `v1/spec_decode/dynamic/utils.py`;
SGLang 0.5, `srt/speculative/adaptive_spec_params.py`), and beyond them what a table for every batch size
needs: no gaps, and no length that nobody measured.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ConfigError, shown
from paceline.sim.plan.candidates import Candidate
from paceline.sim.plan.schedule import Schedule

VLLM_METHODS = ("ngram", "suffix", "eagle", "eagle3", "mtp", "draft_model")
_WITHOUT_MODEL = ("ngram", "suffix", "mtp")


def vllm_config(
    schedule: Schedule,
    method: str,
    *,
    model: str | None = None,
    draft_ranks: int = 0,
    lookup: tuple[int, int] = (2, 4),
) -> dict[str, Any]:
    """For `--speculative-config`. model: of a drafter with weights.  lookup: shortest and longest n-gram.

    Raises ConfigError where no batch size has a guess to gain from, or the model is not named.
    """
    if schedule.longest == 0:
        raise ConfigError(
            f"{schedule.drafter} gains nothing at any batch size: leave --speculative-config out of vLLM's "
            "options."
        )
    found: dict[str, Any] = {"method": method, "num_speculative_tokens": schedule.longest}
    if method == "ngram":
        found |= {"prompt_lookup_min": lookup[0], "prompt_lookup_max": lookup[1]}
    if model is not None:
        found["model"] = model
    if draft_ranks > 1:
        found["draft_tensor_parallel_size"] = draft_ranks
    found["num_speculative_tokens_per_batch_size"] = [
        [each.low, each.high, each.length] for each in schedule.rows
    ]
    check_vllm(found, rising=schedule.rising)
    return found


def check_vllm(config: object, *, rising: bool = False) -> None:
    """rising: whether a larger batch may have more guesses. Raises ConfigError."""
    said = "the configuration for vLLM"
    if not isinstance(config, Mapping):
        raise ConfigError(f"{said} is {shown(config)}: it must be an object.")
    method = config.get("method")
    if method not in VLLM_METHODS:
        raise ConfigError(f"{said} has the method {shown(method)}: give one of {', '.join(VLLM_METHODS)}.")
    if method not in _WITHOUT_MODEL and not config.get("model"):
        raise ConfigError(f"{said} names no model, and {method} needs one: give it with --checkpoint.")
    most = config.get("num_speculative_tokens")
    if not _whole(most, 1):
        raise ConfigError(f"{said}: num_speculative_tokens is {shown(most)}: give a whole number from 1.")
    assert isinstance(most, int)
    low, high = config.get("prompt_lookup_min", 1), config.get("prompt_lookup_max", 1)
    if not (_whole(low, 1) and _whole(high, 1) and low <= high):
        raise ConfigError(f"{said}: prompt_lookup_min {shown(low)} and prompt_lookup_max {shown(high)}.")
    _check_table(said, config.get("num_speculative_tokens_per_batch_size"), most, rising=rising)


def _check_table(said: str, table: object, most: int, *, rising: bool) -> None:
    said = f"{said}: num_speculative_tokens_per_batch_size"
    if not isinstance(table, list) or not table:
        raise ConfigError(f"{said} is {shown(table)}: it must be a list of [low, high, k].")
    expected, before = 1, most
    for row in table:
        if not (isinstance(row, list) and len(row) == 3 and all(_whole(each, 0) for each in row)):
            raise ConfigError(f"{said} holds {shown(row)}: each row is [low, high, k], in whole numbers.")
        low, high, length = row
        if low != expected or high < low:
            raise ConfigError(
                f"{said} goes from {low} to {high} where {expected} comes next: rows follow each other "
                "without a gap, from 1 on."
            )
        if length > most:
            raise ConfigError(f"{said} wants {length} guesses, and num_speculative_tokens is {most}.")
        if length > before and not rising:
            raise ConfigError(f"{said} rises from {before} to {length} guesses at a batch of {low}.")
        expected, before = high + 1, length


# ---------------------------------------------------------------- SGLang


def sglang_config(schedule: Schedule) -> dict[str, Any]:
    """For `--speculative-adaptive-config`, with EAGLE or EAGLE3 and one candidate per step. Its controller
    goes by what was accepted of late, among the lengths that the costs do not rule out: those within 3 % of
    the best at a batch size. A key serves the batches that are nearest to it.

    Raises ConfigError where no batch size has a guess to gain from.
    """
    if schedule.longest == 0:
        raise ConfigError(
            f"{schedule.drafter} gains nothing at any batch size: leave --speculative-algorithm out of "
            "SGLang's options."
        )
    found = {str(row.low): {"candidate_steps": list(row.near)} for row in schedule.rows}
    check_sglang(found)
    return found


def check_sglang(config: object) -> None:
    """Raises ConfigError."""
    said = "the adaptive steps for SGLang"
    if not isinstance(config, Mapping):
        raise ConfigError(f"{said} are {shown(config)}: they must be an object.")
    sizes = [int(key) for key in config if isinstance(key, str) and key.isdigit()]
    if 1 not in sizes:
        raise ConfigError(f'{said} have no "1": batches of one request need their steps, too.')
    for key, entry in config.items():
        if not (isinstance(key, str) and key.isdigit() and int(key) >= 1):
            raise ConfigError(f"{said} have the key {shown(key)}: keys are batch sizes.")
        steps = entry.get("candidate_steps") if isinstance(entry, Mapping) else None
        if not (isinstance(steps, list) and steps and all(_whole(each, 0) for each in steps)):
            raise ConfigError(
                f"{said}, batch {key}: candidate_steps is {shown(steps)}: give whole numbers from 0."
            )
        if steps != sorted(set(steps)):
            raise ConfigError(f"{said}, batch {key}: candidate_steps {steps} must rise, each once.")
    if not any(step for entry in config.values() for step in entry["candidate_steps"]):
        raise ConfigError(f"{said} never guess: leave them out.")


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


# ---------------------------------------------------------------- our own


def options_line(
    candidate: Candidate, max_num_seqs: int, draft: str | None = None, *, ranks: bool = True
) -> str:
    """For `paceline generate`, `chat` and the server. draft: what the drafter is called where it is loaded,
    where that is not its name.  ranks: whether each device of a group is a rank of its own."""
    options = candidate.options(max_num_seqs)
    words = ["--draft", draft or str(options["draft"])]
    if not candidate.plain:
        words += ["--mode", candidate.mode]
        if candidate.length is not None:
            words += ["--num-speculative-tokens", str(candidate.length)]
        if candidate.width:
            words += ["--set", f"tree.tree_width={candidate.width}"]
        if candidate.passes:
            words += ["--set", f"tree.tree_passes={candidate.passes}"]
    words += ["--set", f"scheduler.max_num_seqs={options['max_num_seqs']}"]
    words += ["--set", f"scheduler.max_batch_tokens={options['max_batch_tokens']}"]
    return shlex.join([*words, *_devices(candidate, ranks=ranks)])


def _devices(candidate: Candidate, *, ranks: bool) -> list[str]:
    """None where everything runs on all there is."""
    placed, joint = candidate.placed, "/" if ranks else ","
    if placed.devices == 1 or not (ranks or placed.apart):
        return []
    numbers = [str(number) for number in range(placed.devices)]
    words = ["--target-devices", joint.join(numbers[: placed.target])]
    if placed.apart:
        words += ["--draft-devices", joint.join(numbers[placed.target :])]
    return words


def write_json(path: Path, content: object) -> None:
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}.") from None
