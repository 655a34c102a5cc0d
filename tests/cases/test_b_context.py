"""B. The end of the context, of the window, and of a step's token budget."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import LLM, SamplingParams
from paceline.core.draft_lane import DraftPolicy
from paceline.core.drafting import DrafterNeeds, FixedLength
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.scheduler import Limits
from paceline.core.token_tree import ROOT, TokenTree
from paceline.core.work import DraftItem, RequestAborted, TargetItem
from tests.cases.drafters import Rule, half_right, mistaken, oracle
from tests.cases.lab import Lab, assert_no_slot_lost, assert_same, random_prompt
from tests.core.test_engine_core import arrive, assert_no_leak
from tests.core.toy import VOCAB as TOY_VOCAB
from tests.core.toy import Drive, ToyExecutor, toy_next
from tests.tiny import ENGINE, write_random

CONTEXT = 64
WINDOW = 16
ENDLESS = SamplingParams(max_tokens=None)


@pytest.fixture(scope="module")
def short(models: Path) -> Lab:
    return Lab(write_random(models / "short", context=CONTEXT))


@pytest.fixture(scope="module")
def windowed(models: Path) -> Lab:
    return Lab(write_random(models / "windowed", window=WINDOW))


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5, 6])
def test_drafting_at_the_end_of_the_context(short: Lab, room: int) -> None:
    """B01 A request without a length limit fills the context to the last token and ends with `length`."""
    prompt = random_prompt(room, CONTEXT - room)
    output = short.check(prompt, ENDLESS, 5)
    assert (output.usage.total_tokens, output.finish_reason) == (CONTEXT, "length")
    (refused,) = short.fast.generate([random_prompt(1, CONTEXT)], ENDLESS)
    assert "shorten the prompt" in (refused.error or "")


def test_guesses_stay_inside_the_context(short: Lab) -> None:
    """B02 No round asks for, or verifies, more guesses than the context has places before the bonus token."""
    prompt = [7, 8, 9] * 20 + [7]
    output = short.check(prompt, ENDLESS, 8)
    assert all(asked <= CONTEXT - known - 1 for known, asked in short.drafter.asked)
    assert output.speculation.num_draft_tokens <= 2
    llm = LLM(short.model, draft="ngram", num_speculative_tokens=8, **ENGINE)
    (looked_up,) = llm.generate(prompt, ENDLESS)
    assert_same(looked_up, output)
    assert looked_up.speculation.num_draft_tokens <= 2


def test_draft_model_with_a_shorter_context(models: Path, lab: Lab) -> None:
    """B03 Past the draft model's context a request goes on without guesses, and only that request."""
    draft = write_random(models / "short-draft", context=48)
    llm = LLM(lab.model, draft=draft, num_speculative_tokens=4, **ENGINE)
    lengths, counts = [60, 40, 6], [40, 60, 30]
    prompts = [random_prompt(seed, length) for seed, length in enumerate(lengths)]
    params = [SamplingParams(max_tokens=count) for count in counts]
    outputs = llm.generate(prompts, params)
    for prompt, wanted, output in zip(prompts, params, outputs, strict=True):
        assert_same(output, lab.baseline(prompt, wanted))
        assert output.speculation.num_failed_drafts == 0
    assert outputs[0].speculation.num_draft_tokens == 0
    assert 0 < outputs[1].speculation.num_draft_tokens <= 8
    assert outputs[2].speculation.acceptance_rate == 1.0
    assert outputs[2].speculation.num_accepted_tokens > 20


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("kind", ["wrong", "half", "right"])
@pytest.mark.parametrize("length", [3, 40])
def test_sliding_window_rolls_back_and_stays_small(windowed: Lab, k: int, kind: str, length: int) -> None:
    """B05 Guesses may be taken back across the window's edge, and a request holds a window of KV, no more."""
    rules: dict[str, Rule] = {
        "wrong": mistaken(windowed.script, windowed.vocab),
        "half": half_right(windowed.script, windowed.vocab),
        "right": oracle(windowed.script),
    }
    core = windowed.fast.engine.core
    held = []

    def watched(known: list[int], max_nodes: int, max_depth: int) -> TokenTree:
        held.append(core.ledger.pool.num_slots - core.ledger.pool.num_free - core.ledger.cache.size)
        return rules[kind](known, max_nodes, max_depth)

    core.ledger.cache.clear()
    windowed.check(random_prompt(length, length), SamplingParams(max_tokens=64), k, watched)
    assert max(held, default=0) <= WINDOW + k + 1
    assert len(held) >= (12 if k else 0)
    assert_no_slot_lost(windowed.fast)


