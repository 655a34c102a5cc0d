"""What a command says of a finished request: one line for people, one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline import RequestOutput
    from paceline.core.stats import SpeculationStats
    from paceline.engine.outputs import LaneStats


def tokens_per_second(output: RequestOutput) -> float | None:
    """Of decoding alone: the tokens after the first over the time since it; None when there are none."""
    tokens, seconds = output.usage.completion_tokens - 1, output.timing.decode_s
    return tokens / seconds if tokens > 0 and seconds and seconds > 0 else None


def summary(output: RequestOutput, lanes: LaneStats) -> str:
    """Tokens, speed and acceptance in one line; a second one where draft and target ran at the same time; and
    one where a drafter was lost."""
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
    lines = [", ".join(parts)]
    if lanes.placement == "disaggregated" and output.drafter != "none":
        told = [*_guesses(output.speculation), *_pace(lanes)]
        lines.append("; ".join(long for long, _ in told))
    return "\n".join(filter(None, [*lines, _loss(lanes)]))


def live_line(rate: float | None, speculation: SpeculationStats, lanes: LaneStats, width: int) -> str:
    """What there is to say in the middle of a request, in at most `width` columns. rate: tokens/s."""
    parts = [(f"{rate:.1f} tokens/s", f"{rate:.1f} tok/s")] if rate is not None else []
    loss = _loss(lanes)
    if loss:
        parts.append((loss, loss if len(loss) <= 40 else f"{loss[:37]}..."))
    length = speculation.mean_acceptance_length
    if length is not None:
        parts.append((f"mean acceptance length {length:.2f}", f"length {length:.2f}"))
    parts += [*_guesses(speculation), *_pace(lanes)]
    line = " | ".join(long for long, _ in parts)
    if len(line) > width:
        line = " | ".join(short for _, short in parts)
    return line[: max(width, 0)]


def _guesses(speculation: SpeculationStats) -> list[tuple[str, str]]:
    """Where bonus tokens fell and what became of the nodes, at length and in short."""
    told = []
    landings = speculation.num_hits, speculation.num_leaf_hits, speculation.num_misses
    if any(landings):
        told.append(
            ("hits {}, leaf hits {}, misses {}".format(*landings), "hit/leaf/miss {}/{}/{}".format(*landings))
        )
    nodes = speculation.num_drafted_nodes, speculation.num_draft_tokens, speculation.num_accepted_tokens
    if any(nodes):
        told.append(
            ("nodes {} drafted, {} verified, {} accepted".format(*nodes), "nodes {}/{}/{}".format(*nodes))
        )
    return told


def _pace(lanes: LaneStats) -> list[tuple[str, str]]:
    told = []
    if lanes.target_gap_median_s is not None:
        gap = f"{lanes.target_gap_median_s * 1e3:.1f} ms"
        told.append((f"target gap {gap}", f"gap {gap}"))
    # In turn with the target a drafter is idle while that works, which says nothing.
    if lanes.draft_idle_share is not None and lanes.placement == "disaggregated":
        told.append((f"draft idle {lanes.draft_idle_share:.0%}", f"idle {lanes.draft_idle_share:.0%}"))
    return told


def _loss(lanes: LaneStats) -> str:
    if not lanes.drafter_losses:
        return ""
    reason = "".join(filter(str.isprintable, " ".join((lanes.drafter_loss_reason or "unknown").split())))
    if lanes.drafter_away:
        return f"drafter lost: {reason}"
    times = "once" if lanes.drafter_losses == 1 else f"{lanes.drafter_losses} times"
    return f"drafter lost {times} and back: {reason}"


def as_object(output: RequestOutput, lanes: LaneStats) -> dict[str, Any]:
    """The object that `--json` prints. Names that end in `_s` are seconds, shares are in [0, 1]; lengths
    include the bonus token."""
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
            "num_drafted_nodes": speculation.num_drafted_nodes,
            "num_draft_tokens": speculation.num_draft_tokens,
            "num_accepted_tokens": speculation.num_accepted_tokens,
            "mean_acceptance_length": speculation.mean_acceptance_length,
            "num_hits": speculation.num_hits,
            "num_leaf_hits": speculation.num_leaf_hits,
            "num_misses": speculation.num_misses,
        },
        "lanes": asdict(lanes),
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
