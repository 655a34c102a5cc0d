"""The command line and the README's program on the embedded model, each in a process of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
