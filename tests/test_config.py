"""The configuration tree: where values come from, and every way a value can be wrong."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import OPTION_PATHS, Config, SchedulerConfig, load_config, to_toml, with_options
from paceline.errors import ConfigError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "paceline.toml"
    path.write_text(text, encoding="utf-8")
    return path


# ---------------------------------------------------------------- sources


def test_nothing_given_is_the_defaults() -> None:
    assert load_config() == Config()


def test_each_source_overrides_the_one_before(tmp_path: Path) -> None:
    path = write(tmp_path, "model = 'file'\nthreads = 1\nseed = 1\n[scheduler]\nmax_num_seqs = 2\n")
    config = load_config(path, ["threads=2", "seed=2"], {"seed": 3, "num_speculative_tokens": 7})
    assert (config.model, config.threads, config.seed) == ("file", 2, 3)
    assert config.scheduler == SchedulerConfig(max_num_seqs=2)
    assert config.speculation.num_speculative_tokens == 7


def test_an_option_at_none_is_not_given() -> None:
    assert load_config(None, ["threads=2"], {"threads": None}).threads == 2


def test_the_last_override_of_a_key_wins() -> None:
    assert load_config(None, ["threads=2", "threads=3"]).threads == 3


def test_an_override_may_be_a_whole_table() -> None:
    config = load_config(None, ["scheduler={max_num_seqs=2}", "scheduler.prefix_cache=false"])
    assert config.scheduler == SchedulerConfig(max_num_seqs=2, prefix_cache=False)


@pytest.mark.parametrize(
    "text", ["speculation.draft=none", "speculation.draft='none'", 'speculation.draft = "none"']
)
def test_bare_words_need_no_quotes(text: str) -> None:
    assert load_config(None, [text]).speculation.draft == "none"


def test_a_bare_path_may_hold_any_sign_but_a_leading_quote() -> None:
    assert load_config(None, ["model=../models/a=b c.gguf"]).model == "../models/a=b c.gguf"


def test_a_path_is_a_model() -> None:
    assert load_config(None, [], {"model": Path("models") / "x.gguf"}).model == str(Path("models/x.gguf"))


def test_pairs_become_tuples() -> None:
    config = load_config(None, ["speculation.length_by_batch_size=[[1, 5], [4, 2], [16, 0]]"])
    assert config.speculation.length_by_batch_size == ((1, 5), (4, 2), (16, 0))


def test_the_flat_names_are_unique_and_cover_the_tree() -> None:
    config = msgspec.to_builtins(Config())
    leaves = sum(len(value) if isinstance(value, dict) else 1 for value in config.values())
    assert len(OPTION_PATHS) == leaves


def test_options_laid_over_a_configuration() -> None:
    base = load_config(None, ["scheduler.max_num_seqs=4"])
    config = with_options(base, {"draft": "none"})
    assert (config.speculation.draft, config.scheduler.max_num_seqs) == ("none", 4)
    assert base.speculation.draft == "auto"


def test_a_configuration_built_by_hand_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"threads is -1: it must be a whole number from 0"):
        with_options(Config(threads=-1), {})


# ---------------------------------------------------------------- unknown keys

UNKNOWN = [
    (
        "scheduler.max_num_seq=4",
        "unknown key `scheduler.max_num_seq`: did you mean `scheduler.max_num_seqs`?",
    ),
    ("num_speculative_tokens=4", "did you mean `speculation.num_speculative_tokens`?"),
    ("schedular.prefix_cache=true", "unknown key `schedular`: did you mean `scheduler`?"),
    ("speculation.draft.name='x'", "speculation.draft is {'name': 'x'}: it must be a text"),
    ("scheduler.zzz=1", "unknown key `scheduler.zzz`: the known ones are max_num_seqs, "),
]


@pytest.mark.parametrize(("override", "message"), UNKNOWN)
def test_unknown_keys_name_the_nearest(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, [override])
    assert message in str(raised.value)


def test_unknown_options_name_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="unknown option `num_spec_tokens`: did you mean `num_speculative_tokens`"
    ):
        load_config(None, [], {"num_spec_tokens": 3})
    with pytest.raises(ConfigError, match="unknown option `zzz`: the known ones are model, dtype"):
        load_config(None, [], {"zzz": 3})


def test_the_error_says_which_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[scheduler]\nmax_num_seq = 4\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert str(raised.value).startswith(f"{path}: unknown key `scheduler.max_num_seq`")


# ---------------------------------------------------------------- wrong values

WRONG = [
    ("model", 3, "a text that is not empty"),
    ("model", "", "a text that is not empty"),
    ("dtype", "fp16", "one of auto, float32, bfloat16, int8"),
    ("dtype", 32, "one of auto, float32"),
    ("draft_dtype", "int4", "one of auto, float32"),
    ("device", "tpu", "one of auto, cpu, cuda"),
    ("exact", 1, "true or false"),
    ("exact", "true", "true or false"),
    ("prefix_cache", "no", "true or false"),
    ("threads", -1, "a whole number from 0"),
    ("threads", 2.0, "a whole number from 0"),
    ("threads", True, "a whole number from 0"),
    ("threads", float("nan"), "a whole number from 0"),
    ("threads", float("inf"), "a whole number from 0"),
    ("threads", 10**40, "a whole number from 0"),
    ("seed", "x", "a whole number of at most 64 bits"),
    ("seed", 2**63, "a whole number of at most 64 bits"),
    ("seed", 1.5, "a whole number of at most 64 bits"),
    ("draft", None.__class__, "a text that is not empty"),
    ("num_speculative_tokens", -1, "a whole number from 0 to 256"),
    ("num_speculative_tokens", 257, "a whole number from 0 to 256"),
    ("length_by_batch_size", 5, "a list of [smallest batch size"),
    ("length_by_batch_size", [[1]], "a list of [smallest batch size"),
    ("length_by_batch_size", [[0, 1]], "a list of [smallest batch size"),
    ("length_by_batch_size", [[1, -1]], "a list of [smallest batch size"),
    ("length_by_batch_size", [[4, 1], [4, 2]], "each must be larger than the one before"),
    ("prompt_lookup_min", 0, "a whole number from 1 to 64"),
    ("prompt_lookup_max", 65, "a whole number from 1 to 64"),
    ("prompt_lookup_min", 5, "raise the one or lower the other"),
    ("max_num_seqs", 0, "a whole number from 1"),
    ("max_batch_tokens", 0, "a whole number from 1"),
    ("max_batch_tokens", 8, "raise the one or lower the other"),
    ("kv_tokens", -5, "a whole number from 0 (0 = automatic)"),
    ("kv_tokens", 2**31, "a whole number from 0 (0 = automatic)"),
    ("context_length", "long", "a whole number from 0 (0 = the model's own)"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_wrong_values_name_key_value_and_what_is_allowed(name: str, value: object, allowed: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, [], {name: value})
    message = str(raised.value)
    assert message.startswith(".".join(OPTION_PATHS[name]))
    assert allowed in message
    assert "\n" not in message


def test_a_table_must_be_a_table() -> None:
    with pytest.raises(ConfigError, match="scheduler is 5: it must be a table with the keys max_num_seqs, "):
        load_config(None, ["scheduler=5"])


def test_long_values_are_cut() -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, [], {"dtype": "x" * 1000})
    assert len(str(raised.value)) < 200


def test_dates_and_other_toml_types_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="threads is datetime"):
        load_config(write(tmp_path, "threads = 2024-01-01"))


# ---------------------------------------------------------------- broken sources


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("threads", "--set 'threads': write KEY=VALUE"),
        ("=3", "write KEY=VALUE"),
        ("scheduler.=3", "write KEY=VALUE"),
        ("threads=", "is not a TOML value"),
        ("model='a", "is not a TOML value"),
        ("threads=[1", "is not a TOML value"),
        ("threads=1\nseed=2", "give one value"),
        ("threads=x\nseed=2", "is not a TOML value"),
        ("threads=" + "9" * 5000, "it must be a whole number"),
        ("threads=" + "[" * 20000, "is not a TOML value"),
    ],
)
def test_broken_overrides(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(None, [text])
    assert message in str(raised.value)


def test_broken_toml_names_file_and_line(tmp_path: Path) -> None:
    path = write(tmp_path, "threads = 1\nseed = = 2\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert str(path) in str(raised.value)
    assert "line 2" in str(raised.value)


def test_a_key_given_twice_is_broken_toml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(write(tmp_path, "threads = 1\nthreads = 2\n"))


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*missing\.toml: No such file"):
        load_config(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_config(tmp_path)


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"model = '\xff'")
    with pytest.raises(ConfigError, match="is not UTF-8 text \\(byte 9\\)"):
        load_config(path)


# ---------------------------------------------------------------- writing


def test_defaults_round_trip(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, to_toml(Config()))) == Config()


@given(
    model=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    threads=st.integers(0, 1024),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    exact=st.booleans(),
    table=st.dictionaries(st.integers(1, 100), st.integers(0, 256)),
)
def test_any_configuration_round_trips(
    tmp_path_factory: pytest.TempPathFactory,
    model: str,
    threads: int,
    seed: int | None,
    exact: bool,
    table: dict[int, int],
) -> None:
    options = {"length_by_batch_size": sorted(table.items()), "model": model, "threads": threads}
    config = load_config(None, [], {**options, "seed": seed, "exact": exact})
    path = tmp_path_factory.mktemp("toml") / "c.toml"
    path.write_bytes(to_toml(config).encode())
    assert load_config(path) == config
