"""Names of drafters: each known one, several at once, and nonsense refused with what was meant."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.drafters import registry
from paceline.drafters.registry import ELSEWHERE, KINDS, MODEL, OWN, drafters_of, named
from paceline.errors import ConfigError


@pytest.mark.parametrize("kind", [*KINDS.values(), MODEL], ids=lambda kind: kind.name)
def test_every_line_names_a_factory_that_exists(kind: object) -> None:
    module, _, function = kind.factory.partition(":")  # type: ignore[attr-defined]
    assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize("name", KINDS)
def test_a_name_stands_for_its_kind(name: str) -> None:
    (drafter,) = named(name)
    assert drafter.kind is KINDS[name]


@pytest.mark.parametrize(
    "name",
    ["embedded", "Embedded", "some/where", "org/name@main", "org/EAGLE3", "me/mtp", "model.gguf", "model"],
)
def test_what_is_no_drafters_name_is_a_models(name: str) -> None:
    (drafter,) = named(name)
    assert (drafter.name, drafter.kind) == (name, MODEL)


def test_several_are_joined_by_a_plus_sign() -> None:
    assert [each.name for each in named("ngram + some/where")] == ["ngram", "some/where"]


def test_a_folder_may_have_a_plus_sign(tmp_path: Path) -> None:
    folder = tmp_path / "c++"
    folder.mkdir()
    assert [each.kind for each in named(str(folder))] == [MODEL]


def test_a_folder_may_have_almost_a_drafters_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ngrams").mkdir()
    monkeypatch.chdir(tmp_path)
    assert [each.kind for each in named("ngrams")] == [MODEL]


@pytest.mark.parametrize(
    ("draft", "cause", "remedy"),
    [
        ("ngrams", "no drafter 'ngrams'", "did you mean `ngram`?"),
        ("Nnone", "no drafter 'Nnone'", "did you mean `none`?"),
        ("EAGLE3", "no drafter 'EAGLE3'", "did you mean `eagle3`?"),
        ("None", "no drafter 'None'", "did you mean `none`?"),
        ("embeded", "no drafter 'embeded'", "did you mean `embedded`?"),
        ("ngram+n-gram", "no drafter 'n-gram'", "did you mean `ngram`?"),
        ("ngram+", "speculation.draft is 'ngram+'", "give a name on either side"),
        ("+", "speculation.draft is '+'", "give a name on either side"),
        ("ngram+ngram", "speculation.draft is ngram+ngram", "name 'ngram' once"),
        ("ngram+none", "none stands alone", "leave it out"),
    ],
)
def test_nonsense_is_refused(draft: str, cause: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        named(draft)
    assert cause in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize("name", ["Embedded", "x" * 5000])
def test_a_name_in_capitals_or_too_long_for_a_path_is_left_to_the_loader(name: str) -> None:
    assert [each.kind for each in named(name)] == [MODEL]


def test_whose_choice_it_is_decides_what_is_known() -> None:
    assert drafters_of(load_config(options={"draft": "none"})) == ()
    assert [each.kind for each in drafters_of(load_config(), own_drafter=True)] == [OWN]
    away = load_config(options={"draft_address": "tcp://a:1", "draft_key_file": "k"})
    assert [each.kind for each in drafters_of(away)] == [ELSEWHERE]


@pytest.mark.parametrize(
    ("options", "installed", "expected"),
    [
        ({}, True, ["ngram", "eagle3"]),
        ({}, False, ["ngram"]),
        ({"model": "SmolLM2", "mode": "serial-tree"}, True, ["ngram", "eagle3"]),
        ({"model": "org/name"}, True, ["ngram"]),
        ({"placement": "disaggregated"}, True, ["ngram"]),
        ({"placement": "auto"}, True, ["ngram"]),
        ({"mode": "swiftspec"}, True, ["ngram"]),
    ],
)
def test_unasked_the_embedded_model_drafts_with_its_head(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], installed: bool, expected: list[str]
) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda _: object() if installed else None)
    assert [each.name for each in drafters_of(load_config(options=options))] == expected


def test_auto_stands_alone() -> None:
    with pytest.raises(ConfigError, match="name the drafters"):
        named("auto+suffix")
