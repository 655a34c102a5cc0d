"""The command line and the README's program on the embedded model, each in a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.test_timeline import overlaps, read

pytestmark = pytest.mark.model

ROOT = Path(__file__).resolve().parent.parent.parent
PACELINE = [sys.executable, "-m", "paceline"]


def run(*arguments: str, input: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PACELINE, *arguments], input=input, capture_output=True, text=True, check=False)


def test_generate_streams_text_and_compares() -> None:
    result = run(
        "generate", "--compare", "--max-tokens", "24", "--temperature", "0.9", "--seed", "3", "Hello!"
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "the output is identical, token for token" in result.stderr


def test_json_is_the_same_with_and_without_speculation() -> None:
    options = ["generate", "--json", "--max-tokens", "24", "-"]
    text = "Repeat: one two three, one two three, one two three"
    speculative = json.loads(run(*options, input=text).stdout)
    plain = json.loads(run(*options, "--draft", "none", input=text).stdout)
    assert speculative["token_ids"] == plain["token_ids"]
    assert speculative["usage"] == plain["usage"]
    assert speculative["speculation"]["num_drafts"] > 0
    assert plain["speculation"]["mean_acceptance_length"] is None


def test_both_lanes_in_json_and_in_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    models = ["--draft", "embedded", "--draft-dtype", "int8", "--dtype", "float32"]
    options = ["--mode", "overlapped", "--max-tokens", "24", "--trace", str(trace)]
    result = run("generate", "--json", *models, *options, "Name three rivers.")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    said = json.loads(result.stdout)
    speculation, lanes = said["speculation"], said["lanes"]
    assert (lanes["mode"], lanes["placement"]) == ("overlapped", "disaggregated")
    assert 0 < lanes["target_gap_median_s"] <= lanes["target_gap_p99_s"] < 5
    assert 0 <= lanes["draft_idle_share"] < 1
    assert (lanes["drafter_losses"], lanes["drafter_joins"], lanes["drafter_away"]) == (0, 0, False)
    steps = speculation["num_hits"] + speculation["num_leaf_hits"] + speculation["num_misses"]
    target, draft, instants = read(trace)
    assert 0 < steps < len(target) == lanes["target_passes"]
    assert speculation["num_drafted_nodes"] > speculation["num_draft_tokens"]
    written = [token for span in target for token in span["args"].get("r0", {"ids": []})["ids"]]
    assert written[: len(said["token_ids"])] == said["token_ids"]
    assert overlaps(target, draft) > 0
    assert [event["name"] for event in instants] == ["r0 arrives", "r0 ends"]


def test_a_trace_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    for name in ("generate", "chat"):
        arguments = ["--trace", str(tmp_path / "no" / "trace.json"), "--model", "no-such-model"]
        result = run(name, *arguments, *(["Hello"] if name == "generate" else []))
        assert result.returncode == 2
        assert re.fullmatch(r"error: cannot write the trace .*: No such file or directory\.\n", result.stderr)


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_counters_on_a_terminal(tmp_path: Path) -> None:
    """The text on standard output as ever, the counters on the terminal that standard error is."""
    import pty
    import termios

    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    command = [*PACELINE, "generate", "--max-tokens", "100", "--ignore-eos", "--draft", "ngram", "Count."]
    with (tmp_path / "text").open("wb") as text:
        subprocess.run(command, stdout=text, stderr=theirs, env=os.environ | {"TERM": "xterm"}, check=True)
    os.set_blocking(ours, False)
    shown = os.read(ours, 100_000).decode()
    os.close(theirs)
    os.close(ours)
    assert "\x1b" not in (tmp_path / "text").read_text(encoding="utf-8")
    assert re.search(r"\r\d+\.\d tokens/s \| .*target gap \d+\.\d ms\x1b\[K", shown)
    assert re.match(r"100 tokens \(cut at the limit\), .* tokens/s", shown.rsplit("\x1b[K", 1)[1])


def test_a_prompt_that_is_too_long_is_one_line() -> None:
    result = run("generate", "--raw", "-", input="word " * 20000)
    assert result.returncode == 2
    assert re.fullmatch(r"error: the prompt has \d+ tokens and the context is \d+.*\n", result.stderr)
    assert result.stdout == ""


def test_a_model_that_is_not_there_is_one_line() -> None:
    result = run("generate", "--model", "no-such-folder/model.gguf", "Hello")
    assert result.returncode == 1
    assert re.fullmatch(r"error: .*no-such-folder/model\.gguf.*\n", result.stderr)


def test_chat_remembers() -> None:
    result = run("chat", "--temperature", "0", "--max-tokens", "8", "--stats", input="Hello\nAgain\n")
    assert result.returncode == 0
    assert result.stderr.count("tokens/s") == 2


@pytest.mark.skipif(sys.platform == "win32", reason="SIGINT to a child needs POSIX")
def test_ctrl_c_in_the_middle_of_a_chat_answer() -> None:
    pipe = subprocess.PIPE
    command = [*PACELINE, "chat", "--ignore-eos", "--max-tokens", "4000"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"Count to a million.\n")
        process.stdin.flush()
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline() == b"(stopped)\n"
        _, stderr = process.communicate(b"/exit\n", timeout=60)
    assert (process.returncode, stderr) == (0, b"")


def test_the_program_in_the_readme_runs() -> None:
    (program,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert re.search(r"^(stop|length) 0\.\d+ ", result.stdout, re.MULTILINE)
