"""One typed tree of every engine option, and the four places its values come from.

Defaults < TOML file < `--set a.b=c` < explicit options. Whatever cannot be honoured is a ConfigError that
names the key, the value, what is allowed and where the value came from.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from paceline.errors import ConfigError, shown

Dtype = Literal["auto", "float32", "bfloat16", "int8"]
Device = Literal["auto", "cpu", "cuda"]
SuffixCache = Literal["off", "tenant", "shared"]
Name = Annotated[str, Meta(min_length=1, description="a text that is not empty")]
_MOST_TOKENS = 2**31 - 1
"""Slots and positions are 32-bit in the kernels."""


Selector = Literal["auto", "combined", "reactive", "bandit", "classifier", "everyone"]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of options; a frozen value, so that it can be shared between threads and processes."""


class SpeculationConfig(_Table, frozen=True):
    """draft: "ngram", "suffix", "layers" (the first of the target), "eagle3" (the head shipped for it), "mtp"
    (its own modules), a model (as `Config.model`) or a head, in a folder or on a hub; several joined by +;
    "auto" = "ngram", with "eagle3" for the embedded model where its head is installed and works in turn; or
    "none".  draft_dtype: of a drafter with weights; auto = for a head the target's, but
    8 bits instead of 16 on a CPU.

    num_speculative_tokens: guesses per request and step, whatever the batch; unset = as many as pay for
    themselves by measured costs and acceptance, up to 15 in the modes overlapped and serial-chain;
    in the other modes, which are there to be compared with, always 7; of a fixed shape all nodes.
    `length_by_batch_size`, pairs of (smallest batch size, length), replaces it where given, with 0 below the
    first pair. A request's own number goes before both.
    selector: how that is decided where draft and target work in turn, and which of several drafters is asked:
    "combined" = every guess and question that pays for itself; the others are there to be compared with, and
    choose one drafter per step: "reactive" by what was accepted of late, "bandit" by tokens per second,
    "classifier" by how sure the cheapest is; "everyone" asks all, always. "auto" = combined where the number
    of guesses is not fixed, else everyone; with any other, num_speculative_tokens is the most there may be.
    prompt_lookup_max, prompt_lookup_min: longest and shortest n-gram that the n-gram drafter looks up.
    prompt_lookup_branches: places that it offers at once, as branches of a tree; 1 = as vLLM.
    draft_layers: layers of the target that the drafter `layers` runs, 0 = a third of them.
    suffix_cache: whose finished outputs the suffix drafter learns from besides the request itself: "off" =
    nobody's, "tenant" = those of the same `SamplingParams.tenant`, "shared" = everybody's.
    suffix_max_cached_requests, suffix_max_memory: outputs, and MiB, that it remembers at most, the latest.
    suffix_cache_file: where they are kept from run to run.  suffix_max_depth: tokens of context it compares.
    suffix_factor, suffix_offset: a match of m tokens is worth `factor * m + offset` guesses.
    suffix_min_token_prob: chance of being reached below which it guesses nothing.  suffix_tree: the likeliest
    nodes of all continuations, not only the likeliest path.
    """

    draft: Name = "auto"
    num_speculative_tokens: (
        Annotated[int, Meta(ge=0, le=256, description="a whole number from 0 to 256 (0 = no speculation)")]
        | None
    ) = None
    draft_dtype: Dtype = "auto"
    length_by_batch_size: Annotated[
        tuple[tuple[Annotated[int, Meta(ge=1)], Annotated[int, Meta(ge=0, le=256)]], ...],
        Meta(description="a list of [smallest batch size from 1, length from 0 to 256] pairs"),
    ] = ()
    selector: Selector = "auto"
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64, description="a whole number from 1 to 64")] = 4
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64, description="a whole number from 1 to 64")] = 2
    prompt_lookup_branches: Annotated[int, Meta(ge=1, le=64, description="a whole number from 1 to 64")] = 1
    draft_layers: Annotated[int, Meta(ge=0, le=1000, description="a whole number from 0 to 1000")] = 0
    suffix_cache: SuffixCache = "off"
    suffix_max_cached_requests: Annotated[
        int, Meta(ge=1, le=10**6, description="a whole number from 1 to 1000000")
    ] = 10_000
    suffix_max_memory: Annotated[int, Meta(ge=1, le=2**16, description="MiB from 1 to 65536")] = 256
    suffix_cache_file: str = ""
    suffix_max_depth: Annotated[int, Meta(ge=1, le=64, description="a whole number from 1 to 64")] = 24
    suffix_factor: Annotated[float, Meta(ge=0, le=64, description="a number from 0 to 64")] = 1.0
    suffix_offset: Annotated[float, Meta(ge=-64, le=256, description="a number from -64 to 256")] = 3.0
    suffix_min_token_prob: Annotated[float, Meta(gt=0, le=1, description="above 0, at most 1")] = 0.1
    suffix_tree: bool = True


