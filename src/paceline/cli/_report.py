"""What a command says of a finished request: one line for people, one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import RequestOutput


def tokens_per_second(output: RequestOutput) -> float | None:
    """Of decoding alone: the tokens after the first over the time since it; None when there are none."""
    tokens, seconds = output.usage.completion_tokens - 1, output.timing.decode_s
    return tokens / seconds if tokens > 0 and seconds and seconds > 0 else None


def summary(output: RequestOutput) -> str:
    """Tokens, speed and acceptance in one line."""
    parts = [f"{output.usage.completion_tokens} tokens"]
    if output.finish_reason == "length":
        parts[0] += " (cut at the limit)"
    rate = tokens_per_second(output)
    if rate is not None:
        parts.append(f"{rate:.1f} tokens/s")
    if output.timing.ttft_s is not None:
        parts.append(f"first after {output.timing.ttft_s:.2f} s")
    length = output.speculation.mean_acceptance_length
    if length is not None:
        parts.append(f"mean acceptance length {length:.2f} ({output.drafter})")
    return ", ".join(parts)


def as_object(output: RequestOutput) -> dict[str, Any]:
    """The object that `--json` prints. Times are in seconds; lengths include the bonus token."""
    timing, speculation = output.timing, output.speculation
    result: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "usage": {
            "prompt_tokens": output.usage.prompt_tokens,
            "completion_tokens": output.usage.completion_tokens,
        },
        "timing": {
            "load_s": timing.load_s,
            "ttft_s": timing.ttft_s,
            "decode_s": timing.decode_s,
            "tpot_s": timing.tpot_s,
        },
        "speculation": {
            "drafter": output.drafter,
            "num_drafts": speculation.num_drafts,
            "num_draft_tokens": speculation.num_draft_tokens,
            "num_accepted_tokens": speculation.num_accepted_tokens,
            "mean_acceptance_length": speculation.mean_acceptance_length,
        },
        "model": output.model,
        "seed": output.seed,
    }
    if output.logprobs is not None:
        result["logprobs"] = [
            {"token_id": token, "logprob": entry.logprob, "rank": entry.rank, "top": entry.top}
            for token, entry in zip(output.token_ids, output.logprobs, strict=True)
        ]
    return result


class Comparison:
    """One prompt, decoded several times with speculation and without. The best run of each counts: on a
    machine that does other work as well, the slower ones measure that work."""

    def __init__(self, speculative: Sequence[RequestOutput], plain: Sequence[RequestOutput]) -> None:
        first, *others = (output.token_ids for output in [*speculative, *plain])
        self.runs = len(plain)
        self.common = min(_common(first, other) for other in others)
        self.identical = all(other == first for other in others)
        self.rate, self.plain_rate = _best(speculative), _best(plain)
        self.speedup = self.rate / self.plain_rate if self.rate and self.plain_rate else None

    def lines(self) -> list[str]:
        speed = "the output is too short to compare speeds"
        if self.speedup:
            speed = (
                f"decoding with speculation {self.rate:.1f} tokens/s, without {self.plain_rate:.1f}: "
                f"{self.speedup:.2f} times as fast (best of {self.runs} runs each)"
            )
        if self.identical:
            return [speed, "with and without speculation the output is identical, token for token"]
        return [speed, f"with and without speculation the output DIFFERS from token {self.common + 1} on"]

    def as_object(self) -> dict[str, Any]:
        return {
            "identical": self.identical,
            "runs": self.runs,
            "tokens_per_s": self.rate,
            "plain_tokens_per_s": self.plain_rate,
            "speedup": self.speedup,
        }


def _best(outputs: Sequence[RequestOutput]) -> float | None:
    return max((rate for rate in map(tokens_per_second, outputs) if rate is not None), default=None)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens the two share before they part."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
