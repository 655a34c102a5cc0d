"""Which groups of GPUs there are, what fits them, and what is refused with what remedy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import ConfigError
from paceline.sim.costs.hardware import gpu_named, shape_of
from paceline.sim.costs.model import CoreCosts
from paceline.sim.costs.roofline import kv_capacity, roofline
from paceline.sim.plan.candidates import Candidate, Placed
from paceline.sim.plan.machines import Gpus, Measured
from tests.sim.lab import COSTS

DRAFT = Candidate(("draft",), "serial-chain", 3)


def machine(gpu: str = "H800", count: int = 8, target: str = "qwen2-72b", **options: object) -> Gpus:
    options.setdefault("models", {"draft": shape_of("qwen2-1.5b")})
    options.setdefault("weight_bits", 4.25)
    return Gpus(gpu_named(gpu), count, shape_of(target), **options)  # type: ignore[arg-type]


def test_the_groups_that_share_eight_gpus() -> None:
    plain = machine().together(1000)
    assert {(each.target, each.draft) for each in plain if each.apart} == {
        (1, 1), (1, 2), (1, 4), (1, 6), (2, 1), (2, 2), (2, 4), (2, 6), (4, 1), (4, 2), (4, 4)
    }  # fmt: skip
    assert all(each.devices * each.replicas <= 8 < each.devices * (each.replicas + 1) for each in plain)
    padded = machine(padded=True).together(1000)
    assert Placed(6, 2, apart=True) in padded  # SwiftSpec's split of this very pair
    assert Placed(6, 2, apart=True) not in plain


def test_padding_is_paid_for() -> None:
    costs = machine(padded=True).costs(replace(DRAFT, placed=Placed(6, 2, apart=True)))
    bare = roofline("H800", "qwen2-72b", 6, weight_bits=4.25)
    assert bare.target.seconds(1, 0, 1) < costs.target.seconds(1, 0, 1) < 1.05 * bare.target.seconds(1, 0, 1)
    assert costs.message_s == 5e-5
    assert machine().costs(replace(DRAFT, placed=Placed(8, 8))).message_s == 0.0


def test_costs_are_those_of_the_roofline() -> None:
    placed = Placed(4, 2, apart=True)
    costs = machine(heads=["eagle3"]).costs(replace(DRAFT, placed=placed))
    same = roofline("H800", "qwen2-72b", 4, draft="qwen2-1.5b", draft_tensor_parallel=2, weight_bits=4.25)
    assert costs.target == same.target
    assert costs.drafts["draft"] == same.drafts["draft"]
    assert costs.drafts["eagle3"] == same.drafts["eagle3"]


def test_memory_is_shared_with_what_drafts() -> None:
    alone = machine().kv_tokens(Candidate(placed=Placed(8)))
    assert alone == kv_capacity("H800", "qwen2-72b", 8, 4.25)
    beside = machine().kv_tokens(replace(DRAFT, placed=Placed(8, 8)))
    apart = machine().kv_tokens(replace(DRAFT, placed=Placed(4, 4, apart=True)))
    assert beside < alone
    assert apart == kv_capacity("H800", "qwen2-72b", 4, 4.25)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"target_ranks": (3,)}, "--tensor-parallel is 3, which does not divide the 64 heads"),
        ({"draft_ranks": (8,)}, "--draft-tensor-parallel is 8, which does not divide the 12 heads"),
        ({"target_ranks": (16,)}, "there are 8 x H800: give a number from 1 to 8"),
        ({"count": 0}, "there are 0 GPUs"),
    ],
)
def test_degrees_that_cannot_be(options: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        machine(**options)  # type: ignore[arg-type]


def test_a_model_that_fits_nowhere_is_refused_with_the_room_there_is() -> None:
    with pytest.raises(ConfigError, match=r"fit no group of 1 x L40S.*Give more GPUs, fewer --weight-bits"):
        machine("L40S", 1, "llama-3-70b", weight_bits=16.0, models={}).alone(100)
    # The weights fit, the context does not.
    with pytest.raises(ConfigError, match=r"one request of 2,000,000 tokens fit no group of 1 x H800"):
        machine(count=1).alone(2_000_000)
    assert machine(count=1).alone(1000) == [Placed(1)]


def test_a_measured_machine_splits_where_it_was_measured() -> None:
    one = Measured(COSTS)
    assert one.alone(10**9) == [Placed(1)]
    assert one.costs(DRAFT) is COSTS
    parts = replace(
        COSTS, cores=4, by_cores={cores: CoreCosts(COSTS.target, COSTS.drafts) for cores in (2, 3, 1)}
    )
    assert [
        (each.target, each.draft) for each in Measured(parts).together(1) if each.apart
    ] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]  # fmt: skip
    split = Measured(parts).costs(replace(DRAFT, placed=Placed(3, 1, apart=True)))
    assert split.cores == 4
