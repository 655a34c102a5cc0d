"""The embedded model, profiled in a few seconds through the real engine."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest

from paceline.config import load_config
from paceline.errors import ConfigError
from paceline.profiling.plan import Plan
from paceline.profiling.profile import profile
from paceline.sim.costs.break_even import break_even
from paceline.sim.costs.model import load_costs, save_costs

TINY = Plan(
    batches=(1, 2),
    contexts=(32, 96),
    sizes=(1, 2, 4, 8),
    chunks=(32, 128),
    guesses=(1, 3),
    unread=(1, 2),
    budget_s=2.0,
    rounds=(2, 3),
    run_tokens=6,
)


@pytest.mark.model
def test_the_embedded_model_is_profiled(tmp_path: Path) -> None:
    told: list[tuple[float, str]] = []
    config = load_config(options={"draft": "ngram+suffix+embedded"})
    began = time.perf_counter()
    found = profile(config, TINY, (1,), lambda share, what: told.append((share, what)))
    assert found.seconds <= time.perf_counter() - began
    costs = found.costs
    assert set(costs.drafts) == {"ngram", "suffix", "embedded"} == set(found.errors) - {"target"}
    times = [costs.target.seconds(new, 100, 1) for new in range(1, 300)]
    assert times[0] > 0.0
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times))
    # A prompt of 256 tokens takes many times as long as one token; a draft model as large as the target takes
    # about a pass per level, and looking something up next to nothing.
    assert times[255] > 3 * times[0]
    draft, lookup = costs.draft("embedded"), costs.draft("ngram")
    assert 1.0 < draft.seconds(1, 3, 3, 1, 100) / times[0] < 9.0
    assert lookup.seconds(1, 3, 3, 1, 100) < times[0] / 3
    # So no acceptance makes up for drafting with the target itself.
    own = break_even(costs, "embedded", 1, 100, 3).acceptance
    assert own is None or own > 0.5
    assert 0.0 < costs.step_overhead_s + costs.request_overhead_s < times[0]
    assert (costs.cores, costs.by_cores) == (1, {})
    assert found.errors["target"].points > 0
    assert [share for share, _ in told] == sorted(share for share, _ in told)
    assert told[-1] == (1.0, "done")
    save_costs(tmp_path / "costs.json", costs)
    assert load_costs(tmp_path / "costs.json") == costs


def test_what_cannot_be_honoured_is_refused() -> None:
    def run(cores: tuple[int, ...] | None = None, **options: object) -> None:
        profile(load_config(options=options), TINY, cores, lambda *_: None)

    with pytest.raises(ConfigError, match=r"groups\.mode is set, but passes are measured one at a time"):
        run(mode="swiftspec")
    with pytest.raises(ConfigError, match=r"groups\.target_devices is set"):
        run(target_devices="0")
    with pytest.raises(ConfigError, match="--cores has 5000, and there are"):
        run(cores=(5000,))
