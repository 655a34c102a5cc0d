"""Groups of ranks: the tokens of one rank, and a clear end when one of them goes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from paceline.errors import ConfigError, EngineError, ModelError
from paceline.execution.forward_batch import Segment
from paceline.execution.model_runner import ModelRunner
from paceline.execution.parallel import ParallelRunner, Place
from paceline.kernels.batch import TokenBatch
from paceline.kernels.kv_cache import KVCache
from paceline.loading import LoadedModel, load
from paceline.models.native_decoder import NativeDecoder
from tests.tiny import edit_config, write_random

ROOT = Path(__file__).parents[2]
SIZES: dict[str, Any] = {"num_slots": 512, "num_rows": 2, "context_length": 256, "max_batch_tokens": 128}
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
PLACES = [Place((CORES[0],)), Place((CORES[-1],))]
PROMPT = np.random.default_rng(1).integers(0, 60, 100).tolist()

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and signals processes")


def start(model: LoadedModel, places: list[Place] | None = None, **changes: Any) -> ParallelRunner:
    return ParallelRunner.start(model, places or PLACES, **{"dtype": "float32", **SIZES, **changes})


def one_rank(model: LoadedModel, capture: tuple[int, ...] = ()) -> ModelRunner:
    spec = model.spec
    decoder = NativeDecoder(spec, model.weights, dtype="float32", threads=1, capture=capture)
    kv = KVCache(
        *(spec.num_layers, SIZES["num_slots"], spec.num_kv_heads, spec.head_dim, torch.float32),
        num_captured=len(capture),
        hidden_size=spec.hidden_size,
    )
    return ModelRunner(decoder, kv, num_rows=SIZES["num_rows"], context_length=SIZES["context_length"])


def ranks() -> list[psutil.Process]:
    """The rank processes that this process has started."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "paceline.execution.rank" in child.cmdline():
                found.append(child)
    return found


