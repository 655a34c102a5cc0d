"""The simulator: its times are those of a calculation by hand, and its output is the recorded one whatever
the policy, placement, arrivals and memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from paceline.core.growth import BestFirst, Calibrated
from paceline.core.scheduler import Limits
from paceline.errors import ConfigError
from paceline.sim.run.requests import SimRequest
from paceline.sim.run.simulator import Lanes, SimResult, simulate
from paceline.workload import AtOnce, Bursts, Steady
from tests.sim.lab import COSTS, core, drafter, record, request


def totals(result: SimResult) -> tuple[Any, ...]:
    return (result.spent, result.rounds, [each.times for each in result.requests], result.speculation)


def test_one_request_without_guesses_takes_what_the_closed_form_says() -> None:
    each = request(1, prompt=30, output=5)
    result = simulate(core(), [each], COSTS)
    step = COSTS.step_overhead_s + COSTS.request_overhead_s
    now, times = 0.0, []
    for new, context in [(30, 0), (1, 30), (1, 31), (1, 32), (1, 33)]:
        now += COSTS.target.seconds(new, context, 1) + step
        times.append(now)
    assert result.requests[0].times.chunk_times_s == pytest.approx(times)
    assert result.spent.duration == pytest.approx(times[-1])
    assert result.target_passes == 5


def test_one_request_in_turn_with_a_drafter_takes_what_the_closed_form_says() -> None:
    """Guesses of which 2, then 0, then all 3 are right: every part of every step is priced."""
    trace = record(2, prompt=20, output=8)
    accepted = (1, 3, 3, 3, 1, 9, 9, 9)
    trace = replace(trace, drafters={"head": replace(trace.drafters["head"], accepted=accepted)})
    head = drafter("head")
    each = SimRequest("r", 0.0, trace.prompt, trace.output, trace)
    result = simulate(core([head], 3), [each], COSTS, [head])
    step = COSTS.step_overhead_s + COSTS.request_overhead_s
    draft, target = COSTS.draft("head").seconds, COSTS.target.seconds
    now, times = target(20, 0, 1) + step, []
    times.append(now)
    now += draft(1, 0, 0, 20, 20)  # it reads the prompt while nobody waits for another pass
    # Of the tokens that are left the bonus takes one, so that the last step guesses two.
    for known, unread, guesses in [(21, 1, 3), (24, 3, 3), (25, 1, 2)]:
        now += draft(1, guesses, guesses, unread, known) + target(1 + guesses, known - 1, 1) + step
        times.append(now)
    assert result.requests[0].times.chunk_times_s == pytest.approx(times)
    assert result.requests[0].times.chunk_tokens == [1, 3, 1, 3]
    assert result.spent.draft + result.spent.verify + result.spent.overhead == pytest.approx(now)


def test_requests_of_one_length_share_passes_as_a_closed_form_says() -> None:
    """The first is there a moment before the others, as in the engine, and has a pass of its own."""
    each = [request(number, prompt=20, output=6) for number in range(4)]
    result = simulate(core(), each, COSTS)

    def step(new: int, context: int, requests: int) -> float:
        return COSTS.target.seconds(new, context, requests) + COSTS.overhead_s(requests)

    alone = step(20, 0, 1) + step(61, 20, 4)
    together = alone + sum(step(4, 21 + at + 3 * (20 + at), 4) for at in range(4))
    ends = [together, *[together + step(3, 3 * 24, 3)] * 3]
    assert [one.times.end_s for one in result.requests] == pytest.approx(ends)


@pytest.mark.parametrize("arrivals", [AtOnce(), Steady(80.0), Bursts(80.0, 0.3, seed=4)], ids=repr)
@pytest.mark.parametrize("slots", [2**16, 150], ids=["room", "preempted"])
@pytest.mark.parametrize("names", [(), ("ngram",), ("suffix",), ("head",), ("tree",), ("ngram", "head")])
@pytest.mark.parametrize("planned", [False, True])
def test_in_turn_every_output_is_the_recorded_one(
    arrivals: Any, slots: int, names: tuple[str, ...], planned: bool
) -> None:
    drafters = [drafter(name) for name in names]
    limits = Limits(4096, slots, 6, 48)
    config = core(drafters, 4, planned=planned, limits=limits)
    requests = [
        request(number, moment, prompt=10 + number, output=12 + number)
        for number, moment in zip(range(20), arrivals.times(), strict=False)
    ]
    result = simulate(config, requests, COSTS, drafters)
    assert sorted(each.times.tokens or 0 for each in result.requests) == [12 + number for number in range(20)]
    assert all(each.error is None for each in result.requests)
    assert slots > 1000 or result.preemptions > 0


@pytest.mark.parametrize("ahead", ["stream", "silent", "off"])
@pytest.mark.parametrize("name", ["ngram", "suffix", "head", "tree"])
@pytest.mark.parametrize("shares", [None, (0.7, 0.4)], ids=["apart", "shared"])
@pytest.mark.parametrize("slots", [2**16, 150], ids=["room", "preempted"])
def test_at_the_same_time_every_output_is_the_recorded_one(
    ahead: Any, name: str, shares: tuple[float, float] | None, slots: int
) -> None:
    streams = ahead == "stream"
    one = drafter(name, rule=Calibrated(4) if streams else BestFirst(4, 2), thrifty=streams)
    lookup = (2, 4) if streams else None
    config = core(
        [one], 6, planned=True, overlapped=streams, limits=Limits(4096, slots, 6, 48), lookup=lookup
    )
    requests = [
        request(number, number * 0.01, prompt=10 + number, output=12 + number) for number in range(20)
    ]
    lanes = Lanes(separate=True, ahead=ahead, ahead_passes=2, shares=shares)
    result = simulate(config, requests, COSTS, [one], lanes=lanes)
    assert sorted(each.times.tokens or 0 for each in result.requests) == [12 + number for number in range(20)]
    assert slots > 1000 or result.preemptions > 0
    assert result.speculation.num_accepted_tokens > 0


def test_the_same_seed_gives_the_same_result() -> None:
    def run(seed: int) -> tuple[Any, ...]:
        one = drafter("tree", rule=Calibrated(4), thrifty=True)
        moments = Bursts(50.0, 0.5, seed=seed).times()
        requests = [request(number, moment) for number, moment in zip(range(30), moments, strict=False)]
        config = core([one], 6, planned=True, overlapped=True, lookup=(2, 4))
        return totals(simulate(config, requests, COSTS, [one], lanes=Lanes(separate=True, ahead="stream")))

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_one_at_a_time_is_the_queue_of_the_textbooks() -> None:
    """Poisson arrivals, one server, constant service: M/D/1 (Pollaczek-Khinchine), and Little's law by the
    time in which nobody is there."""
    limits = Limits(4096, 2**16, 1, 512)
    service = simulate(core(limits=limits), [request(1, output=3)], COSTS).spent.duration
    load = 0.6
    moments = Bursts(load / service, seed=5).times()
    each = request(1, output=3)
    requests = [
        replace(each, request_id=f"r{number}", arrival_s=moment)
        for number, moment in zip(range(6000), moments, strict=False)
    ]
    config = replace(core(limits=limits), prefix_cache=False)
    result = simulate(config, requests, COSTS)
    stay = sum(one.times.e2e_s for one in result.requests) / len(requests)
    assert stay == pytest.approx(service * (1 + load / (2 * (1 - load))), rel=0.05)
    assert 1 - result.spent.idle / result.spent.duration == pytest.approx(load, rel=0.03)
    assert result.spent.verify + result.spent.overhead == pytest.approx(service * len(requests))


def test_more_load_makes_nobody_faster() -> None:
    def ttft(rate: float) -> float:
        moments = Bursts(rate, seed=3).times()
        requests = [request(number, moment) for number, moment in zip(range(200), moments, strict=False)]
        found = simulate(core(), requests, COSTS).finished
        return sum(each.ttft_s or 0.0 for each in found) / len(found)

    assert ttft(5.0) < ttft(60.0) < ttft(400.0)


def test_a_fixed_concurrency_is_kept() -> None:
    moments: list[tuple[float, int]] = []
    result = simulate(core(), [request(number) for number in range(12)], COSTS, concurrency=3)
    for each in result.requests:
        moments += [(each.times.arrival_s, 1), (each.times.end_s, -1)]
    assert max(accumulate(change for _, change in sorted(moments))) == 3


def test_a_shared_device_slows_both_and_nobody_else() -> None:
    def rate(shares: tuple[float, float] | None) -> float:
        one = drafter("tree", rule=Calibrated(4), thrifty=True)
        config = core([one], 6, planned=True, overlapped=True)
        lanes = Lanes(separate=True, ahead="stream", shares=shares)
        return simulate(config, [request(1, output=200)], COSTS, [one], lanes=lanes).output_rate

    assert rate((1.0, 1.0)) == pytest.approx(rate(None), rel=1e-6)
    assert rate((0.5, 0.5)) < rate((0.8, 0.8)) < rate(None)


@pytest.mark.parametrize(
    ("requests", "options", "said"),
    [
        ([], {}, "empty"),
        ([SimRequest("r", 0.0, (1, 2), ())], {}, "no output"),
        ([request(1)], {"concurrency": 0}, "concurrency"),
        ([request(1)], {"lanes": Lanes(shares=(0.5, 0.5))}, "shares"),
        ([request(1)], {"lanes": Lanes(separate=True, shares=(0.0, 0.5))}, "share"),
    ],
)
def test_what_cannot_be_simulated_is_refused(requests: Any, options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        simulate(core(), requests, COSTS, **options)


def test_a_request_that_does_not_fit_ends_with_an_error_and_the_others_go_on() -> None:
    requests = [request(1, prompt=200, output=10), request(2, prompt=20, output=10)]
    result = simulate(core(limits=Limits(4096, 100, 4, 64)), requests, COSTS)
    failed = {each.request_id: each.error for each in result.requests}
    assert failed["r2"] is None
    assert "KV cache" in (failed["r1"] or "")
    assert [each.tokens for each in result.finished] == [10]
