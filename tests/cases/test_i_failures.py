"""I. Cancellation, faulty drafters, and what must be free again afterwards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, cast

import pytest

from paceline import LLM, AsyncLLM, RequestError, RequestOutput, SamplingParams
from paceline.core.drafting import DrafterNeeds
from paceline.core.token_tree import TokenTree
from paceline.core.work import DraftItem, Event, GrowDrafts, Proposal, RequestAborted, Work
from paceline.engine.executor import LocalExecutor
from tests.cases.drafters import RuleDrafter, constant, half_right
from tests.cases.lab import Lab, assert_no_slot_lost, assert_same, random_prompt
from tests.core.test_engine_core import arrive, assert_no_leak, make_core, make_drive
from tests.core.toy import toy_generate
from tests.tiny import DRAFTED, ENGINE


async def read(engine: AsyncLLM, prompt: list[int], params: SamplingParams, chunks: int) -> list[int]:
    """The tokens of the first `chunks` chunks; then the reader walks away."""
    tokens: list[int] = []
    async with aclosing(engine.stream(prompt, params)) as stream:
        async for chunk in stream:
            tokens.extend(chunk.token_ids)
            chunks -= 1
            if chunks == 0:
                break
    return tokens


async def settled(engine: AsyncLLM) -> None:
    """Waits until the engine has nothing left to do."""
    for _ in range(2000):
        if engine.llm.engine.idle and engine.llm.engine.core.idle:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the engine never became idle")


def settle(llm: LLM) -> None:
    while not llm.engine.idle:
        llm.engine.step()


def test_a_reader_who_leaves_frees_the_place(lab: Lab) -> None:
    """I01 A stream that is dropped gives its place and its memory to the next request at once."""
    engine = AsyncLLM(lab.model, draft="ngram", num_speculative_tokens=4, max_num_seqs=1, **ENGINE)
    core = engine.llm.engine.core

    async def scenario() -> RequestOutput:
        await read(engine, random_prompt(1, 10), SamplingParams(max_tokens=200), 2)
        (output,) = await engine.generate(random_prompt(2, 10), SamplingParams(max_tokens=5))
        await settled(engine)
        return output

    output = asyncio.run(scenario())
    assert_same(output, lab.baseline(random_prompt(2, 10), SamplingParams(max_tokens=5)))
    assert core.speculation.num_emitted_tokens < 100
    assert_no_slot_lost(engine.llm)
    engine.close()


@pytest.mark.parametrize("steps", range(9))
def test_cancelled_at_every_chunk_of_a_prompt(lab: Lab, steps: int) -> None:
    """I03 A request cancelled before, between or after the chunks of its prompt is gone without a trace."""
    drafter = RuleDrafter(constant(5), ingests_prompts=True)
    llm = LLM(lab.model, draft=drafter, max_batch_tokens=16, max_num_seqs=2, **ENGINE)
    params = llm.intake.params(SamplingParams(max_tokens=20))
    llm.engine.add("long", 0, random_prompt(1, 60), params)
    for _ in range(steps):
        llm.engine.step()
    llm.engine.abort("long")
    settle(llm)
    assert llm.engine.core.idle
    assert_no_slot_lost(llm)
    assert drafter._states == {}
    prompt = random_prompt(1, 60)
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=20))
    assert_same(output, lab.baseline(prompt, SamplingParams(max_tokens=20)))


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_a_stream_closed_early(lab: Lab, chunks: int) -> None:
    """I03 A stream that is closed, even before its first chunk was asked for, leaves nothing behind."""
    llm = LLM(lab.model, draft="ngram", max_num_seqs=1, **ENGINE)
    stream = llm.stream(random_prompt(3, 8), SamplingParams(max_tokens=200))
    for _ in range(chunks):
        next(stream)
    stream.close()
    settle(llm)
    assert llm.engine.core.idle
    assert_no_slot_lost(llm)


def test_two_of_three_are_cancelled(lab: Lab) -> None:
    """I04 Cancelling two requests of a batch leaves the third alone; what they got is the baseline's."""
    engine = AsyncLLM(lab.model, draft="ngram", num_speculative_tokens=4, **ENGINE)
    prompts = [random_prompt(seed, 6) * 2 for seed in range(3)]
    params = SamplingParams(max_tokens=120)

    async def scenario() -> list[list[int]]:
        readers = [read(engine, prompt, params, n) for prompt, n in zip(prompts, (2, -1, 2), strict=True)]
        tokens = await asyncio.gather(*readers)
        await settled(engine)
        return tokens

    texts = asyncio.run(scenario())
    full = [lab.baseline(prompt, params).token_ids for prompt in prompts]
    assert texts[1] == full[1]
    for cut, whole in ((texts[0], full[0]), (texts[2], full[2])):
        assert cut == whole[: len(cut)]
        assert 0 < len(cut) < 60
    assert_no_slot_lost(engine.llm)
    engine.close()