Mode = Literal[
    "autoregressive", "serial-chain", "serial-tree", "swiftspec", "discard", "outcome-cache", "overlapped"
]
Growth = Literal["auto", "chain", "fixed-shape", "best-first", "layers", "calibrated"]
Placement = Literal["auto", "serial", "disaggregated"]


class TreeConfig(_Table, frozen=True):
    """How a draft model's tree grows. growth: the rule; auto = what the mode is known for.

    tree_width: leaves that one draft pass expands.  tree_passes: draft passes per verification where they
    are counted, 0 = as many as the rule finds worth it, or, where the drafter works ahead unseen and has to
    end by itself, the default's number.  tree_shape: children per node at each depth, of the fixed shape; all
    its nodes are verified unless a number is given.  fan_out: outcomes drafted for at each place of a chain,
    of the outcome cache.
    """

    growth: Growth = "auto"
    tree_width: Annotated[int, Meta(ge=1, le=64, description="a whole number from 1 to 64")] = 8
    tree_passes: Annotated[int, Meta(ge=0, le=64, description="a whole number from 0 to 64")] = 4
    tree_shape: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=64)], ...],
        Meta(min_length=1, max_length=64, description="a list of 1 to 64 whole numbers from 1 to 64"),
    ] = (3, 2, 1, 1)
    fan_out: Annotated[int, Meta(ge=1, le=16, description="a whole number from 1 to 16")] = 3


class GroupsConfig(_Table, frozen=True):
    """Where draft and target run. placement: "serial" = in turn, in one process; "disaggregated" = at the
    same time, the drafter in a process of its own; "auto" = whichever is faster here, measured at start-up;
    unset = as the mode needs it.

    mode: how draft and target work together, for comparison; unset = the best known for the placement.
    target_devices, draft_devices: processor cores as in "0-3,8"; a group of several ranks (tensor parallel)
    gives each rank its own, as in "0-3/4-7". On CUDA: numbers of devices, as in "0/1".
    draft_address: tcp://HOST:PORT of a `paceline draft` on another host.  draft_key_file: its key.
    draft_timeout: seconds without a sign of life after which a drafter is given up until it is back.
    """

    placement: Placement | None = None
    mode: Mode | None = None
    target_devices: str = ""
    draft_devices: str = ""
    draft_address: str = ""
    draft_key_file: str = ""
    draft_timeout: Annotated[float, Meta(gt=0, le=3600, description="seconds above 0, at most 3600")] = 2.0


class SchedulerConfig(_Table, frozen=True):
    """max_num_seqs: requests running at once.  max_batch_tokens: tokens in one target pass, guesses
    included.  kv_tokens: tokens of KV cache in all, 0 = chosen from the memory there is.
    context_length: tokens of one request, prompt and output, 0 = the model's own.
    """

    max_num_seqs: Annotated[int, Meta(ge=1, le=65536, description="a whole number from 1 to 65536")] = 16
    max_batch_tokens: Annotated[int, Meta(ge=1, le=2**20, description="a whole number from 1 to 1048576")] = (
        512
    )
    kv_tokens: Annotated[
        int, Meta(ge=0, le=_MOST_TOKENS, description="a whole number from 0 (0 = automatic) to 2147483647")
    ] = 0
    context_length: Annotated[
        int,
        Meta(ge=0, le=_MOST_TOKENS, description="a whole number from 0 (0 = the model's own) to 2147483647"),
    ] = 0
    prefix_cache: bool = True


