"""What a command says of a finished request: one line for people, one object for programs."""

from __future__ import annotations

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
    """One prompt, decoded with speculation and without."""

    def __init__(self, speculative: RequestOutput, plain: RequestOutput) -> None:
        self.identical = speculative.token_ids == plain.token_ids
        self.plain_rate = tokens_per_second(plain)
        rate = tokens_per_second(speculative)
        self.speedup = rate / self.plain_rate if rate and self.plain_rate else None
        pairs = zip(speculative.token_ids, plain.token_ids, strict=False)
        self._same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(plain.token_ids))

    def lines(self) -> list[str]:
        speed = f"{self.plain_rate:.1f} tokens/s" if self.plain_rate else "too short to time"
        lines = [f"without speculation: {speed}"]
        if self.speedup:
            lines[0] += f"; with it {self.speedup:.2f} times as fast"
        if self.identical:
            lines.append("the two outputs are identical, token for token")
        else:
            lines.append(f"the two outputs DIFFER from token {self._same + 1} on")
        return lines

    def as_object(self) -> dict[str, Any]:
        return {
            "identical": self.identical,
            "plain_tokens_per_s": self.plain_rate,
            "speedup": self.speedup,
        }
