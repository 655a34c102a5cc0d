"""Costs: monotone whatever their numbers, written and read back as they are, and refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.errors import ConfigError, PacelineError
from paceline.sim.costs.forms import (
    Draft,
    LinearDraft,
    LinearPass,
    Pass,
    PassesDraft,
    PassShape,
    RooflinePass,
    ShareDraft,
    TableDraft,
    TablePass,
    pass_seconds,
)
from paceline.sim.costs.model import CoreCosts, CostModel, load_costs, save_costs
from paceline.sim.costs.published import published

seconds = st.floats(0.0, 10.0)


@st.composite
def tables(draw: st.DrawFn) -> TablePass:
    sizes = sorted(draw(st.sets(st.integers(1, 600), min_size=1, max_size=8)))
    times = sorted(draw(st.lists(seconds, min_size=len(sizes), max_size=len(sizes))))
    rest = {name: draw(seconds) for name in ("per_token_s", "per_kv_token_s", "per_request_s", "per_pair_s")}
    between = draw(st.sampled_from(["line", "step"]))
    return TablePass(new_tokens=tuple(sizes), seconds_at=tuple(times), between=between, **rest)


def some(kind: type[msgspec.Struct], **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = [name for name in kind.__struct_fields__ if name.endswith("_s")]
    return st.builds(kind, **dict.fromkeys(names, seconds), **more)


passes: st.SearchStrategy[Pass] = st.one_of(
    tables(), some(LinearPass), some(RooflinePass, sharpness=st.floats(1.0, 64.0))
)


@st.composite
def draft_tables(draw: st.DrawFn) -> TableDraft:
    levels = sorted(draw(st.sets(st.integers(0, 20), min_size=1, max_size=6)))
    times = sorted(draw(st.lists(seconds, min_size=len(levels), max_size=len(levels))))
    names = ("per_level_s", "per_request_s", "per_guess_s", "per_unread_s", "per_level_kv_s")
    rest = {name: draw(seconds) for name in names}
    return TableDraft(levels=tuple(levels), seconds_at=tuple(times), **rest)


drafts: st.SearchStrategy[Draft] = st.one_of(
    some(LinearDraft),
    draft_tables(),
    some(PassesDraft, each=passes),
    st.builds(ShareDraft, share=st.floats(0.0, 10.0), of=passes),
)


@given(passes, st.integers(1, 700), st.integers(0, 200), st.integers(0, 10**5), st.integers(1, 64))
def test_no_pass_gets_quicker_with_more_tokens_or_more_context(
    form: Pass, new: int, more: int, kv: int, requests: int
) -> None:
    here = form.seconds(new, kv, requests)
    slack = 1e-9 * here
    assert here >= 0.0
    assert form.seconds(new + more, kv, requests) >= here - slack
    assert form.seconds(new, kv + 100 * more, requests) >= here - slack


@given(drafts, st.integers(1, 8), st.integers(1, 8), st.integers(0, 60), st.integers(0, 4000))
def test_no_question_gets_quicker_with_more_guesses_unread_tokens_or_context(
    form: Draft, requests: int, levels: int, more: int, kv: int
) -> None:
    guesses = requests * levels
    here = form.seconds(requests, levels, guesses, requests, kv)
    slack = 1e-9 * here
    assert form.seconds(requests, levels, guesses + more, requests, kv) >= here - slack
    assert form.seconds(requests, levels, guesses, requests + more, kv) >= here - slack
    assert form.seconds(requests, levels, guesses, requests, kv + more) >= here - slack
    assert form.seconds(requests, levels + more, guesses + requests * more, requests, kv) >= here - slack


def test_a_table_has_its_steps_and_what_lies_between() -> None:
    table = TablePass(new_tokens=(1, 8, 9), seconds_at=(1.0, 1.7, 3.0), per_token_s=0.5)
    assert [table.seconds(n, 0, 1) for n in (1, 2, 8, 9, 11)] == pytest.approx([1.0, 1.1, 1.7, 3.0, 4.0])
    padded = msgspec.structs.replace(table, between="step")
    assert [padded.seconds(n, 0, 1) for n in (1, 2, 8, 9, 11)] == pytest.approx([1.0, 1.7, 1.7, 3.0, 4.0])


def test_a_table_charges_context_requests_and_pairs() -> None:
    table = TablePass(
        new_tokens=(1, 8), seconds_at=(1.0, 1.0), per_kv_token_s=0.01, per_request_s=0.1, per_pair_s=0.001
    )
    assert table.seconds(8, 200, 2) == pytest.approx(1.0 + 2.0 + 0.1 + 0.001 * 2 * 4 * (100 + 4 / 2))
    again = msgspec.structs.replace(table, per_kv_again_s=0.1)
    assert again.seconds(2, 200, 2) == table.seconds(2, 200, 2)
    assert again.seconds(8, 200, 2) == pytest.approx(table.seconds(8, 200, 2) + 20.0)


def test_passes_of_equal_totals_are_told_apart() -> None:
    """A prompt beside requests that decode: pairs, and rows of logits, are those of each request."""
    table = TablePass(
        new_tokens=(1,), seconds_at=(1.0,), per_pair_s=0.001, per_kv_again_s=0.01, per_row_s=0.1, most_rows=4
    )
    shape = PassShape.of([(60, 0, 1), (1, 500, 1), (3, 100, 3)])
    assert (shape.new_tokens, shape.kv_tokens, shape.requests, shape.rows) == (64, 600, 3, 5)
    assert shape.pairs == 60 * 30 + 500.5 + 3 * 101.5
    assert pass_seconds(table, shape) == pytest.approx(1.0 + 0.001 * shape.pairs + 0.01 * 100 + 0.5)
    assert PassShape.of([(4, 50, 4)] * 3) == PassShape.even(12, 150, 3, 4)
    linear = LinearPass(fixed_s=1.0, per_token_s=0.1)
    assert pass_seconds(linear, shape) == linear.seconds(64, 600, 3)


def test_logits_are_wanted_of_guesses_and_of_a_prompts_last_token() -> None:
    table = TablePass(new_tokens=(1,), seconds_at=(1.0,), per_row_s=0.1, most_rows=4)
    assert table.seconds(8, 0, 2) == pytest.approx(1.8)
    assert table.seconds(500, 0, 2) == pytest.approx(1.8)


def test_a_drafters_table_has_its_jump_and_goes_on_beyond() -> None:
    table = TableDraft(levels=(0, 1, 2, 4), seconds_at=(0.0, 1.0, 4.0, 5.0), per_level_s=0.5, per_guess_s=0.1)
    times = [table.seconds(1, levels, 0, 0, 0) for levels in (0, 1, 2, 3, 4, 6)]
    assert times == pytest.approx([0.0, 1.0, 4.0, 4.5, 5.0, 6.0])
    assert table.seconds(2, 1, 5, 0, 0) == pytest.approx(1.5)


def test_a_roofline_is_the_sum_or_the_longer_by_its_sharpness() -> None:
    form = RooflinePass(read_s=3.0, per_token_s=1.0, per_kv_token_s=0.5, fixed_s=0.25)
    assert form.seconds(4, 2, 1) == pytest.approx(0.25 + 4.0 + 4.0)
    sharp = msgspec.structs.replace(form, sharpness=64.0)
    assert sharp.seconds(1, 2, 1) == pytest.approx(0.25 + 4.0)
    assert sharp.seconds(9, 2, 1) == pytest.approx(0.25 + 9.0)


def test_a_drafting_model_runs_once_per_level() -> None:
    form = PassesDraft(each=LinearPass(fixed_s=1.0, per_token_s=0.1), fixed_s=0.5)
    # 7 unread tokens of two requests, then two levels of 3 guesses each.
    assert form.seconds(2, 3, 9, 7, 100) == pytest.approx(0.5 + 1.7 + 2 * 1.3)
    assert form.seconds(2, 1, 2, 2, 100) == pytest.approx(0.5 + 1.2)


# The study's own numbers, as its predictor computes them.
def test_the_published_constants_are_those_of_the_study() -> None:
    costs = published("llama3.1-8b@h100")
    target = costs.target.seconds(4, 1000, 1)
    assert target == pytest.approx(3.92645679e-8 * 1000 + 2.10103129e-5 * 4 + 5.88590713e-3, rel=1e-12)
    eagle = costs.draft("eagle").seconds(1, 3, 3, 1, 1000)
    assert eagle == pytest.approx(2.37768493e-9 * 1000 + 8.41429603e-7 * 3 + 2.13526175e-3, rel=1e-12)
    assert costs.draft("ngram").seconds(1, 3, 3, 1, 1000) == pytest.approx(0.005875 * target, rel=1e-12)
    assert costs.overhead_s(128) == pytest.approx(1.20683946e-3)


def test_charged_by_level_a_head_costs_the_same_at_three_guesses_only() -> None:
    by_level = published("llama3.1-8b@h100-by-level").draft("eagle3")
    fixed = published("llama3.1-8b@h100").draft("eagle3")
    assert by_level.seconds(1, 3, 3, 1, 0) == pytest.approx(fixed.seconds(1, 3, 3, 1, 0), rel=2e-3)
    assert by_level.seconds(1, 1, 1, 1, 0) < fixed.seconds(1, 1, 1, 1, 0) / 2


def test_unknown_names_are_refused_with_the_nearest_and_the_list() -> None:
    with pytest.raises(
        ConfigError, match=r"did you mean 'llama3.1-8b@h100'\? The known ones are .*qwen2-72b"
    ):
        published("llama3.1-8b@h10")
    with pytest.raises(ConfigError, match=r"drafter 'suffix': they have eagle, eagle3, ngram"):
        published("llama3.1-8b@h100").draft("suffix")


# ---------------------------------------------------------------- cores


def test_costs_of_other_numbers_of_cores() -> None:
    one, two = LinearPass(fixed_s=2.0), LinearPass(fixed_s=1.0)
    slow = LinearDraft(per_level_s=0.5)
    costs = CostModel(two, {"m": LinearDraft()}, cores=2, by_cores={1: CoreCosts(one, {"m": slow})})
    apart = costs.split(1, 1)
    assert (apart.target, apart.drafts["m"], apart.cores) == (one, slow, 2)
    assert costs.split(2, 1).target == two
    with pytest.raises(ConfigError, match=r"nothing of 4 cores: they were measured on 1, 2; measure again"):
        costs.split(4, 1)


# ---------------------------------------------------------------- files


def example() -> CostModel:
    return CostModel(
        target=TablePass(new_tokens=(1, 4), seconds_at=(0.01, 0.02), per_kv_token_s=1e-6),
        drafts={
            "ngram": LinearDraft(per_request_s=1e-5),
            "draft": PassesDraft(each=RooflinePass(read_s=1e-3, per_token_s=0.0, per_kv_token_s=1e-9)),
            "share": ShareDraft(share=0.1, of=LinearPass(fixed_s=1.0)),
        },
        step_overhead_s=1e-4,
        cores=2,
        by_cores={1: CoreCosts(LinearPass(fixed_s=0.5), {"ngram": LinearDraft()})},
        provenance={"source": "a test", "held_out": {"median": 0.01}},
    )


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save_costs(path, example())
    assert load_costs(path) == example()


@given(passes, drafts, seconds, seconds)
def test_every_form_survives_its_file(target: Pass, draft: Draft, step: float, request: float) -> None:
    from paceline.sim.costs.model import costs_of, parsed, to_builtins

    costs = CostModel(target, {"a": draft}, step_overhead_s=step, request_overhead_s=request)
    assume(target.seconds(1, 0, 1) + costs.overhead_s(1) > 0.0)
    assert costs_of(parsed(json.dumps(to_builtins(costs)), "it"), "it") == costs


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for name in path[:-1]:
            content = content[name]
        del content[path[-1]]

    return change


def with_value(value: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("format"), "holds no costs"),
        (with_value(2, "version"), "its version is 2 and this release reads 1"),
        (without("target"), "missing required field `target`"),
        (without("step_overhead_s"), "missing required field `step_overhead_s`"),
        (without("target", "seconds_at"), "target: .*missing required field `seconds_at`"),
        (without("target", "form"), "target: .*missing required field `form`"),
        (with_value("cubic", "target", "form"), "target.form: Invalid value 'cubic'"),
        (
            with_value(float("nan"), "target", "per_kv_token_s"),
            "target.per_kv_token_s: Expected `float` >= 0",
        ),
        (with_value(float("inf"), "step_overhead_s"), "step_overhead_s: Expected `float` <= 1000000"),
        (with_value(1e308, "target", "seconds_at"), "target"),
        (with_value(1e7, "message_s"), "message_s: Expected `float` <= 1000000"),
        (with_value({"a": float("nan")}, "provenance"), "provenance holds no number"),
        (with_value(-1e-9, "target", "per_kv_token_s"), "target.per_kv_token_s: Expected `float` >= 0"),
        (with_value(-1.0, "step_overhead_s"), "step_overhead_s: Expected `float` >= 0"),
        (with_value("1", "step_overhead_s"), "step_overhead_s: Expected `float`, got `str`"),
        (with_value(True, "step_overhead_s"), "step_overhead_s: Expected `float`, got `bool`"),
        (with_value(10**400, "step_overhead_s"), "step_overhead_s"),
        (with_value([0.02, 0.01], "target", "seconds_at"), "target: `seconds_at` must not fall"),
        (with_value([4, 1], "target", "new_tokens"), "target: `new_tokens` must rise"),
        (with_value([1, 2, 3], "target", "new_tokens"), "target: `new_tokens` has 3 sizes but"),
        (with_value([0, 4], "target", "new_tokens"), r"target.new_tokens\[.*\]: Expected `int` >= 1"),
        (with_value([], "target", "new_tokens"), "target.new_tokens: Expected `array` of length >= 1"),
        (with_value(1.0, "drafts", "ngram", "per_requst_s"), "drafts.ngram: .*unknown field `per_requst_s`"),
        (
            with_value(float("nan"), "drafts", "draft", "each", "read_s"),
            "drafts.draft.each.read_s: Expected `float` >= 0",
        ),
        (with_value({"0": {}}, "by_cores"), "by_cores"),
        (with_value({"1": {}}, "by_cores"), "by_cores.1: .*missing required field `target`"),
        (with_value({"form": "x"}, "by_cores", "1", "target"), "by_cores.1.target.form: Invalid value 'x'"),
        (with_value({"one": {}}, "by_cores"), "by_cores"),
        (with_value(1.0, "step_overhead"), "unknown field `step_overhead`"),
    ],
)
def test_files_that_do_not_hold_costs(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "costs.json"
    save_costs(path, example())
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message) as refused:
        load_costs(path)
    assert str(path) in str(refused.value)
    assert "paceline profile" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "line 1: not valid JSON"),
        (b'{\n"format": "paceline-costs",\n"version": }', "line 3: not valid JSON"),
        (b"[]", "holds no costs"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"format": "paceline-costs", "format": "x"}', "`format` is given twice"),
    ],
)
def test_files_that_hold_anything_else(text: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        load_costs(path)


def test_steps_take_time(tmp_path: Path) -> None:
    """Else nothing can be compared with anything: rates would be infinite."""
    path = tmp_path / "costs.json"
    with pytest.raises(ConfigError, match="a step of one token takes no time"):
        save_costs(path, CostModel(target=LinearPass(fixed_s=0.0), drafts={}))
    save_costs(path, CostModel(target=LinearPass(fixed_s=0.0), drafts={}, step_overhead_s=1e-3))
    assert load_costs(path).step_overhead_s == 1e-3


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the costs .*No such file"):
        load_costs(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot write the costs"):
        save_costs(tmp_path / "no" / "folder.json", example())


def test_costs_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    with pytest.raises(ConfigError, match="step_overhead_s: Expected `float` >= 0"):
        save_costs(path, replace(example(), step_overhead_s=float("nan")))
    with pytest.raises(PacelineError, match="cannot be saved"):
        save_costs(path, replace(example(), provenance={"an": object()}))
    with pytest.raises(PacelineError, match="provenance"):
        save_costs(path, replace(example(), provenance={"error": float("nan")}))
    assert not path.exists()


def test_no_form_is_made_of_what_is_no_time() -> None:
    for number in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="it must be finite and not below 0"):
            LinearPass(fixed_s=number)
        with pytest.raises(ValueError, match="`seconds_at` holds"):
            TablePass(new_tokens=(1,), seconds_at=(number,))


def test_costs_of_a_form_of_their_own_cannot_be_saved(tmp_path: Path) -> None:
    class Odd:
        def seconds(self, new_tokens: int, kv_tokens: int, requests: int) -> float:
            return float(new_tokens + kv_tokens + requests)

    with pytest.raises(PacelineError, match="cannot be saved"):
        save_costs(tmp_path / "costs.json", replace(example(), target=Odd()))