class Config(_Table, frozen=True):
    """model: "embedded", a directory or GGUF file, or a Hugging Face name.

    exact: where kernels are not batch-invariant by themselves (plain torch, CUDA), compute every token on its
    own: slower, and the output is plain decoding's, bit for bit.
    threads: 0 = all cores this process may use.  seed: of requests that give none; unset = drawn from the
    system and reported.
    """

    model: Name = "embedded"
    dtype: Dtype = "auto"
    exact: bool = False
    device: Device = "auto"
    threads: Annotated[
        int, Meta(ge=0, le=1024, description="a whole number from 0 (0 = all cores) to 1024")
    ] = 0
    seed: (
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="a whole number of at most 64 bits")]
        | None
    ) = None
    speculation: SpeculationConfig = SpeculationConfig()
    tree: TreeConfig = TreeConfig()
    groups: GroupsConfig = GroupsConfig()
    scheduler: SchedulerConfig = SchedulerConfig()


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
        _merge(tree, _checked(Config, _read(path), (), f"{path}: "))
    for override in overrides:
        _merge(tree, _checked(Config, _parse_override(override), (), "--set: "))
    _merge(tree, _checked(Config, _from_options(options or {}), (), ""))
    return _build(tree)


def with_options(config: Config, options: Mapping[str, object]) -> Config:
    """`config` with flat options laid over it, checked as a whole. Raises ConfigError."""
    tree = _checked(Config, msgspec.to_builtins(config), (), "")
    _merge(tree, _checked(Config, _from_options(options), (), ""))
    return _build(tree)


def to_toml(config: Config) -> str:
    """A TOML document that `load_config` reads back as the same configuration."""
    lines: list[str] = []
    tables: list[str] = []
    for name in config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, _Table):
            set_ = {
                key: found for key in value.__struct_fields__ if (found := getattr(value, key)) is not None
            }
            tables += ["", f"[{name}]", *(f"{key} = {_toml(found)}" for key, found in set_.items())]
        elif value is not None:
            lines.append(f"{name} = {_toml(value)}")
    return "\n".join([*lines, *tables]) + "\n"


# ---------------------------------------------------------------- sources


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
                f"unknown option `{name}`: {_nearest(name, {n: n for n in OPTION_PATHS}, OPTION_PATHS)}"
            )
        if value is None:
            continue
        branch = tree
        for part in OPTION_PATHS[name][:-1]:
            branch = branch.setdefault(part, {})
        branch[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return tree


# ---------------------------------------------------------------- checks


def _checked(table: type[_Table], values: object, path: tuple[str, ...], source: str) -> dict[str, Any]:
    """`values` with every key known and every value of its type; `source` starts the error message."""
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
                f"{source}unknown key `{'.'.join(where)}`: {_nearest(str(key), candidates, fields)}"
            )
        if isinstance(fields[key], type) and issubclass(fields[key], _Table):
            checked[key] = _checked(fields[key], value, where, source)
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


def _build(tree: dict[str, Any]) -> Config:
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


# ---------------------------------------------------------------- helpers


def _leaves(table: type[_Table], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for field in msgspec.structs.fields(table):
        if isinstance(field.type, type) and issubclass(field.type, _Table):
            yield from _leaves(field.type, (*path, field.name))
        else:
            yield (*path, field.name)


def _known_paths(near: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Every leaf and table, those of the table `near` first."""
    leaves = list(_leaves(Config))
    tables = sorted({leaf[:-1] for leaf in leaves if len(leaf) > 1})
    return sorted([*leaves, *tables], key=lambda path: path[:-1] != near)


def _nearest(name: str, candidates: Mapping[str, str], known: Iterable[str]) -> str:
    """`candidates`: what to show, and the name to compare with. `known`: what to list if none is near."""
    words = list(dict.fromkeys(candidates.values()))
    close = difflib.get_close_matches(name, words, n=1, cutoff=0.6)
    if not close:
        return f"the known ones are {', '.join(known)}."
    return f"did you mean `{next(shown for shown, word in candidates.items() if word == close[0])}`?"


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


OPTION_PATHS: dict[str, tuple[str, ...]] = {path[-1]: path for path in _leaves(Config)}
"""The flat keyword names that `LLM` and the command line take, and where each belongs in the tree."""
