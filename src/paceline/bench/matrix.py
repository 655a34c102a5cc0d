"""What is measured: drafters x workloads x loads x repeats, as the options have it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from paceline.config import Config, with_options
from paceline.drafters.registry import drafters_of
from paceline.errors import ConfigError, shown
from paceline.modes import mode_of, most_guesses
from paceline.workload import Bursts

PLAIN = "none"
"""The name of decoding without speculation, which all else is compared with."""

_OPTIONS = re.compile(r"^(?P<draft>.*?)(?::(?P<options>\w+=[^=:]+(?:,\w+=[^=,]+)*))?$")
_SHORT = {"k": "num_speculative_tokens"}


@dataclass(frozen=True, slots=True)
class Load:
    """batch: requests in flight at any time, a new one taking the place of each that ends; or rate: requests
    per second, arriving with gamma-distributed gaps of shape `burstiness` (1 = Poisson)."""

    batch: int | None = None
    rate: float | None = None
    burstiness: float = 1.0

    @property
    def name(self) -> str:
        if self.batch is not None:
            return f"batch {self.batch}"
        kind = "" if self.burstiness == 1.0 else f", burstiness {self.burstiness:g}"
        return f"{self.rate:g} req/s{kind}"

    def due_s(self, count: int, seed: int) -> list[float]:
        """When each of `count` requests is due; all at once where there is no rate."""
        if self.rate is None:
            return [0.0] * count
        return list(islice(Bursts(self.rate, self.burstiness, seed).times(), count))


@dataclass(frozen=True, slots=True)
class Contender:
    """One drafter with its options, as the configuration of an engine. max_guesses: per verification."""

    name: str
    config: Config
    max_guesses: int


def loads_of(batches: str | None, rates: str | None, burstiness: float) -> list[Load]:
    """Neither = batch 1, 4 and 16. Raises ConfigError."""
    sizes = _numbers("--batch", batches, whole=True)
    speeds = _numbers("--rate", rates, whole=False)
    if not (math.isfinite(burstiness) and burstiness > 0):
        raise ConfigError(f"--burstiness is {burstiness:g}: give a number above 0, 1 = Poisson.")
    if burstiness != 1.0 and not speeds:
        raise ConfigError("--burstiness says how requests arrive, but there is no --rate: give one.")
    if batches is None and rates is None:
        sizes = [1, 4, 16]
    return [Load(batch=int(size)) for size in sizes] + [Load(None, rate, burstiness) for rate in speeds]


def _numbers(option: str, text: str | None, *, whole: bool) -> list[float]:
    if text is None:
        return []
    numbers: list[float] = []
    for part in text.split(","):
        try:
            number = int(part) if whole else float(part)
        except ValueError:
            number = math.nan
        if not 0 < number < 1e6:
            kind = "whole numbers from 1" if whole else "numbers of requests per second above 0"
            raise ConfigError(f"{option} is {shown(text)}: give {kind}, separated by commas.")
        if number in numbers:
            raise ConfigError(f"{option} is {shown(text)}: name {part} once.")
        numbers.append(number)
    return numbers


def contenders_of(names: Sequence[str], base: Config, loads: Sequence[Load]) -> list[Contender]:
    """One for each of `names`: `none`, or what `speculation.draft` takes, with options behind a colon, as in
    `ngram:k=3,prompt_lookup_max=5`. Raises ConfigError, also for what an engine would refuse."""
    if len(set(names)) < len(names):
        raise ConfigError(f"--drafters are {', '.join(names)}: name each once.")
    return [_contender(name, base, loads) for name in names]


def _contender(name: str, base: Config, loads: Sequence[Load]) -> Contender:
    match = _OPTIONS.match(name)
    assert match is not None
    options = dict(_option(name, pair) for pair in (match["options"] or "").split(",") if pair)
    if match["draft"] == PLAIN:
        options |= {"draft": PLAIN, "mode": "autoregressive", "placement": None}
        base = _without_speculation(base)
    else:
        options["draft"] = match["draft"]
    most = max((load.batch or 1 for load in loads), default=1)
    if most > base.scheduler.max_num_seqs:
        options["max_num_seqs"] = most
        options["max_batch_tokens"] = max(base.scheduler.max_batch_tokens, most)
    config = with_options(base, options)
    mode = mode_of(config, own_drafter=False)
    drafters_of(config)
    return Contender(name, config, 0 if match["draft"] == PLAIN else most_guesses(config, mode))


def _without_speculation(base: Config) -> Config:
    import msgspec

    from paceline.config import GroupsConfig, SpeculationConfig, TreeConfig

    return msgspec.structs.replace(
        base,
        speculation=SpeculationConfig(),
        tree=TreeConfig(),
        groups=GroupsConfig(target_devices=base.groups.target_devices),
    )


def _option(name: str, pair: str) -> tuple[str, Any]:
    key, _, text = pair.partition("=")
    value: Any = text
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        break
    if text in ("true", "false"):
        value = text == "true"
    if key in ("draft", "model"):
        raise ConfigError(f"--drafters {shown(name)}: {key} is no option of a drafter: leave it out.")
    return _SHORT.get(key, key), value


def turns(
    contenders: Sequence[str], workloads: Sequence[str], repeats: int, by: str
) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """(repeat, contender, workloads): stretches that one engine serves. Contenders take turns, each repeat
    beginning with another one, so that what drifts on the machine drifts for all. by: "workload", or "repeat"
    for engines that take long to start."""
    for repeat in range(repeats):
        first = repeat % len(contenders)
        order = [*contenders[first:], *contenders[:first]]
        for stretch in [(name,) for name in workloads] if by == "workload" else [tuple(workloads)]:
            for contender in order:
                yield repeat, contender, stretch
