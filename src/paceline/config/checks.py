"""What may stand in the tree of options, and the words by which the rest is refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from paceline.config.tables import Config, Table
from paceline.errors import ConfigError, shown


def check(table: type[Table], values: object, path: tuple[str, ...], source: str) -> dict[str, Any]:
    """`values` with every key known and every value of its type; `source` starts the error message.

    Raises ConfigError.
    """
    fields = {field.name: field.type for field in msgspec.structs.fields(table)}
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{source}{'.'.join(path)} is {shown(values)}: it must be a table with the keys "
            f"{', '.join(fields)}."
        )
    checked: dict[str, Any] = {}
    for key, value in values.items():
        where = (*path, str(key))
        if key not in fields:
            candidates = {".".join(known): known[-1] for known in _known_paths(path)}
            raise ConfigError(
                f"{source}unknown key `{'.'.join(where)}`: {nearest(str(key), candidates, fields)}"
            )
        if isinstance(fields[key], type) and issubclass(fields[key], Table):
            checked[key] = check(fields[key], value, where, source)
        else:
            checked[key] = _leaf(fields[key], value, where, source)
    return checked


def _leaf(kind: Any, value: object, where: tuple[str, ...], source: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise ConfigError(
            f"{source}{'.'.join(where)} is {shown(value)}: it must be {_allowed(kind)}."
        ) from None


def _allowed(kind: Any) -> str:
    if kind is bool:
        return "true or false"
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    descriptions = [arg.description for arg in get_args(kind) if isinstance(arg, Meta) and arg.description]
    return descriptions[0] if descriptions else _allowed(get_args(kind)[0])


def build(tree: dict[str, Any]) -> Config:
    """The options of a tree that was checked, as far as they go together. Raises ConfigError."""
    config = msgspec.convert(tree, Config)
    speculation, scheduler = config.speculation, config.scheduler
    if speculation.prompt_lookup_min > speculation.prompt_lookup_max:
        raise ConfigError(
            f"speculation.prompt_lookup_min is {speculation.prompt_lookup_min} but "
            f"speculation.prompt_lookup_max is {speculation.prompt_lookup_max}: raise the one or "
            "lower the other."
        )
    sizes = [size for size, _ in speculation.length_by_batch_size]
    if sizes != sorted(set(sizes)):
        raise ConfigError(
            f"speculation.length_by_batch_size has the batch sizes {', '.join(map(str, sizes))}: "
            "each must be larger than the one before."
        )
    if scheduler.max_batch_tokens < scheduler.max_num_seqs:
        raise ConfigError(
            f"scheduler.max_batch_tokens is {scheduler.max_batch_tokens} but scheduler.max_num_seqs is "
            f"{scheduler.max_num_seqs}: each running request needs a token of the pass, so raise the one "
            "or lower the other."
        )
    return config


def nearest(name: str, candidates: Mapping[str, str], known: Iterable[str]) -> str:
    """`candidates`: what to show, and the name to compare with. `known`: what to list if none is near."""
    words = list(dict.fromkeys(candidates.values()))
    close = difflib.get_close_matches(name, words, n=1, cutoff=0.6)
    if not close:
        return f"the known ones are {', '.join(known)}."
    return f"did you mean `{next(shown for shown, word in candidates.items() if word == close[0])}`?"


def _leaves(table: type[Table], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for field in msgspec.structs.fields(table):
        if isinstance(field.type, type) and issubclass(field.type, Table):
            yield from _leaves(field.type, (*path, field.name))
        else:
            yield (*path, field.name)


def _known_paths(near: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Every leaf and table, those of the table `near` first."""
    leaves = list(_leaves(Config))
    tables = sorted({leaf[:-1] for leaf in leaves if len(leaf) > 1})
    return sorted([*leaves, *tables], key=lambda path: path[:-1] != near)


OPTION_PATHS: dict[str, tuple[str, ...]] = {path[-1]: path for path in _leaves(Config)}
"""The flat keyword names that `LLM` and the command line take, and where each belongs in the tree."""
