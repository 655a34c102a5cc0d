"""The four places that options come from: defaults < TOML file < `--set a.b=c` < explicit options."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from paceline.config.checks import OPTION_PATHS, build, check, nearest
from paceline.config.tables import Config, Table
from paceline.errors import ConfigError


def load_config(
    path: Path | None = None,
    overrides: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
) -> Config:
    """The configuration from a TOML file, `a.b=c` overrides (values in TOML) and flat options.

    `options` holds keyword arguments of `LLM` by leaf name; those at None count as not given.
    Raises ConfigError.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        _merge(tree, check(Config, _read(path), (), f"{path}: "))
    for override in overrides:
        _merge(tree, check(Config, _parse_override(override), (), "--set: "))
    _merge(tree, check(Config, _from_options(options or {}), (), ""))
    return build(tree)


def with_options(config: Config, options: Mapping[str, object]) -> Config:
    """`config` with flat options laid over it, checked as a whole. Raises ConfigError."""
    tree = check(Config, msgspec.to_builtins(config), (), "")
    _merge(tree, check(Config, _from_options(options), (), ""))
    return build(tree)


def to_toml(config: Config) -> str:
    """A TOML document that `load_config` reads back as the same configuration."""
    lines: list[str] = []
    tables: list[str] = []
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, Table):
            set_ = {
                key: found for key in value.__struct_fields__ if (found := getattr(value, key)) is not None
            }
            tables += ["", f"[{name}]", *(f"{key} = {_toml(found)}" for key, found in set_.items())]
        elif value is not None:
            lines.append(f"{name} = {_toml(value)}")
    return "\n".join([*lines, *tables]) + "\n"


# ---------------------------------------------------------------- parts


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8.") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}.") from None


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    names = [name.strip() for name in key.split(".")]
    if not equals or not all(names):
        raise ConfigError(f"--set {override!r}: write KEY=VALUE, as in --set scheduler.max_num_seqs=4.")
    tree: Any = _parse_value(override, text.strip())
    for name in reversed(names):
        tree = {name: tree}
    return dict(tree)


def _parse_value(override: str, text: str) -> object:
    """A TOML value; a bare word, such as a model's name, may go without quotes."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError) as error:
        if not text or text[0] in "\"'[{" or "\n" in text:
            raise ConfigError(f"--set {override!r}: {text!r} is not a TOML value: {error}.") from None
        return text
    if len(document) != 1:
        raise ConfigError(f"--set {override!r}: give one value.")
    return document["value"]


def _from_options(options: Mapping[str, object]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in options.items():
        if name not in OPTION_PATHS:
            raise ConfigError(
                f"unknown option `{name}`: {nearest(name, {n: n for n in OPTION_PATHS}, OPTION_PATHS)}"
            )
        if value is None:
            continue
        branch = tree
        for part in OPTION_PATHS[name][:-1]:
            branch = branch.setdefault(part, {})
        branch[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return tree


def _merge(tree: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML's basic strings are JSON's, save that DEL must be escaped and surrogates may not be.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value)