def test_a_cancelled_task_aborts_its_request(lab: Lab) -> None:
    """I04 Cancelling the task that waits for a request ends the request in the engine, and only that one."""
    engine = AsyncLLM(lab.model, draft="ngram", **ENGINE)
    prompt, params = random_prompt(9, 6), SamplingParams(max_tokens=40)

    async def scenario() -> RequestOutput:
        endless = SamplingParams(max_tokens=240, temperature=1.0)
        tasks = [asyncio.create_task(engine.generate(random_prompt(s, 6), endless)) for s in range(2)]
        kept = asyncio.create_task(engine.generate(prompt, params))
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        (output,) = await kept
        await settled(engine)
        return output

    assert_same(asyncio.run(scenario()), lab.baseline(prompt, params))
    assert_no_slot_lost(engine.llm)
    engine.close()


def test_a_draft_for_a_former_owner_is_dropped() -> None:
    """I05 A draft under way when its request is aborted never reaches a new request of the same id."""
    core = make_core(4)
    drive = make_drive(core, lambda _, item: TokenTree.chain([99] * item.max_depth))
    arrive(drive, "x", [1, 2, 3], max_tokens=20)
    while not isinstance(drive.pending[0], GrowDrafts):
        drive.step()
    drive.feed(RequestAborted("x"))
    assert drive.finished.pop("x").finish_reason == "abort"
    drive.tokens.clear()
    arrive(drive, "x", [3, 2, 1, 0], max_tokens=20)
    drive.step()
    assert core.requests["x"].proposal is None
    assert core.requests["x"].speculation.num_failed_drafts == 0
    drive.run()
    assert drive.tokens["x"] == toy_generate([3, 2, 1, 0], 20)
    assert_no_leak(core)


def test_nothing_is_kept_of_200_requests(lab: Lab) -> None:
    """I06 After many requests that ended in every way all slots are free again, the drafter's too."""
    llm = LLM(lab.model, draft=lab.model, max_num_seqs=8, **DRAFTED)
    drafter = cast(LocalExecutor, llm.engine._executor)._drafters[0]
    rng = random.Random(6)
    prompts, params = [], []
    for seed in range(200):
        prompts.append(random_prompt(seed, rng.randrange(1, 30)))
        ends = rng.choice([{}, {"stop": "a"}, {"stop_token_ids": [rng.randrange(320)]}])
        params.append(
            SamplingParams(max_tokens=rng.randrange(1, 12), num_speculative_tokens=rng.randrange(6), **ends)
        )
    dropped = [llm.stream(prompt, SamplingParams(max_tokens=99)) for prompt in prompts[:5]]
    for stream in dropped:
        next(stream)
    outputs = llm.generate(prompts, params)
    for stream in dropped:
        stream.close()
    settle(llm)
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    assert_no_slot_lost(llm)
    model = drafter._model  # type: ignore[union-attr]
    pool, cache = model._ledger.pool, model._ledger.cache
    assert pool.num_free + cache.size == pool.num_slots
    assert cache.num_evictable == cache.size
    assert len(model._rows) == 8
    assert drafter._sequences == {}  # type: ignore[union-attr]


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_many_mixed_requests(lab: Lab, draft: str) -> None:
    """I07 Hundreds of requests of mixed lengths and draft lengths, many at once, are each the baseline."""
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 9) for _ in range(rng.randrange(1, 61))] for _ in range(250)]
    counts = [rng.randrange(1, 14) for _ in prompts]
    name = lab.model if draft == "model" else draft
    llm = LLM(lab.model, draft=name, max_num_seqs=32, max_batch_tokens=128, **ENGINE)
    params = [
        SamplingParams(max_tokens=count, num_speculative_tokens=rng.choice([None, 0, 1, 3, 7]))
        for count in counts
    ]
    plain = lab.plain.generate(prompts, [SamplingParams(max_tokens=count) for count in counts])
    for output, baseline in zip(llm.generate(prompts, params), plain, strict=True):
        assert_same(output, baseline)
    assert_no_slot_lost(llm)


