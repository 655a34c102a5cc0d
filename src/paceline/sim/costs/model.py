"""One machine's costs together, and their file: JSON, refused as a whole if any part of it is missing,
unknown or no number."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from paceline.errors import ConfigError, PacelineError
from paceline.sim.costs.forms import Count, Draft, DraftTime, Form, Pass, PassTime, Seconds

__all__ = ["CoreCosts", "CostModel", "DraftTime", "PassTime", "load_costs", "save_costs"]

FORMAT = "paceline-costs"
VERSION = 1
_REMEDY = "correct it, or measure anew with paceline profile --out"


@dataclass(frozen=True)
class CoreCosts:
    """The passes on another number of cores. drafts: those that were measured there."""

    target: PassTime
    drafts: Mapping[str, DraftTime] = field(default_factory=dict)


@dataclass(frozen=True)
class CostModel:
    """What each part of decoding takes on one machine.

    step_overhead_s: between two passes, whatever is in them.  request_overhead_s: the same, per request that
    takes part.  switch_s: of going from one drafter to another.  message_s: one way between two lanes.
    cores: that all of this used, 0 = not said.  by_cores: passes on other numbers of them.
    provenance: where the numbers come from.
    """

    target: PassTime
    drafts: Mapping[str, DraftTime]
    step_overhead_s: float = 0.0
    request_overhead_s: float = 0.0
    switch_s: float = 0.0
    message_s: float = 0.0
    cores: int = 0
    by_cores: Mapping[int, CoreCosts] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def overhead_s(self, requests: int) -> float:
        """Of a step outside its passes."""
        return self.step_overhead_s + self.request_overhead_s * requests

    def draft(self, name: str) -> DraftTime:
        """Raises ConfigError."""
        if name in self.drafts:
            return self.drafts[name]
        known = ", ".join(sorted(self.drafts)) or "none"
        raise ConfigError(f"the costs hold nothing of a drafter {name!r}: they have {known}.")

    def split(self, target_cores: int, draft_cores: int) -> CostModel:
        """With the target on some cores and the drafters on others. Raises ConfigError for what was not
        measured."""
        target, drafts = self._on(target_cores).target, self._on(draft_cores).drafts
        return replace(self, target=target, drafts=drafts, cores=target_cores + draft_cores, by_cores={})

    def _on(self, cores: int) -> CoreCosts:
        if cores == self.cores:
            return CoreCosts(self.target, self.drafts)
        if cores in self.by_cores:
            return self.by_cores[cores]
        known = ", ".join(str(each) for each in sorted({*self.by_cores, self.cores} - {0})) or "none"
        raise ConfigError(
            f"the costs hold nothing of {cores} cores: they were measured on {known}; measure again, with "
            "paceline profile --cores."
        )


# ---------------------------------------------------------------- the file


class _Part(Form, frozen=True, tag=False, tag_field=None):
    """The forms within are read one by one, so that a message names the one that is wrong."""

    target: Any
    drafts: dict[str, Any] = msgspec.field(default_factory=dict)


class _File(Form, frozen=True, tag=False, tag_field=None):
    format: str
    version: int
    target: Any
    drafts: dict[str, Any]
    step_overhead_s: Seconds
    request_overhead_s: Seconds = 0.0
    switch_s: Seconds = 0.0
    message_s: Seconds = 0.0
    cores: Annotated[int, Meta(ge=0, le=4096)] = 0
    by_cores: dict[Count, Any] = msgspec.field(default_factory=dict)
    provenance: dict[str, Any] = msgspec.field(default_factory=dict)


def load_costs(path: Path) -> CostModel:
    """Raises ConfigError that names the file and the field."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}): {_REMEDY}.") from None
    except OSError as error:
        raise ConfigError(f"cannot read the costs {path}: {error.strerror}.") from None
    return costs_of(parsed(text, str(path)), str(path))


def save_costs(path: Path, costs: CostModel) -> None:
    """Raises PacelineError for costs that are no data, or no numbers, and leaves `path` as it was then."""
    content = to_builtins(costs)
    costs_of(content, f"the costs for {path}")
    try:
        Path(path).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except ValueError:
        raise PacelineError("these costs cannot be saved: their provenance holds no number.") from None
    except OSError as error:
        raise ConfigError(f"cannot write the costs to {path}: {error.strerror}.") from None


def to_builtins(costs: CostModel) -> dict[str, Any]:
    """What the file holds. Raises PacelineError."""
    try:
        content: dict[str, Any] = msgspec.to_builtins(costs, str_keys=True)
    except (TypeError, ValueError) as error:
        raise PacelineError(
            f"these costs cannot be saved: {error}. Use the forms of paceline.sim.costs.forms."
        ) from None
    return {"format": FORMAT, "version": VERSION, **content}


def parsed(text: str, source: str) -> Any:
    """JSON in which every name comes once. Raises ConfigError."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply to be a file of ours: {_REMEDY}.") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{source}, line {error.lineno}: not valid JSON ({error.msg}): {_REMEDY}."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{source}: {error}: {_REMEDY}.") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`{twice}` is given twice in one object")
    return found


def costs_of(content: Any, source: str) -> CostModel:
    """source: starts the message of the ConfigError for what does not fit."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ConfigError(
            f'{source} holds no costs: a file of paceline profile begins with "format": "{FORMAT}".'
        )
    if content.get("version") != VERSION:
        raise ConfigError(
            f"{source}: its version is {content.get('version')!r} and this release reads {VERSION}: measure "
            "anew with paceline profile --out."
        )
    read: _File = _converted(content, _File, source)
    try:
        json.dumps(read.provenance, allow_nan=False)
    except ValueError:
        raise ConfigError(f"{source}: provenance holds no number: {_REMEDY}.") from None
    by_cores = {}
    for cores, part in read.by_cores.items():
        where = f"by_cores.{cores}"
        checked: _Part = _converted(part, _Part, source, where)
        by_cores[cores] = _core_costs(checked, source, f"{where}.")
    both = _core_costs(read, source)
    costs = CostModel(
        target=both.target,
        drafts=both.drafts,
        step_overhead_s=read.step_overhead_s,
        request_overhead_s=read.request_overhead_s,
        switch_s=read.switch_s,
        message_s=read.message_s,
        cores=read.cores,
        by_cores=by_cores,
        provenance=read.provenance,
    )
    if any(each.target.seconds(1, 0, 1) + costs.overhead_s(1) <= 0.0 for each in (both, *by_cores.values())):
        raise ConfigError(f"{source}: a step of one token takes no time: {_REMEDY}.")
    return costs


def _core_costs(part: _File | _Part, source: str, prefix: str = "") -> CoreCosts:
    return CoreCosts(
        _converted(part.target, Pass, source, f"{prefix}target"),
        {
            name: _converted(draft, Draft, source, f"{prefix}drafts.{name}")
            for name, draft in part.drafts.items()
        },
    )


def _converted(content: Any, kind: Any, source: str, place: str = "") -> Any:
    """place: of `content` in the file, for the message."""
    try:
        return msgspec.convert(content, kind, str_keys=True)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        text, _, below = str(error).partition(" - at `$")
        where = f"{place}{below.rstrip('`')}".lstrip(".")
        raise ConfigError(f"{source}: {where + ': ' if where else ''}{text}: {_REMEDY}.") from None
