"""The event log: what the core was told, and what it asked for. Replayed, it must ask for the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from paceline.core import work as messages
from paceline.core.draft_lane import DraftPolicy
from paceline.core.drafting import DrafterNeeds, FixedLength, LengthByBatchSize
from paceline.core.engine_core import CoreConfig, EngineCore
from paceline.core.placement import OverlappedPlacement, SerialPlacement
from paceline.core.scheduler import Limits
from paceline.core.work import Event, Work
from paceline.errors import EngineError, shown

FORMAT = 3


class EventLog:
    """One JSON line for the configuration, then one per event: `now` (seconds), the event and the work it
    made possible. Raises EngineError where the file cannot be written."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise EngineError(f"cannot write the event log {path}: {error.strerror}.") from error

    def begin(self, config: CoreConfig) -> None:
        self._write({"format": FORMAT, "config": _config_to_json(config)})

    def append(self, now: float, event: Event, work: list[Work]) -> None:
        self._write({"now": now, "event": _tagged(event), "work": [_tagged(item) for item in work]})

    def close(self) -> None:
        self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(msgspec.json.encode(entry) + b"\n")


def read_log(path: Path) -> tuple[CoreConfig, Iterator[tuple[float, Event, list[Work]]]]:
    """Raises EngineError naming file and line when the log is damaged or of another format."""
    lines = _lines(path)
    number, header = next(lines, (1, {}))
    if header.get("format") != FORMAT:
        raise EngineError(f"{path}: not an event log of format {FORMAT}; record it again.")
    with _naming(path, number):
        config = _config_from_json(header["config"])
    return config, _entries(path, lines)


def replay(path: Path) -> int:
    """Feeds a recorded log to a fresh core. Returns the number of events.

    Raises EngineError at the first event whose work differs from the recorded.
    """
    config, entries = read_log(path)
    core = EngineCore(config)
    count = 0
    for count, (now, event, recorded) in enumerate(entries, 1):
        work = core.handle(event, now)
        core.take_outputs()
        if work != recorded:
            raise EngineError(
                f"{path}:{count + 1}: replay differs after {type(event).__name__}: recorded "
                f"{shown(recorded)}, now {shown(work)}. Record it again with this version."
            )
    if not count:
        raise EngineError(f"{path} holds no event: record it again.")
    return count


def _entries(
    path: Path, lines: Iterator[tuple[int, dict[str, Any]]]
) -> Iterator[tuple[float, Event, list[Work]]]:
    for number, entry in lines:
        with _naming(path, number):
            parsed = (
                float(entry["now"]),
                _untagged(entry["event"]),
                [_untagged(item) for item in entry["work"]],
            )
        yield parsed


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise EngineError(f"cannot read the event log {path}: {error.strerror}.") from error
    with file:
        for number, line in enumerate(file, 1):
            with _naming(path, number):
                entry = msgspec.json.decode(line, type=dict[str, Any])
            yield number, entry


@contextmanager
def _naming(path: Path, number: int) -> Iterator[None]:
    """Turns whatever a damaged line leads to into an error that says which line it is."""
    try:
        yield
    except (msgspec.DecodeError, LookupError, AttributeError, TypeError, ValueError, RecursionError) as error:
        raise EngineError(f"{path}:{number}: not an event log line ({error}); record it again.") from error


def _tagged(message: Event | Work) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(message, str_keys=True)
    return {"type": type(message).__name__, **fields}


def _untagged(entry: dict[str, Any]) -> Any:
    kind = getattr(messages, entry.pop("type"))
    return msgspec.convert(entry, kind, strict=False)


_CHOICES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (FixedLength, LengthByBatchSize, SerialPlacement, OverlappedPlacement)
}
"""The policies that have a written form."""


def _named(choice: object) -> dict[str, Any]:
    name = type(choice).__name__
    if name not in _CHOICES:
        raise EngineError(f"a run with {name} cannot be recorded: it has no written form.")
    return {"type": name, **msgspec.to_builtins(choice)}


def _chosen(entry: dict[str, Any]) -> Any:
    return msgspec.convert(entry, _CHOICES[entry.pop("type")])


def _config_to_json(config: CoreConfig) -> dict[str, Any]:
    return {
        "limits": msgspec.to_builtins(config.limits),
        "vocab_size": config.vocab_size,
        "eos_token_ids": config.eos_token_ids,
        "prefix_cache": config.prefix_cache,
        "drafters": msgspec.to_builtins(config.drafting.drafters),
        "length": _named(config.drafting.length),
        "lookup": config.drafting.lookup,
        "planned": config.drafting.planned,
        "selector": config.drafting.selector,
        "placement": _named(config.placement),
    }


def _config_from_json(entry: dict[str, Any]) -> CoreConfig:
    lookup = entry["lookup"]
    return CoreConfig(
        limits=msgspec.convert(entry["limits"], Limits),
        vocab_size=entry["vocab_size"],
        eos_token_ids=tuple(entry["eos_token_ids"]),
        prefix_cache=entry["prefix_cache"],
        drafting=DraftPolicy(
            msgspec.convert(entry["drafters"], tuple[DrafterNeeds, ...]),
            _chosen(entry["length"]),
            tuple(lookup) if lookup is not None else None,
            entry["planned"],
            entry["selector"],
        ),
        placement=_chosen(entry["placement"]),
    )