def left_behind() -> list[str]:
    """Files of this program, and of what it shares memory with, that outlive their processes."""
    makers = ("paceline", "torch", "gloo", "nccl")
    shared = [name for name in os.listdir("/dev/shm") if name.startswith(makers)]
    return shared + [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("paceline-ranks")]


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def logits_of(runner: ModelRunner, prompt: list[int], steps: int) -> list[np.ndarray]:
    """A prompt in two chunks while another row joins, greedy steps, then a tree below the last token."""
    runner.tables.write(0, 0, range(200))
    runner.tables.write(1, 0, range(200, 400))
    half, end = len(prompt) // 2, len(prompt)
    results = [runner.forward([Segment(0, 0, prompt[:half], True)]).numpy().copy()]
    both = [Segment(0, half, prompt[half:], True), Segment(1, 0, prompt[: half // 2], True)]
    results.append(runner.forward(both).numpy().copy())
    token = int(results[-1][0].argmax())
    for step in range(steps):
        results.append(runner.forward([Segment(0, end + step, [token], True)]).numpy().copy())
        token = int(results[-1][0].argmax())
    runner.tables.write(0, end + steps, [401])
    guess = int(results[-1][0].argsort()[-2])
    tree = Segment(
        *(0, end + steps, [token], True), [guess, 5, 6, 7], [[402], [402, 403], [402, 404], [402, 404, 405]]
    )
    results.append(runner.forward([tree, Segment(1, half // 2, [3], True)]).numpy().copy())
    return results


def assert_same_tokens(got: list[np.ndarray], want: list[np.ndarray], tolerance: float) -> None:
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=1e-3)
        np.testing.assert_array_equal(one.argmax(axis=1), other.argmax(axis=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load(str(folder))


@pytest.fixture(scope="module")
def runner(model: LoadedModel) -> Iterator[ParallelRunner]:
    runner = start(model)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> list[np.ndarray]:
    return logits_of(one_rank(model), PROMPT, 6)


def test_two_ranks_give_the_tokens_of_one(runner: ParallelRunner, expected: list[np.ndarray]) -> None:
    assert_same_tokens(logits_of(runner, PROMPT, 6), expected, 1e-3)
    again = logits_of(runner, PROMPT, 6)
    for one, other in zip(again, logits_of(runner, PROMPT, 6), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_group_by_torch_distributed_does_too(model: LoadedModel, expected: list[np.ndarray]) -> None:
    runner = start(model, native=False)
    assert left_behind() == []
    assert_same_tokens(logits_of(runner, PROMPT, 6), expected, 1e-3)
    ranks()[-1].kill()
    with pytest.raises(EngineError, match="SIGKILL"):
        logits_of(runner, PROMPT, 1)
    runner.close()


@pytest.mark.parametrize("native", [True, False])
def test_rank_0_captures_and_all_ranks_end_early(model: LoadedModel, native: bool) -> None:
    """Also what the last layer gives, which every rank must then compute for every token."""
    capture = (2, 0, 1)
    alone = one_rank(model, capture)
    runner = start(model, native=native, capture=capture)
    try:
        wanted = logits_of(alone, PROMPT, 2)
        assert_same_tokens(logits_of(runner, PROMPT, 2), wanted, 1e-3)
        assert runner.kv.features is not None
        assert alone.kv.features is not None
        torch.testing.assert_close(runner.kv.features, alone.kv.features, rtol=1e-3, atol=1e-3)
        assert alone.kv.features[:102].any(dim=2).all(), "nothing was captured"
        kept = runner.kv.features.clone()
        early = [each.forward([Segment(0, 50, [3, 4], True)], 1).clone() for each in (runner, alone)]
        torch.testing.assert_close(*early, rtol=1e-3, atol=1e-3)
        assert torch.equal(runner.kv.features, kept)
        with pytest.raises(ValueError, match="give 1 to 2"):
            runner.forward([Segment(0, 0, [1], True)], 3)
        assert_same_tokens(logits_of(runner, PROMPT, 2), wanted, 1e-3)
    finally:
        runner.close()


def test_groups_live_side_by_side(
    runner: ParallelRunner, model: LoadedModel, expected: list[np.ndarray]
) -> None:
    other = start(model)
    thread = threading.Thread(target=logits_of, args=(other, PROMPT, 6))
    thread.start()
    assert_same_tokens(logits_of(runner, PROMPT, 6), expected, 1e-3)
    thread.join()
    other.close()
    assert_same_tokens(logits_of(runner, PROMPT, 6), expected, 1e-3)


def test_a_malformed_batch_is_refused_and_the_group_goes_on(
    runner: ParallelRunner, expected: list[np.ndarray]
) -> None:
    with pytest.raises(ValueError, match="token id"):
        runner.forward([Segment(0, 0, [10**6], True)])
    with pytest.raises(ValueError, match="129 tokens"):
        runner.forward([Segment(0, 0, [1] * 129, True)])
    assert_same_tokens(logits_of(runner, PROMPT, 6), expected, 1e-3)


def test_ctrl_c_comes_after_the_pass(
    runner: ParallelRunner, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = runner.decoder
    passes = []

    class Interrupted:
        spec = decoder.spec
        kv_dtype = decoder.kv_dtype

        def forward(self, batch: TokenBatch, kv: KVCache, layers: int | None) -> torch.Tensor:
            os.kill(os.getpid(), signal.SIGINT)
            logits = decoder.forward(batch, kv, layers)
            passes.append(logits)
            return logits

    monkeypatch.setattr(runner, "decoder", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        runner.forward([Segment(0, 0, [1, 2], True)])
    assert len(passes) == 1
    monkeypatch.setattr(runner, "decoder", decoder)
    assert_same_tokens(logits_of(runner, PROMPT, 6), expected, 1e-3)


def test_a_pass_that_rank_0_lacks_memory_for_costs_only_itself(
    runner: ParallelRunner, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits_of(runner, PROMPT, 1)

    class Poor:
        spec = runner.decoder.spec
        kv_dtype = runner.decoder.kv_dtype

        def forward(self, *_: object) -> torch.Tensor:
            raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "decoder", Poor())
        for _ in range(3):
            with pytest.raises(MemoryError, match="no room"):
                runner.forward([Segment(0, 100, [1, 2], True)])
            time.sleep(0.05)
    assert_same_tokens(logits_of(runner, PROMPT, 6), expected, 1e-3)


def assert_lost(runner: ParallelRunner, others: list[psutil.Process], cause: str, seconds: float) -> None:
    started = time.monotonic()
    messages = []
    for _ in range(3):
        with pytest.raises(EngineError, match=cause) as caught:
            runner.forward([Segment(0, 0, [1, 2, 3], True)])
        messages.append(str(caught.value))
    assert len(set(messages)) == 1
    assert "Restart" in messages[0]
    assert time.monotonic() - started < seconds
    started = time.monotonic()
    runner.close()
    assert time.monotonic() - started < 3
    assert wait_until(lambda: not any(process.is_running() for process in others), 2)
    assert left_behind() == []


def test_a_killed_rank_ends_the_group(model: LoadedModel) -> None:
    before = ranks()
    runner = start(model, [*PLACES, PLACES[0]])
    own = [process for process in ranks() if process not in before]
    assert len(own) == 2
    logits_of(runner, PROMPT, 1)
    own[0].kill()
    assert wait_until(lambda: not own[1].is_running(), 5), "the other rank goes too"
    assert_lost(runner, own, f"rank 1 .process {own[0].pid}. was killed by SIGKILL", 5)


def test_a_rank_killed_within_a_pass_ends_it(model: LoadedModel) -> None:
    before = ranks()
    runner = start(model)
    (own,) = [process for process in ranks() if process not in before]
    logits_of(runner, PROMPT, 1)
    own.suspend()
    timer = threading.Timer(0.5, own.kill)
    timer.start()
    assert_lost(runner, [own], "SIGKILL", 4)


@pytest.mark.parametrize(("backlog", "cause"), [(0, "did not come to a sum"), (3000, "BlockingIOError")])
def test_a_rank_that_hangs_ends_the_group(model: LoadedModel, backlog: int, cause: str) -> None:
    """Also when it does not even take what it is sent."""
    before = ranks()
    runner = start(model, timeout_s=1.0)
    (own,) = [process for process in ranks() if process not in before]
    logits_of(runner, PROMPT, 1)
    own.suspend()
    for _ in range(backlog):
        runner.tables.write(0, 0, range(200))
    assert_lost(runner, [own], cause, 5)


def test_a_closed_group_says_so(model: LoadedModel) -> None:
    runner = start(model)
    runner.close()
    runner.close()
    with pytest.raises(EngineError, match="is closed"):
        runner.forward([Segment(0, 0, [1], True)])


SCRIPT = """
import os, sys
from paceline.execution.forward_batch import Segment
from paceline.execution.parallel import ParallelRunner, Place
from paceline.loading import load

places = [Place((int(core),)) for core in sys.argv[2].split(",")]
runner = ParallelRunner.start(load(sys.argv[1]), places, dtype="float32", num_slots=64, num_rows=1,
                              context_length=64, max_batch_tokens=64)
runner.tables.write(0, 0, range(64))
import psutil
print(*(child.pid for child in psutil.Process().children()), flush=True)
if sys.argv[3] == "leave":
    sys.exit(0)
while True:
    runner.forward([Segment(0, 0, [1, 2, 3], True)])
"""


@pytest.mark.parametrize("end", ["leave", "kill", "interrupt"])
def test_no_rank_outlives_rank_0(folder: Path, end: str) -> None:
    """However rank 0 ends, with passes under way and without a `close`, in a program that has no file."""
    cores = ",".join(str(place.cores[0]) for place in PLACES)
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(folder), cores, end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        others = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(others) == 1
        time.sleep(0.3)
        if end != "leave":
            process.send_signal(signal.SIGKILL if end == "kill" else signal.SIGINT)
        _, complaint = process.communicate(timeout=10)
    assert process.returncode == {"leave": 0, "kill": -signal.SIGKILL, "interrupt": -signal.SIGINT}[end]
    assert end == "interrupt" or complaint == b""
    assert wait_until(lambda: not any(other.is_running() for other in others), 3)
    assert left_behind() == []


def test_a_rank_that_cannot_start_says_why(tmp_path: Path) -> None:
    folder = write_random(tmp_path / "changing")
    model = load(str(folder))
    before = ranks()
    with pytest.raises(EngineError, match=r"rank 1 .*cores 99999 are not to be had[\s\S]*could not start"):
        start(model, [PLACES[0], Place((99_999,))])
    edit_config(folder, rope_theta=5000.0)
    with pytest.raises(EngineError, match=r"is not what rank 0 loaded"):
        start(model)
    assert ranks() == before
    assert left_behind() == []


def test_places_that_cannot_be_are_refused(model: LoadedModel) -> None:
    for places, changes, message in [
        ([], {}, "at least one place"),
        ([Place((0,)), Place()], {}, "needs cores"),
        ([Place((0,)), Place(device="cuda:0")], {}, "all on CPU cores"),
        ([Place(device="cuda:0"), Place(device="cuda:1")], {}, "all on CPU cores"),
        ([Place((0,)), Place((0,))], {"native": False, "dtype": "int8"}, "int8 weights need"),
    ]:
        with pytest.raises(ConfigError, match=message):
            ParallelRunner.start(model, places, **{"dtype": "float32", **SIZES, **changes})
    with pytest.raises(ModelError, match="over 5 ranks"):
        start(model, [Place((0,))] * 5)


@pytest.mark.model
def test_two_ranks_of_the_embedded_model_give_the_tokens_of_one() -> None:
    model = load("embedded")
    runner, single = start(model), one_rank(model)
    for text in ("The capital of France is", "def add(a, b):\n    return", "Three colours: red,"):
        prompt = model.tokenizer.encode(text)
        assert_same_tokens(logits_of(runner, prompt, 12), logits_of(single, prompt, 12), 2e-3)
    runner.close()