def test_windowed_requests_share_prefixes_and_outlive_a_small_pool(windowed: Lab) -> None:
    """B05 With a window, output may outgrow the whole KV cache, and short prefixes are still shared."""
    llm = LLM(windowed.model, draft="none", kv_tokens=64, max_batch_tokens=32, max_num_seqs=2, **ENGINE)
    prompts = [random_prompt(1, 10), random_prompt(2, 30), random_prompt(3, 4)]
    params = SamplingParams(max_tokens=150)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        assert_same(output, windowed.baseline(prompt, params))
    assert_no_slot_lost(llm)
    brief = SamplingParams(max_tokens=4)
    (first,) = llm.generate([prompts[0]], brief)
    (second,) = llm.generate([[*prompts[0], *first.token_ids]], brief)
    assert second.usage.cached_tokens == len(prompts[0]) + 3


@pytest.mark.parametrize(("sequences", "budget"), [(16, 64), (16, 16), (5, 23)])
def test_guesses_are_cut_to_the_step_budget(random_model: Path, sequences: int, budget: int) -> None:
    """B06 More wanted guesses than a pass has room for are trimmed; every output stays what it was."""
    lab = Lab(random_model, max_num_seqs=sequences, max_batch_tokens=budget)
    prompts = [random_prompt(seed, 2 + seed) for seed in range(16)]
    params = SamplingParams(max_tokens=24)
    outputs = lab.speculate_all(prompts, [params] * 16, 8, half_right(lab.script, lab.vocab))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same(output, lab.baseline(prompt, params))


# ---------------------------------------------------------------- the window, in the core alone


class WindowedToy(ToyExecutor):
    """A toy target that sees the last WINDOW tokens only, through the slots of those."""

    def _token_after(self, table: list[int], item: TargetItem, tree: TokenTree, node: int) -> int:
        slots = table + [item.tree_slots[n] for n in (tree.path(node) if node != ROOT else [])]
        entries = [self.kv[slot] for slot in slots[-WINDOW:]]
        assert [place for place, _ in entries] == list(range(len(slots)))[-WINDOW:]
        return toy_next([token for _, token in entries])


def windowed_toy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(toy_next(tokens[-WINDOW:]))
    return tokens[len(prompt) :]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_windowed_lives_are_exact_and_leak_nothing(seed: int) -> None:
    """B05 Whatever is preempted, aborted or shared, no token sees a slot that somebody else took over."""
    rng = random.Random(seed)
    limits = Limits(120, rng.randrange(90, 200), rng.randrange(1, 5), rng.randrange(8, 40), WINDOW)
    needs = DrafterNeeds("toy", ingests_prompts=True)
    core = EngineCore(
        CoreConfig(
            limits, TOY_VOCAB, (), rng.random() < 0.7, DraftPolicy((needs,), FixedLength(rng.randrange(6)))
        )
    )

    def draft(known: list[int], item: DraftItem) -> TokenTree:
        right = windowed_toy(known, item.max_depth)
        return TokenTree.chain([token if rng.random() < 0.7 else 3 for token in right])

    drive = Drive(core, WindowedToy(limits.num_slots, draft))
    prompts: dict[str, list[int]] = {}
    for index in range(12):
        name = f"r{index}"
        prompts[name] = [1, 2, 3] * rng.randrange(8) + [rng.randrange(3) for _ in range(rng.randrange(1, 40))]
        arrive(drive, name, prompts[name], max_tokens=rng.randrange(1, 60))
        for _ in range(rng.randrange(30)):
            drive.step()
        if rng.random() < 0.15:
            drive.feed(RequestAborted(name))
    drive.run()
    for name, prompt in prompts.items():
        tokens = drive.tokens.get(name, [])
        assert tokens == windowed_toy(prompt, len(tokens))
        assert drive.finished[name].finish_reason in ("length", "abort")
    assert_no_leak(core)