# ---------------------------------------------------------------- faulty drafters


class FaultyDrafter:
    """Answers the request whose prompt begins with BAD with a given fault, the others with a fair guess."""

    BAD = 13

    def __init__(self, fault: object) -> None:
        self.needs = DrafterNeeds("faulty")
        self.fault = fault
        self.known: dict[str, list[int]] = {}

    def grow(self, items: Sequence[DraftItem]) -> list[Proposal]:
        return [self.answer(item) for item in items]

    def answer(self, item: DraftItem) -> Proposal:
        known = self.known.setdefault(item.request_id, [])
        known.extend(item.tokens)
        if known[0] != self.BAD:
            return Proposal(item.request_id, len(known), (known[-1],), (-1,), (0.0,))
        if isinstance(self.fault, Exception):
            raise self.fault
        if self.fault is None:
            return None  # type: ignore[return-value]
        return Proposal(item.request_id, len(known), *self.fault)  # type: ignore[misc]

    def advance(self, items: Sequence[DraftItem]) -> None: ...

    def release(self, request_ids: Iterable[str]) -> None: ...


NAN = float("nan")


@pytest.mark.parametrize(
    "fault",
    [
        ((99999,), (-1,), (0.0,)),
        ((-5,), (-1,), (0.0,)),
        ((5,), (-1,), (NAN,)),
        ((5,), (-1,), (0.5,)),
        ((5, 6), (-1,), (0.0, 0.0)),
        ((5, 6), (1, 0), (0.0, 0.0)),
        ((5,), (-1,), (0.0, 0.0)),
        (("x",), (-1,), (0.0,)),
        ((5,), (-1,), ("x",)),
        ((5,), (None,), (0.0,)),
        ((5.0,), (-1,), (0.0,)),
        (5, -1, 0.0),
    ],
)
def test_an_invalid_proposal_costs_its_own_request(lab: Lab, fault: object) -> None:
    """I08 Guesses that make no sense are dropped and counted; the request and its neighbours go on."""
    llm = LLM(lab.model, draft=FaultyDrafter(fault), num_speculative_tokens=3, **ENGINE)
    prompts = [[20, 21], [FaultyDrafter.BAD, 21], [22, 23]]
    params = SamplingParams(max_tokens=12)
    outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same(output, lab.baseline(prompt, params))
    failed = [output.speculation.num_failed_drafts for output in outputs]
    assert failed == [0, 10, 0]
    assert outputs[0].speculation.num_draft_tokens > 0


@pytest.mark.parametrize("fault", [RuntimeError("boom"), None])
def test_a_drafter_that_breaks_is_left_behind(lab: Lab, fault: object) -> None:
    """I08 A drafter that raises, or answers nonsense, is given up; every request decodes on without it."""
    llm = LLM(lab.model, draft=FaultyDrafter(fault), num_speculative_tokens=3, **ENGINE)
    prompts = [[20, 21], [FaultyDrafter.BAD, 21], [22, 23]]
    params = SamplingParams(max_tokens=12)
    for _ in range(2):
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            assert_same(output, lab.baseline(prompt, params))
    assert llm.engine.core.drafts.lost
    assert_no_slot_lost(llm)


def test_too_many_guesses_are_cut(lab: Lab) -> None:
    """I08 A drafter that answers with more than it was asked for has its surplus dropped."""
    script = lab.script
    prompt, params = random_prompt(4, 5), SamplingParams(max_tokens=30)
    lab.teach(prompt, params)
    drafter = RuleDrafter(lambda known, *_: TokenTree.chain(script.continuation(known)))
    llm = LLM(lab.model, draft=drafter, **ENGINE)
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=30, num_speculative_tokens=2))
    assert_same(output, lab.baseline(prompt, params))
    assert len(output.speculation.accepted_by_depth) == 2


