"""What options become: loads, contenders, the order of turns; and what is refused."""

from __future__ import annotations

import pytest

from paceline.bench.matrix import Load, contenders_of, loads_of, turns
from paceline.config import Config, load_config
from paceline.errors import ConfigError

LOADS = [Load(batch=1), Load(batch=32)]


def test_loads() -> None:
    assert loads_of(None, None, 1.0) == [Load(1), Load(4), Load(16)]
    assert loads_of("2", "0.5,3", 0.25) == [Load(2), Load(None, 0.5, 0.25), Load(None, 3.0, 0.25)]
    assert Load(None, 0.5, 0.25).name == "0.5 req/s, burstiness 0.25"


@pytest.mark.parametrize(
    ("batches", "rates", "burstiness", "message"),
    [
        ("1,x", None, 1.0, "--batch is '1,x': give whole numbers from 1"),
        ("0", None, 1.0, "--batch is '0'"),
        ("2,2", None, 1.0, "name 2 once"),
        (None, "nan", 1.0, "--rate is 'nan': give numbers of requests per second above 0"),
        (None, "inf", 1.0, "--rate is 'inf'"),
        (None, "1", float("nan"), "--burstiness is nan"),
        ("1", None, 0.5, "there is no --rate"),
    ],
)
def test_loads_that_are_none(batches: str, rates: str, burstiness: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loads_of(batches, rates, burstiness)


def test_arrivals_are_the_same_for_all_and_have_the_rate() -> None:
    load = Load(None, 4.0)
    due = load.due_s(4000, seed=1)
    assert due == load.due_s(4000, seed=1) == sorted(due)
    assert due[-1] == pytest.approx(1000.0, rel=0.1)
    assert Load(batch=3).due_s(2, seed=0) == [0.0, 0.0]


def test_contenders() -> None:
    base = load_config(options={"num_speculative_tokens": 5, "mode": "serial-chain"})
    plain, five, two, tree = contenders_of(
        ["none", "ngram", "ngram:k=2,prompt_lookup_max=3", "ngram+suffix:prefix_cache=false"], base, LOADS
    )
    assert (plain.config.groups.mode, plain.max_guesses) == ("autoregressive", 0)
    assert plain.config.speculation.num_speculative_tokens is None
    assert (five.max_guesses, two.max_guesses) == (5, 2)
    assert two.config.speculation.prompt_lookup_max == 3
    assert all(each.config.scheduler.max_num_seqs == 32 for each in (plain, five, two, tree))
    assert plain.config.scheduler.prefix_cache
    assert not tree.config.scheduler.prefix_cache


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["ngrm"], "did you mean `ngram`"),
        (["none", "none"], "name each once"),
        (["ngram:kk=3"], "unknown option `kk`"),
        (["ngram:k=-1"], "num_speculative_tokens is -1"),
        (["ngram:model=embedded"], "model is no option of a drafter"),
        (["ngram+none"], "none stands alone"),
    ],
)
def test_contenders_that_are_none(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        contenders_of(names, Config(), LOADS)


def test_each_repeat_begins_with_another_contender() -> None:
    assert list(turns(["a", "b"], ["x", "y"], 2, "workload")) == [
        (0, "a", ("x",)),
        (0, "b", ("x",)),
        (0, "a", ("y",)),
        (0, "b", ("y",)),
        (1, "b", ("x",)),
        (1, "a", ("x",)),
        (1, "b", ("y",)),
        (1, "a", ("y",)),
    ]
    assert [stretch for _, _, stretch in turns(["a"], ["x", "y"], 1, "repeat")] == [("x", "y")]
