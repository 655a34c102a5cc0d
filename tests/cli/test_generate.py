"""`paceline generate`, with an engine that needs no model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from paceline.config import Config, load_config, to_toml
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError, EngineError, KernelError, ModelError, PacelineError

from .fake import FakeLLM

Run = Callable[..., Result]
Engine = type[FakeLLM]


def params(engine: Engine, call: int = 0) -> SamplingParams:
    return engine.made[0].asked[call][1]


# ---------------------------------------------------------------- output


def test_text_on_stdout_and_summary_on_stderr(run: Run, engine: Engine) -> None:
    result = run("generate", "Hello")
    assert result.exit_code == 0
    assert result.stdout == "Draft early, verify once.\n"
    assert result.stderr == (
        "5 tokens, 10.0 tokens/s, first after 0.25 s, mean acceptance length 2.50 (ngram)\n"
    )
    assert engine.made[0].closed


def test_no_second_newline(run: Run, engine: Engine) -> None:
    engine.answer = staticmethod(lambda _: ["one\n"])
    result = run("generate", "Hello")
    assert result.stdout == "one\n"
    assert result.stderr.startswith("1 tokens, first after")


def test_json_is_one_object_with_the_documented_keys(run: Run) -> None:
    result = run("generate", "Hello", "--json")
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1
    assert json.loads(result.stdout) == {
        "text": "Draft early, verify once.",
        "token_ids": [497, 617, 693, 453, 46],
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 1, "completion_tokens": 5},
        "timing": {"load_s": 0.5, "ttft_s": 0.25, "decode_s": 0.4, "tpot_s": 0.1},
        "speculation": {
            "drafter": "ngram",
            "num_drafts": 2,
            "num_drafted_nodes": 0,
            "num_draft_tokens": 5,
            "num_accepted_tokens": 3,
            "mean_acceptance_length": 2.5,
            "num_hits": 0,
            "num_leaf_hits": 0,
            "num_misses": 0,
        },
        "lanes": {
            "mode": "serial-chain",
            "placement": "serial",
            "target_passes": 0,
            "target_busy_s": 0.0,
            "target_gap_median_s": None,
            "target_gap_p99_s": None,
            "draft_passes": 0,
            "draft_busy_s": 0.0,
            "draft_idle_share": None,
            "sample_s": 0.0,
            "draft_advance_s": 0.0,
            "target_memory": {"weight_bytes": 0, "kv_bytes_per_token": 0, "feature_bytes_per_token": 0},
            "drafter_losses": 0,
            "drafter_joins": 0,
            "drafter_away": False,
            "drafter_loss_reason": None,
            "drafters": [],
            "drafted_by_distance": {},
        },
        "model": "embedded",
        "seed": 77,
    }


def test_json_without_drafts_has_no_acceptance_length(run: Run) -> None:
    speculation = json.loads(run("generate", "Hello", "--json", "--draft", "none").stdout)["speculation"]
    assert speculation["mean_acceptance_length"] is None
    assert speculation["drafter"] == "none"


def test_json_logprobs_are_valid_json(run: Run) -> None:
    entries = json.loads(run("generate", "Hello", "--json", "--logprobs", "2").stdout)["logprobs"]
    assert entries[0] == {"token_id": 497, "logprob": -0.5, "rank": 1, "top": [[5, -0.5], [6, None]]}


def test_json_of_an_empty_answer(run: Run, engine: Engine) -> None:
    engine.answer = staticmethod(lambda _: [])
    result = json.loads(run("generate", "Hello", "--json").stdout)
    assert (result["text"], result["timing"]["decode_s"]) == ("", None)


# ---------------------------------------------------------------- the prompt


def test_the_prompt_goes_through_the_chat_template(run: Run, engine: Engine) -> None:
    run("generate", "Hello", "--system", "Be brief.")
    assert engine.made[0].asked[0][0] == [("system", "Be brief."), ("user", "Hello")]


def test_raw_sends_the_text_itself(run: Run, engine: Engine) -> None:
    run("generate", "Hello", "--raw")
    assert engine.made[0].asked[0][0] == "Hello"


def test_a_dash_reads_standard_input(run: Run, engine: Engine) -> None:
    run("generate", "-", "--raw", input="from a pipe: é\n")
    assert engine.made[0].asked[0][0] == "from a pipe: é\n"


@pytest.mark.parametrize(
    ("arguments", "input", "message"),
    [
        ([], None, "Missing PROMPT"),
        ([""], None, "error: the prompt is empty"),
        (["-"], " \n", "error: the prompt is empty"),
        (["-"], b"\xff\xfe", "error: standard input is not UTF-8 text (byte 0)"),
    ],
)
def test_prompts_that_cannot_be(
    run: Run, engine: Engine, arguments: list[str], input: str | bytes | None, message: str
) -> None:
    result = run("generate", *arguments, input=input)
    assert result.exit_code == 2
    assert message in result.stderr
    assert engine.made == []


# ---------------------------------------------------------------- options


def test_every_sampling_option_reaches_the_request(run: Run, engine: Engine) -> None:
    options = (
        "--max-tokens 9 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 "
        "--presence-penalty 0.2 --frequency-penalty 0.3 --stop a --stop b --seed 5 --ignore-eos"
    )
    assert run("generate", "Hello", *options.split()).exit_code == 0
    assert params(engine) == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        stop=["a", "b"],
        seed=5,
        ignore_eos=True,
    )


def test_options_not_given_leave_the_request_alone(run: Run, engine: Engine) -> None:
    run("generate", "Hello")
    assert params(engine) == SamplingParams()


def test_every_engine_option_reaches_the_configuration(run: Run, engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("model = 'from-file'\nthreads = 1\n")
    options = (
        f"--config {file} --set scheduler.max_num_seqs=3 --draft tiny --num-speculative-tokens 4 "
        f"--dtype float32 --draft-dtype int8 --unpickle-head --exact --device cpu "
        f"--threads 2 --record {tmp_path / 'log'} "
        f"--trace {tmp_path / 'trace'}"
    )
    assert run("generate", "Hello", *options.split()).exit_code == 0
    expected = load_config(
        None,
        ["scheduler.max_num_seqs=3"],
        {
            "model": "from-file",
            "draft": "tiny",
            "num_speculative_tokens": 4,
            "dtype": "float32",
            "draft_dtype": "int8",
            "unpickle_head": True,
            "exact": True,
            "device": "cpu",
            "threads": 2,
        },
    )
    assert engine.made[0].config == expected
    assert (engine.made[0].record, engine.made[0].trace) == (tmp_path / "log", tmp_path / "trace")


def test_no_exact_overrides_the_file(run: Run, engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("exact = true\n")
    run("generate", "Hello", "--config", str(file), "--no-exact")
    assert engine.made[0].config.exact is False


def test_print_config_round_trips_and_loads_nothing(run: Run, engine: Engine, tmp_path: Path) -> None:
    result = run("generate", "--print-config", "--draft", "none", "--set", "seed=4")
    assert result.exit_code == 0
    file = tmp_path / "c.toml"
    file.write_text(result.stdout)
    assert load_config(file) == load_config(None, ["seed=4"], {"draft": "none"})
    assert run("generate", "--print-config").stdout == to_toml(Config())
    assert engine.made == []


# ---------------------------------------------------------------- comparison


def test_compare_states_speed_and_identity(run: Run, engine: Engine) -> None:
    result = run("generate", "Hello", "--compare")
    assert result.exit_code == 0
    assert result.stdout == "Draft early, verify once.\n"
    assert result.stderr.splitlines()[1:] == [
        "decoding with speculation 10.0 tokens/s, without 5.0: 2.00 times as fast (best of 2 runs each)",
        "with and without speculation the output is identical, token for token",
    ]
    asked = [params(engine, call) for call in range(4)]
    assert [each.num_speculative_tokens for each in asked] == [None, 0, None, 0]
    assert [each.seed for each in asked] == [None, 77, 77, 77]


def test_compare_says_when_outputs_differ(run: Run, engine: Engine) -> None:
    engine.answer = staticmethod(lambda p: ["a", "b"] if p.num_speculative_tokens == 0 else ["a", "c"])
    result = run("generate", "Hello", "--compare")
    assert "the output DIFFERS from token 2 on" in result.stderr
    assert result.exit_code == 1
    engine.answer = staticmethod(lambda p: ["a"] if p.num_speculative_tokens == 0 else ["a", "c"])
    assert "the output DIFFERS from token 2 on" in run("generate", "Hello", "--compare").stderr


def test_compare_of_one_token_claims_no_speed(run: Run, engine: Engine) -> None:
    engine.answer = staticmethod(lambda _: ["a"])
    assert "the output is too short to compare speeds\n" in run("generate", "Hello", "--compare").stderr


def test_compare_in_json(run: Run) -> None:
    result = json.loads(run("generate", "Hello", "--compare", "--json").stdout)
    assert result["comparison"] == {
        "identical": True,
        "runs": 2,
        "tokens_per_s": 10.0,
        "plain_tokens_per_s": 5.0,
        "speedup": 2.0,
    }


@pytest.mark.parametrize(
    "options",
    [
        ["--draft", "none"],
        ["--num-speculative-tokens", "0"],
        ["--set", "speculation.length_by_batch_size=[[1, 0]]"],
    ],
)
def test_compare_needs_speculation(run: Run, options: list[str]) -> None:
    result = run("generate", "Hello", "--compare", *options)
    assert result.exit_code == 2
    assert "--compare needs speculation" in result.stderr


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "error: temperature is -1: it must be at least 0"),
        (["--temperature", "nan"], "error: temperature is nan: give a finite number, at least 0"),
        (["--max-tokens", "0"], "error: max_tokens is 0: it must be at least 1."),
        (["--stop", ""], "error: stop holds an empty string"),
        (["--num-speculative-tokens", "-1"], "error: speculation.num_speculative_tokens is -1"),
        (["--set", "thread=1"], "error: --set: unknown key `thread`: did you mean `threads`?"),
        (["--config", "no-such-file.toml"], "error: cannot read the configuration file no-such-file.toml"),
        (["--model", ""], "error: model is '': it must be a text that is not empty."),
    ],
)
def test_what_cannot_be_honoured_is_one_line_and_exit_code_2(
    run: Run, engine: Engine, options: list[str], message: str
) -> None:
    result = run("generate", "Hello", *options)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1
    assert engine.made == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "fp16"], "'fp16' is not one of 'auto', 'float32', 'bfloat16', 'int8'"),
        (["--top-k", "many"], "'many' is not a valid integer"),
        (["--logprobs", "2"], "--logprobs are only printed with --json"),
        (["--raw", "--system", "x"], "--system needs the chat template"),
        (["--no-such-option"], "No such option"),
    ],
)
def test_wrong_usage(run: Run, options: list[str], message: str) -> None:
    result = run("generate", "Hello", *options)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a\nb"), 2),
        (ModelError("no such model."), 1),
        (KernelError("no compiler."), 1),
        (EngineError("out of luck."), 1),
    ],
)
def test_engine_errors_have_no_traceback(run: Run, engine: Engine, error: PacelineError, code: int) -> None:
    engine.fail_at_start = error
    result = run("generate", "Hello")
    assert (result.exit_code, result.stderr) == (code, f"error: {' '.join(str(error).split())}\n")
    assert result.stdout == ""


def test_a_request_that_fails(run: Run, engine: Engine) -> None:
    engine.fail_in_request = "every token is forbidden."
    result = run("generate", "Hello")
    assert (result.exit_code, result.stderr) == (2, "error: every token is forbidden.\n")
    assert engine.made[0].closed


def test_ctrl_c_ends_quietly(run: Run, engine: Engine) -> None:
    def interrupt(place: int) -> None:
        if place == 2:
            raise KeyboardInterrupt

    engine.on_chunk = staticmethod(interrupt)
    result = run("generate", "Hello")
    assert (result.exit_code, result.stderr) == (130, "")
    assert engine.made[0].closed


def test_a_cache_per_tenant_is_refused(run: Run) -> None:
    options = ["--draft", "suffix", "--set", "speculation.suffix_cache=tenant"]
    result = run("generate", *options, "Hello")
    assert result.exit_code == 2
    assert "name no tenant" in result.stderr