def test_one_request_whose_rule_raises(lab: Lab) -> None:
    """I08 A drafter that treats requests one by one loses only the guesses of the one it fails on."""

    def rule(known: list[int], nodes: int, depth: int) -> TokenTree:
        if known[0] == 30:
            raise ValueError("no idea")
        return half_right(lab.script, lab.vocab)(known, nodes, depth)

    prompts = [[30, 4], [31, 4]]
    params = [SamplingParams(max_tokens=20)] * 2
    outputs = lab.speculate_all(prompts, params, 4, rule)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same(output, lab.baseline(prompt, params[0]))
    assert outputs[0].speculation.num_failed_drafts == outputs[0].speculation.num_steps - 1 == 18
    assert outputs[1].speculation.num_accepted_tokens > 0
    assert lab.fast.engine.core.drafts.lost is None


def test_no_token_left_ends_one_request(lab: Lab) -> None:
    """I08 A request for which no token can be chosen ends with an error that says so; others go on."""
    masked = SamplingParams(max_tokens=5, bad_words=[[token] for token in range(320)])
    outputs = lab.fast.generate([[4, 5], [6, 7]], [masked, SamplingParams(max_tokens=5)])
    assert outputs[0].finish_reason == "error"
    assert "masked" in (outputs[0].error or "")
    assert_same(outputs[1], lab.baseline([6, 7], SamplingParams(max_tokens=5)))


@pytest.mark.parametrize("bad", ["a\ud800", [4, -1], [4, 99999], [4, "x"], [4, True], [], ""])
def test_a_prompt_that_makes_no_sense_ends_alone(lab: Lab, bad: Any) -> None:
    """I08 A prompt that cannot be read ends with its own error; those around it are served."""
    params = SamplingParams(max_tokens=5)
    outputs = lab.fast.generate([[4, 5], bad, [6, 7]], params)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert_same(outputs[2], lab.baseline([6, 7], params))
    assert_no_slot_lost(lab.fast)


def test_one_failed_completion_ends_its_siblings(lab: Lab) -> None:
    """I08 When one of n completions fails, the caller gets its error and the others stop running."""
    engine = AsyncLLM(lab.model, draft="none", kv_tokens=60, max_num_seqs=4, **ENGINE)
    params = SamplingParams(max_tokens=200, temperature=1.0, n=4)

    async def scenario() -> None:
        with pytest.raises(RequestError, match="more slots"):
            await engine.generate(random_prompt(1, 8), params)
        await settled(engine)

    asyncio.run(scenario())
    assert engine.llm.engine.core.speculation.num_emitted_tokens < 2 * 60
    assert_no_slot_lost(engine.llm)
    engine.close()


class Interrupting:
    """Stands before an executor's work and raises at one call."""

    def __init__(self, run: Callable[[Work], Event | None], at: int, error: BaseException) -> None:
        self.run, self.at, self.error = run, at, error

    def __call__(self, work: Work) -> Event | None:
        self.at -= 1
        if self.at == 0:
            raise self.error
        return self.run(work)


@pytest.mark.parametrize("at", range(1, 14))
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("device lost")])
def test_an_interrupted_step_is_survived(lab: Lab, at: int, error: BaseException) -> None:
    """I08 A step that fails or is interrupted ends the requests in it; the engine serves the next ones."""
    llm = LLM(lab.model, draft=lab.model, num_speculative_tokens=3, max_batch_tokens=16, **DRAFTED)
    prompts, params = [random_prompt(seed, 20) for seed in range(3)], SamplingParams(max_tokens=12)
    executor = cast(LocalExecutor, llm.engine._executor)
    executor._run = Interrupting(executor._run, at, error)  # type: ignore[method-assign]
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, params)
    else:
        assert any("device lost" in (output.error or "") for output in llm.generate(prompts, params))
    settle(llm)
    assert_no_slot_lost(llm)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        assert_same(output, lab.baseline(prompt, params))
        assert output.speculation.acceptance_rate == 1.0
    assert_no_slot_lost(llm)
