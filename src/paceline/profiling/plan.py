"""What is measured, and for how long."""

from __future__ import annotations

from dataclasses import dataclass, replace

CHUNK = 512
"""Tokens of a prompt in one pass at most, the scheduler's own default."""
_PREFILL_SHARE = 0.3
_LEAST_CONTEXT = 64


@dataclass(frozen=True, slots=True)
class PassCell:
    """A pass of the target: `each` new tokens of every request below `context` others. prompt: they are known
    tokens, of which only the last one's logits are wanted; else a root and a chain of guesses."""

    requests: int
    each: int
    context: int
    prompt: bool = False

    @property
    def new_tokens(self) -> int:
        return self.requests * self.each

    @property
    def kv_tokens(self) -> int:
        return self.requests * self.context


@dataclass(frozen=True, slots=True)
class DraftCell:
    """A question to every drafter. unread: tokens of each request that it has not seen."""

    requests: int
    guesses: int
    unread: int
    context: int


@dataclass(frozen=True, slots=True)
class Plan:
    """batches, contexts: rising.  sizes: new tokens per request.  budget_s: for all repetitions together, on
    one number of cores.  rounds: fewest and most times that each cell is measured."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    contexts: tuple[int, ...] = (64, 384, 768)
    sizes: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 12, 13, 16)
    chunks: tuple[int, ...] = (32, 64, 128, 256, CHUNK)
    guesses: tuple[int, ...] = (1, 2, 3, 5, 8)
    unread: tuple[int, ...] = (1, 3)
    budget_s: float = 60.0
    rounds: tuple[int, int] = (3, 15)
    run_tokens: int = 48

    @property
    def most_requests(self) -> int:
        return self.batches[-1]

    @property
    def some_batches(self) -> tuple[int, ...]:
        """The smallest, one in the middle and the largest."""
        middle = self.batches[len(self.batches) // 2]
        return tuple(dict.fromkeys((self.batches[0], middle, self.batches[-1])))

    @property
    def context_length(self) -> int:
        """Room for the longest text, all that is added to it, and a chunk."""
        return self.contexts[-1] + CHUNK + 2 * _LEAST_CONTEXT

    def passes(self) -> list[PassCell]:
        chains = [
            PassCell(batch, each, context)
            for batch in self.batches
            for each in (self.sizes if batch == 1 else (1, 2, 4, 6, 8))
            for context in self.contexts
            if batch * each <= CHUNK // 4
        ]
        chunks = [
            PassCell(1, each, context, prompt=True)
            for each in self.chunks
            for context in (0, self.contexts[-1])
        ]
        return chains + chunks

    def drafts(self) -> list[DraftCell]:
        return [
            DraftCell(batch, guesses, unread, context)
            for batch in self.some_batches
            for guesses in self.guesses
            for unread in self.unread
            for context in (self.contexts[0], self.contexts[-1])
        ]

    def within(self, tokens_per_s: float, context_length: int) -> Plan:
        """The same with less text where reading it would take too much of the time, or too long a context.
        tokens_per_s: of a prompt."""
        plan = self
        while plan.most_requests * plan.contexts[-1] > _PREFILL_SHARE * plan.budget_s * tokens_per_s:
            if plan.contexts[-1] > 2 * _LEAST_CONTEXT:
                plan = replace(plan, contexts=_halved(plan.contexts))
            elif len(plan.batches) > 1:
                plan = replace(plan, batches=plan.batches[:-1])
            else:
                break
        while plan.context_length > context_length and plan.contexts[-1] > _LEAST_CONTEXT:
            plan = replace(plan, contexts=_halved(plan.contexts))
        return plan


QUICK = Plan(
    batches=(1, 4, 8),
    contexts=(64, 320),
    sizes=(1, 2, 3, 4, 6, 8, 12, 13, 16),
    chunks=(32, 128, 384),
    guesses=(1, 3, 5),
    budget_s=12.0,
    rounds=(2, 9),
    run_tokens=24,
)


def _halved(contexts: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({max(each // 2, _LEAST_CONTEXT // 2) for each in contexts}))
