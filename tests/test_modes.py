"""Modes as a table: each can be had by name, and contradictions are refused with cause and remedy."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from paceline import LLM
from paceline.config import Config, Growth, TreeConfig, load_config
from paceline.config import Mode as ModeName
from paceline.core.drafting import DrafterNeeds
from paceline.core.growth import BestFirst, Calibrated, Chain, FixedShape, GrowthRule, Layers
from paceline.core.outcomes import OutcomeCache
from paceline.drafters.ngram import NgramDrafter
from paceline.errors import ConfigError
from paceline.modes import MODES, ahead_passes, draft_policy, growth_rule, mode_of, most_guesses

NEEDS = DrafterNeeds("any")
GROWTHS = [name for name in get_args(Growth) if name != "auto"]


def config(**options: Any) -> Config:
    return load_config(options=options)


def test_the_table_holds_what_the_configuration_offers() -> None:
    assert set(MODES) == set(get_args(ModeName))
    assert all(mode.name == name for name, mode in MODES.items())


@pytest.mark.parametrize("name", sorted(MODES))
def test_every_mode_is_to_be_had_by_name(name: str) -> None:
    mode = mode_of(config(mode=name, draft="embedded"))
    assert mode is MODES[name]
    assert mode.overlapped <= (mode.ahead == "stream"), "who waits for nobody must be sent what there is"
    assert (mode.ahead != "off") <= mode.separate, "working ahead takes a process of its own"


@pytest.mark.parametrize(
    ("placement", "name"),
    [(None, "serial-chain"), ("serial", "serial-chain"), ("disaggregated", "overlapped")],
)
def test_without_a_name_it_is_the_best_for_the_placement(placement: str | None, name: str) -> None:
    assert mode_of(config(placement=placement)).name == name


@pytest.mark.parametrize(
    ("options", "cause", "remedy"),
    [
        ({"placement": "auto"}, "placement is auto", "settled"),
        *(
            (
                {"placement": "serial", "mode": name},
                f"mode is {name}, which runs draft and target at the same time, but groups.placement",
                "leave placement out, or choose disaggregated",
            )
            for name, mode in MODES.items()
            if mode.separate
        ),
        *(
            (
                {"draft": draft, "growth": growth},
                f"growth is {growth} but {reason}",
                "leave it out",
            )
            for growth in GROWTHS
            for draft, reason in (
                ("ngram", "the drafter is ngram, which grows no trees"),
                ("none", "speculation.draft is none"),
            )
        ),
        *(
            (
                {"draft": "ngram", "mode": name},
                f"mode is {name} but the drafter is ngram, which grows no trees",
                "choose a draft model, or leave mode out",
            )
            for name, mode in MODES.items()
            if mode.needs_trees
        ),
        *(
            ({"draft": draft} | options, cause, "leave it out")
            for draft, options, cause in (
                (
                    "ngram",
                    {"draft_dtype": "int8"},
                    "draft_dtype is int8 but the drafter is ngram, which has no",
                ),
                ("none", {"draft_dtype": "int8"}, "draft_dtype is int8 but speculation.draft is none"),
                ("suffix", {"unpickle_head": True}, "the drafter is suffix, which names no head to load"),
                ("eagle3", {"unpickle_head": True}, "the drafter is eagle3, which names no head to load"),
                ("none", {"unpickle_head": True}, "unpickle_head is set but speculation.draft is none"),
                (
                    "a/head",
                    {"unpickle_head": True, "mode": "autoregressive"},
                    "unpickle_head is set but groups.mode is autoregressive: nothing is guessed",
                ),
                ("embedded", {"prompt_lookup_max": 9}, "is embedded, which looks up no n-grams"),
                ("none", {"prompt_lookup_min": 1}, "prompt_lookup_min is 1 but speculation.draft is none"),
            )
        ),
        *(
            (
                {"mode": "outcome-cache", "draft": "embedded", "growth": growth},
                f"growth is {growth} but groups.mode is outcome-cache",
                "leave it out",
            )
            for growth in GROWTHS
        ),
        *(
            ({"draft": "embedded"} | options, f"tree.{name} is", cause)
            for name, cause, options in (
                ("tree_width", "by the rule chain", {"tree_width": 3}),
                ("fan_out", "by the rule best-first", {"mode": "swiftspec", "fan_out": 2}),
                ("tree_shape", "by the rule calibrated", {"mode": "overlapped", "tree_shape": [2, 2]}),
                ("tree_passes", "in mode overlapped", {"mode": "overlapped", "tree_passes": 3}),
                ("tree_passes", "autoregressive", {"mode": "autoregressive", "tree_passes": 3}),
                ("tree_width", "grows no trees", {"draft": "ngram", "tree_width": 3}),
            )
        ),
    ],
    ids=str,
)
def test_a_contradiction_is_refused(options: dict[str, Any], cause: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mode_of(config(**options))
    assert cause in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("options", "cause", "remedy"),
    [
        ({"mode": "swiftpec"}, "mode", "swiftspec"),
        ({"growth": "best"}, "growth", "best-first"),
        ({"tree_shape": []}, "tree_shape", "a list of 1 to 64 whole numbers"),
        ({"tree_width": 0}, "tree_width", "a whole number from 1 to 64"),
        ({"fan_out": 17}, "fan_out", "a whole number from 1 to 16"),
        ({"draft_timeout": 0}, "draft_timeout", "seconds above 0"),
    ],
    ids=str,
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any], cause: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**options)
    assert cause in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("options", "cause", "remedy"),
    [
        (
            {"draft": NgramDrafter(2, 4), "placement": "disaggregated"},
            "draft is an object of this process",
            "choose placement = serial",
        ),
        (
            {"draft": NgramDrafter(2, 4), "mode": "swiftspec"},
            "draft is an object of this process",
            "give a name",
        ),
        (
            {"draft_address": "tcp://nowhere:1", "draft_key_file": "key"},
            "draft_address is set but the drafter runs in the target's process",
            "choose placement = disaggregated",
        ),
        (
            {"draft_address": "tcp://nowhere:1", "placement": "disaggregated"},
            "draft_address and groups.draft_key_file belong together",
            "give both, or neither",
        ),
        (
            {"draft_key_file": "key", "placement": "disaggregated"},
            "draft_address and groups.draft_key_file belong together",
            "give both, or neither",
        ),
        (
            {"mode": "overlapped", "placement": "serial"},
            "overlapped, which runs draft and target at the same time",
            "leave placement out",
        ),
    ],
    ids=str,
)
def test_an_engine_that_cannot_be_is_refused_before_anything_is_loaded(
    options: dict[str, Any], cause: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(model="a folder that does not exist", **options)
    assert cause in str(caught.value)
    assert remedy in str(caught.value)


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("serial-chain", Chain(5)),
        ("serial-tree", BestFirst(8, 4)),
        ("swiftspec", BestFirst(8, 0)),
        ("discard", BestFirst(8, 0)),
        ("outcome-cache", OutcomeCache(5, 3)),
    ],
)
def test_a_modes_own_rule(name: str, rule: GrowthRule) -> None:
    assert growth_rule(MODES[name], TreeConfig(), 5) == rule


def test_the_overlapped_mode_learns_and_has_no_end_of_its_own() -> None:
    rule = growth_rule(MODES["overlapped"], TreeConfig(tree_width=3), 5)
    assert isinstance(rule, Calibrated)
    assert (rule.width, rule.passes) == (3, 0)


@pytest.mark.parametrize("mode", ["serial-chain", "serial-tree", "swiftspec", "discard", "overlapped"])
def test_a_rule_that_is_asked_for_replaces_the_modes_own(mode: str) -> None:
    kinds = dict(zip(GROWTHS, (Chain, FixedShape, BestFirst, Layers, Calibrated), strict=True))
    for name, kind in kinds.items():
        tree = TreeConfig(growth=name, tree_width=3, tree_passes=2, tree_shape=(2, 1))  # type: ignore[arg-type]
        assert type(growth_rule(MODES[mode], tree, 5)) is kind


def test_who_works_ahead_grows_deeper_than_one_verification() -> None:
    for mode, depth, passes in (("serial-chain", 5, 4), ("swiftspec", 11, 0)):
        assert growth_rule(MODES[mode], TreeConfig(growth="chain"), 5) == Chain(depth)
        assert growth_rule(MODES[mode], TreeConfig(growth="layers"), 5) == Layers(8, depth, passes)
    assert growth_rule(MODES["serial-tree"], TreeConfig(growth="layers", tree_passes=0), 5) == Layers(8, 5)


@pytest.mark.parametrize("mode", ["serial-chain", "swiftspec", "overlapped"])
def test_all_of_a_fixed_shape_is_verified_unless_a_number_is_given(mode: str) -> None:
    options = {"mode": mode, "draft": "embedded", "growth": "fixed-shape"}
    policy = draft_policy(config(**options), MODES[mode], (NEEDS,))
    assert (policy.length.wanted(1), policy.planned) == (3 + 6 + 6 + 6, False)
    assert most_guesses(config(**options, tree_shape=[2, 3]), MODES[mode]) == 2 + 6
    assert most_guesses(config(**options, tree_shape=[64, 64, 64]), MODES[mode]) == 256
    assert most_guesses(config(**options, num_speculative_tokens=5), MODES[mode]) == 5


@pytest.mark.parametrize(
    ("mode", "most", "planned"),
    [
        ("serial-chain", 15, True),
        ("overlapped", 15, True),
        *((name, 7, False) for name in ("serial-tree", "swiftspec", "discard", "outcome-cache")),
    ],
)
def test_how_much_is_guessed_without_a_number_is_as_documented(mode: str, most: int, planned: bool) -> None:
    policy = draft_policy(config(mode=mode, draft="embedded"), MODES[mode], (NEEDS,))
    assert (policy.length.wanted(1), policy.planned) == (most, planned)


@pytest.mark.parametrize("passes", [0, 1, 4, 9])
def test_no_number_of_passes_ahead_is_the_defaults(passes: int) -> None:
    chosen = config(mode="swiftspec", draft="embedded", tree_passes=passes)
    assert ahead_passes(chosen) == (passes or TreeConfig().tree_passes)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"draft": "none", "placement": "disaggregated"}, "speculation.draft is none"),
        ({"draft": "none", "mode": "swiftspec"}, "speculation.draft is none"),
        ({"mode": "autoregressive", "placement": "disaggregated"}, "mode is autoregressive"),
        ({"mode": "autoregressive", "num_speculative_tokens": 5}, "num_speculative_tokens is set"),
    ],
    ids=str,
)
def test_without_a_drafter_nothing_runs_beside_the_target(options: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        mode_of(config(**options))


@pytest.mark.parametrize(
    ("options", "planned", "selector", "most"),
    [
        ({}, True, "combined", 15),
        ({"num_speculative_tokens": 5}, False, "combined", 5),
        ({"selector": "reactive"}, True, "reactive", 15),
        ({"selector": "combined", "num_speculative_tokens": 5}, True, "combined", 5),
        ({"selector": "everyone", "num_speculative_tokens": 5}, True, "everyone", 5),
    ],
    ids=str,
)
def test_a_selector_decides_within_the_number_of_guesses(
    options: dict[str, Any], planned: bool, selector: str, most: int
) -> None:
    policy = draft_policy(config(**options), MODES["serial-chain"], (NEEDS, NEEDS))
    assert (policy.planned, policy.selector, policy.length.wanted(1)) == (planned, selector, most)


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"draft": "none"}, "speculation.draft is none"),
        ({"draft": "embedded", "mode": "overlapped"}, "groups.mode is overlapped"),
        ({"draft": "embedded", "mode": "serial-tree"}, "groups.mode is serial-tree"),
    ],
    ids=str,
)
def test_a_selector_where_nothing_is_selected_is_refused(options: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=f"selector is bandit but {cause}.*leave it out"):
        mode_of(config(selector="bandit", **options))
