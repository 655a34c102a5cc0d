"""Two engines over one model: plain decoding as the baseline, and one whose drafter follows a rule."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline import LLM, RequestOutput, SamplingParams
from tests.cases.drafters import Rule, RuleDrafter, Script, oracle
from tests.tiny import ENGINE


class Lab:
    """`baseline` decodes without speculation and remembers; `speculate` runs the same request with guesses
    from `rule`, by default an oracle that has read the unlimited baseline."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.model = model
        self.script = Script()
        self.drafter = RuleDrafter(oracle(self.script))
        self.plain = LLM(model, draft="none", **{**ENGINE, "prefix_cache": False})
        self.fast = LLM(model, draft=self.drafter, **{**ENGINE, **options})
        self._known: dict[str, RequestOutput] = {}

    @property
    def vocab(self) -> int:
        return self.plain.model.spec.vocab_size

    def baseline(self, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
        params = replace(params, num_speculative_tokens=0)
        key = repr((list(prompt), params))
        if key not in self._known:
            (self._known[key],) = self.plain.generate(list(prompt), params)
        return self._known[key]

    def teach(self, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
        """Lets the drafter know what the target says under these params when nothing ends it early."""
        free = replace(params, stop=(), stop_token_ids=(), ignore_eos=True, max_tokens=None, min_tokens=0)
        wanted = min(self.plain.model.context_length - len(prompt), (params.max_tokens or 10**9) + 40)
        output = self.baseline(prompt, replace(free, max_tokens=wanted, logprobs=None))
        self.script.learn([*prompt, *self.baseline(prompt, params).token_ids], [*prompt, *output.token_ids])
        return output

    def speculate(
        self, prompt: Sequence[int], params: SamplingParams, k: int, rule: Rule | None = None
    ) -> RequestOutput:
        return self.speculate_all([prompt], [params], k, rule)[0]

    def speculate_all(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        k: int | Sequence[int],
        rule: Rule | None = None,
    ) -> list[RequestOutput]:
        """All at once; k may differ per request."""
        for prompt, wanted in zip(prompts, params, strict=True):
            self.teach(prompt, wanted)
        self.drafter.rule = rule or oracle(self.script)
        self.drafter.asked.clear()
        lengths = [k] * len(prompts) if isinstance(k, int) else list(k)
        asked = [
            replace(one, num_speculative_tokens=length) for one, length in zip(params, lengths, strict=True)
        ]
        return self.fast.generate([list(prompt) for prompt in prompts], asked)

    def check(
        self, prompt: Sequence[int], params: SamplingParams, k: int, rule: Rule | None = None
    ) -> RequestOutput:
        """Speculates and asserts that nothing the caller sees differs from the baseline."""
        output = self.speculate(prompt, params, k, rule)
        assert_same(output, self.baseline(prompt, params))
        return output


def assert_same(output: RequestOutput, baseline: RequestOutput) -> None:
    assert output.error is None
    assert output.token_ids == baseline.token_ids
    assert output.text == baseline.text
    assert output.finish_reason == baseline.finish_reason
    assert output.usage.prompt_tokens == baseline.usage.prompt_tokens
    assert output.usage.completion_tokens == len(output.token_ids)
    assert output.usage.total_tokens == baseline.usage.total_tokens
    assert output.logprobs == baseline.logprobs


def random_prompt(seed: int, length: int, vocab: int = 320) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(length)]


def stream_all(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> tuple[list[str], RequestOutput]:
    """The pieces of text of a stream and its output; asserts that the two agree, tokens included."""
    chunks = list(llm.stream(list(prompt), params))
    output = chunks[-1].output
    assert output is not None
    assert [chunk.output for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert [token for chunk in chunks for token in chunk.token_ids] == output.token_ids
    return [chunk.text for chunk in chunks], output


def assert_no_slot_lost(llm: LLM) -> None:
    """Idle: every slot is free or the prefix cache's, and no cached prefix is held by anybody."""
    core = llm.engine.core
    assert core.idle
    assert core.ledger.pool.num_free + core.ledger.cache.size == core.ledger.pool.num_slots
    assert core.ledger.cache.num_evictable == core.ledger.cache.size
