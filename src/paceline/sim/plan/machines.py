"""Machines that a plan may use: named GPUs, or one that was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from paceline.errors import ConfigError
from paceline.sim.costs.hardware import GPU, MOST_BITS, ShapeSpec, gpu_named, positive
from paceline.sim.costs.model import CostModel, DraftTime
from paceline.sim.costs.roofline import USABLE, Efficiency, kv_bytes_per_rank, roofline
from paceline.sim.plan.candidates import Candidate, Placed

_SHARES = ((0.75, 0.25), (0.5, 0.5))
"""Of one device for two: what either gets while both want all of it."""


class Machine(Protocol):
    @property
    def devices_are_ranks(self) -> bool:
        """Whether each device of a group is a rank of its own; else one process uses them all."""
        ...

    def costs(self, candidate: Candidate) -> CostModel: ...

    def kv_tokens(self, candidate: Candidate) -> int:
        """That fit beside the weights of one replica; 0 = not known."""
        ...

    def alone(self, most_context: int) -> list[Placed]:
        """Where the target can run for itself. Raises ConfigError where it cannot at all."""
        ...

    def together(self, most_context: int) -> list[Placed]:
        """Where a draft model can run, too: in turn, at once, or apart. Raises ConfigError."""
        ...


@dataclass(frozen=True, slots=True)
class Measured:
    """One machine whose costs are known as a whole. Where they were measured on several numbers of cores,
    the drafter may have some of its own."""

    model: CostModel

    @property
    def devices_are_ranks(self) -> bool:
        return False

    def costs(self, candidate: Candidate) -> CostModel:
        placed = candidate.placed
        return self.model.split(placed.target, placed.draft) if placed.apart else self.model

    def kv_tokens(self, candidate: Candidate) -> int:  # noqa: ARG002
        return 0

    def alone(self, most_context: int) -> list[Placed]:  # noqa: ARG002
        return [Placed(self.model.cores or 1)]

    def together(self, most_context: int) -> list[Placed]:
        whole = self.alone(most_context)[0].target
        parts = sorted(self.model.by_cores)
        apart = [
            Placed(first, second, apart=True)
            for first in parts
            for second in parts
            if first + second <= whole
        ]
        return [Placed(whole, whole), *apart]


@dataclass(frozen=True, slots=True)
class Gpus:
    """So many of one kind in one host. heads, models: drafters by name, which of the costs is theirs.

    target_ranks, draft_ranks: degrees of tensor parallelism that may be used, none = all that divide the
    attention heads.  padded: heads are filled up with zeros to the next multiple, so that every even degree
    serves too, as in SwiftSpec (arXiv 2506.11309, section 3.4).  message_s: one way between groups.
    """

    gpu: GPU
    count: int
    target: ShapeSpec
    models: Mapping[str, ShapeSpec] = field(default_factory=dict)
    heads: Sequence[str] = ()
    weight_bits: float = 16.0
    efficiency: Efficiency = field(default_factory=Efficiency)
    target_ranks: tuple[int, ...] = ()
    draft_ranks: tuple[int, ...] = ()
    padded: bool = False
    message_s: float = 5e-5

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"there are {self.count} GPUs: give a number from 1.")
        positive("weight_bits", self.weight_bits, MOST_BITS)
        self._check_ranks("tensor_parallel", self.target_ranks, (self.target,))
        self._check_ranks("draft_tensor_parallel", self.draft_ranks, tuple(self.models.values()))

    # ------------------------------------------------------------ costs

    @property
    def devices_are_ranks(self) -> bool:
        return True

    def costs(self, candidate: Candidate) -> CostModel:
        placed = candidate.placed
        target = self._padded(self.target, placed.target)
        base = roofline(
            self.gpu, target, placed.target, weight_bits=self.weight_bits, efficiency=self.efficiency
        )
        drafts: dict[str, DraftTime] = {name: base.drafts[name] for name in ("ngram", "suffix")}
        drafts |= dict.fromkeys(self.heads, base.drafts["eagle3"])
        for name, shape in self.models.items():
            if name in candidate.drafters:
                ranks = placed.draft or placed.target
                drafts[name] = roofline(
                    self.gpu,
                    target,
                    placed.target,
                    draft=self._padded(shape, ranks),
                    draft_tensor_parallel=ranks,
                    weight_bits=self.weight_bits,
                    efficiency=self.efficiency,
                ).drafts["draft"]
        return replace(base, drafts=drafts, message_s=self.message_s if placed.apart else 0.0)

    # ------------------------------------------------------------ memory

    def kv_tokens(self, candidate: Candidate) -> int:
        beside = [self.models[name] for name in candidate.drafters if name in self.models]
        heads = sum(name in self.heads for name in candidate.drafters)
        return self._room(candidate.placed, beside, heads)

    def _room(self, placed: Placed, drafts: Sequence[ShapeSpec], heads: int = 0) -> int:
        """Tokens of KV; not above 0 if the weights alone are too much."""
        ranks, there = placed.target, USABLE * self.gpu.memory
        target = self._padded(self.target, ranks)
        left = there - self._weights(target, ranks) - heads * self.target.head_parameters * 2 / ranks
        each = kv_bytes_per_rank(target, ranks) * (1 + heads / target.layers)
        for draft in drafts:
            draft = self._padded(draft, placed.draft)
            weights, kv = self._weights(draft, placed.draft), kv_bytes_per_rank(draft, placed.draft)
            if placed.apart:
                if there - weights < kv * max(left / each, 0.0):
                    return int((there - weights) / kv)
            else:
                left, each = left - weights, each + kv
        return int(left / each)

    def _weights(self, shape: ShapeSpec, ranks: int) -> float:
        return shape.parameters * self.weight_bits / 8 / ranks

    # ------------------------------------------------------------ places

    def alone(self, most_context: int) -> list[Placed]:
        degrees = self._degrees(self.target_ranks, (self.target,))
        found = [Placed(ranks, replicas=self.count // ranks) for ranks in degrees]
        return self._fitting(found, (), most_context)

    def together(self, most_context: int) -> list[Placed]:
        shapes = tuple(self.models.values())
        targets, drafts = (
            self._degrees(self.target_ranks, (self.target,)),
            self._degrees(self.draft_ranks, shapes),
        )
        found: list[Placed] = []
        for ranks in targets:
            fewer = [draft for draft in drafts if draft <= ranks]
            found += [Placed(ranks, draft, replicas=self.count // ranks) for draft in fewer]
            found += [
                Placed(ranks, ranks, shares=shares, replicas=self.count // ranks)
                for shares in _SHARES
                if ranks in drafts
            ]
            for draft in drafts:
                if ranks + draft <= self.count:
                    found.append(Placed(ranks, draft, apart=True, replicas=self.count // (ranks + draft)))
        return self._fitting(found, shapes, most_context)

    def _fitting(self, found: list[Placed], drafts: Sequence[ShapeSpec], most: int) -> list[Placed]:
        rooms = [
            (min((self._room(each, [draft]) for draft in drafts), default=self._room(each, ())), each)
            for each in found
        ]
        kept = [each for room, each in rooms if room >= most]
        if kept or not rooms:
            return kept
        room, largest = max(rooms, key=lambda pair: pair[0])
        names = " and ".join(shape.name for shape in (self.target, *drafts))
        raise ConfigError(
            f"{names} with the KV of one request of {most:,} tokens fit no group of {self.count} x "
            f"{self.gpu.name}: on {largest.devices} of them there is room for {max(room, 0):,} tokens. Give "
            "more GPUs, fewer --weight-bits, or cut the requests with --max-context."
        )

    def _degrees(self, asked: tuple[int, ...], shapes: tuple[ShapeSpec, ...]) -> list[int]:
        if asked:
            return [ranks for ranks in asked if ranks <= self.count]
        return [
            ranks for ranks in range(1, self.count + 1) if all(self._divides(ranks, each) for each in shapes)
        ]

    def _divides(self, ranks: int, shape: ShapeSpec) -> bool:
        whole = shape.heads % ranks == 0 and (shape.kv_heads % ranks == 0 or ranks % shape.kv_heads == 0)
        return whole or (self.padded and ranks % 2 == 0 and ranks <= shape.heads)

    def _check_ranks(self, name: str, asked: tuple[int, ...], shapes: tuple[ShapeSpec, ...]) -> None:
        option = "--" + name.replace("_", "-")
        for ranks in asked:
            if not 1 <= ranks <= self.count:
                raise ConfigError(
                    f"{option} is {ranks}, and there are {self.count} x {self.gpu.name}: give a number from "
                    f"1 to {self.count}, or more --gpus."
                )
            for shape in shapes:
                if not self._divides(ranks, shape):
                    able = [each for each in range(1, self.count + 1) if self._divides(each, shape)]
                    raise ConfigError(
                        f"{option} is {ranks}, which does not divide the {shape.heads} heads and "
                        f"{shape.kv_heads} key-value heads of {shape.name}: give one of "
                        f"{', '.join(map(str, able))}, or --pad-heads, by which every even one serves."
                    )

    def _padded(self, shape: ShapeSpec, ranks: int) -> ShapeSpec:
        """As wide as what its ranks compute, zeros included."""
        if ranks < 1 or self.__class__._whole(shape, ranks):
            return shape
        kv = _up(shape.kv_heads, ranks) if shape.kv_heads > ranks else shape.kv_heads
        return replace(
            shape,
            heads=_up(shape.heads, ranks),
            kv_heads=kv,
            intermediate=_up(shape.intermediate, ranks),
        )

    @staticmethod
    def _whole(shape: ShapeSpec, ranks: int) -> bool:
        return shape.heads % ranks == 0


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def gpus(name: str, count: int, target: ShapeSpec, **options: object) -> Gpus:
    """By the GPU's name. Raises ConfigError with the nearest one."""
    return Gpus(gpu_named(name), count, target, **options)  # type: ignore[arg-type]
