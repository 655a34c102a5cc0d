"""A draft worker is started, watched, lost without harm and had back; nothing of it is left behind."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import psutil
import pytest
import zmq

from paceline.core.work import DrafterJoined, DrafterLost, GrowDrafts, NodesDrafted
from paceline.engine import draft_group, draft_messages, draft_worker
from paceline.engine.attachment import Patience
from paceline.engine.channel import Address, Context, Keys, Line
from paceline.engine.draft_group import DraftGroup
from paceline.engine.draft_host import LocalHost
from paceline.engine.draft_messages import FOR_ENGINE, PROTOCOL, Codec, Hello, Refused
from paceline.errors import ConfigError, EngineError, ModelError
from tests.engine import draft_toys as toys
from tests.engine.draft_drive import QUICK, Drive, ThreadHost, driving, process, prompts, worker_pid
from tests.engine.draft_toys import advance_of, spec

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files go (a short path: sockets are there). No process, no thread, no file outlives a
    test."""
    threads = set(threading.enumerate())
    with tempfile.TemporaryDirectory(prefix="pl-") as name:
        monkeypatch.setattr("tempfile.tempdir", name)
        yield Path(name)
        assert list(Path(name).iterdir()) == []
    assert {thread for thread in threading.enumerate() if "paceline" in thread.name} <= threads
    assert [child for child in psutil.Process().children() if "draft_worker" in str(child.cmdline())] == []


def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    end = time.perf_counter() + limit_s
    while not condition():
        assert time.perf_counter() < end, "it did not come to pass"
        time.sleep(0.01)


def losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---------------------------------------------------------------- start


def test_a_worker_that_cannot_load_is_an_error_at_the_start() -> None:
    group = DraftGroup(spec(), process("cannot_load"), SimpleQueue(), QUICK)
    with pytest.raises(ModelError, match="the draft model is not there"):
        group.start()


def test_a_worker_that_dies_while_loading_is_an_error_at_the_start() -> None:
    group = DraftGroup(spec(), process("dies_while_loading"), SimpleQueue(), QUICK)
    with pytest.raises(EngineError, match=r"ended by signal 9\. It was not ready yet"):
        group.start()


def test_cores_that_are_not_there_are_named() -> None:
    host = LocalHost("tests.engine.draft_toys:ahead", cores=(4095,))
    with pytest.raises(ConfigError, match="4095"):
        DraftGroup(spec(), host, SimpleQueue(), QUICK).start()


def test_a_worker_keeps_to_its_cores_and_the_engine_does_not() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    host = LocalHost("tests.engine.draft_toys:ahead", cores=(core,))
    with closing(DraftGroup(spec(), host, SimpleQueue(), QUICK)) as group:
        group.start()
        assert os.sched_getaffinity(worker_pid(host)) == {core}
        assert os.sched_getaffinity(0) == before


def test_no_key_is_on_a_command_line_or_in_the_environment() -> None:
    host = process("ahead")
    with closing(DraftGroup(spec(), host, SimpleQueue(), QUICK)) as group:
        group.start()
        keys = host.ensure().keys
        folder = Path(f"/proc/{worker_pid(host)}")
        told = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
        assert keys.worker not in told
        assert keys.engine not in told


def test_loading_is_not_hanging() -> None:
    """Longer than a worker may be silent, and the loop cannot give a sign meanwhile."""
    with driving(ThreadHost(toys.slow_to_load), patience=Patience(silence_s=0.3)) as drive:
        drive.check(prompts(1), 8)
        assert drive.group.stats.losses == 0


@pytest.mark.parametrize("factory", [toys.slow_reader, toys.slow_reader_in_passes])
def test_reading_a_long_prompt_is_not_hanging(factory: Any, caplog: pytest.LogCaptureFixture) -> None:
    events: SimpleQueue[Any] = SimpleQueue()
    host = ThreadHost(factory)
    with closing(DraftGroup(spec("stream"), host, events, Patience(silence_s=0.5))) as group:
        group.start()
        group.submit(advance_of("short", [1, 2, 3]))
        assert isinstance(events.get(timeout=5), NodesDrafted)
        group.submit(advance_of("long", [1] * 300))
        until(lambda: not events.empty() and events.get().grown[0].request_id == "long")
    assert losses(caplog) == []


def test_another_version_is_named() -> None:
    group = DraftGroup(spec(), ThreadHost(toys.ahead), SimpleQueue(), QUICK)
    real = group._hello
    group._hello = Hello(real.engine, real.spec, protocol=999, version="9.9")
    with pytest.raises(
        ConfigError, match=rf"protocol {PROTOCOL} \(paceline .*the engine 999 \(paceline 9.9\)"
    ):
        group.start()


def test_a_spec_that_cannot_be_read_is_refused() -> None:
    group = DraftGroup(spec(), ThreadHost(toys.ahead), SimpleQueue(), QUICK)
    group._hello = Hello(1, draft_group.msgspec.Raw(b"\x93\x01\x02\x03"))
    with pytest.raises(EngineError, match="ValidationError"):
        group.start()


def test_one_worker_serves_one_engine_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_group, "_OTHER_ENGINE_S", 0.3)
    monkeypatch.setattr(draft_group, "_ASK_AGAIN_S", 0.1)
    host = ThreadHost(toys.ahead)
    first = DraftGroup(spec(), host, SimpleQueue(), QUICK)
    first.start()
    second = DraftGroup(spec(), _Borrowed(host), SimpleQueue(), QUICK)
    with pytest.raises(EngineError, match="another engine"):
        second.start()
    with closing(first):
        assert first.stats.losses == 0


def test_the_next_engine_has_the_worker_when_the_first_is_done() -> None:
    host = ThreadHost(toys.ahead)
    host.ensure()
    for _ in range(2):
        with closing(DraftGroup(spec(), _Borrowed(host), SimpleQueue(), QUICK)) as group:
            group.start()
    assert host.starts == 1
    host.end()


def test_an_engine_that_died_without_a_word_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_worker, "_ENGINE_SILENCE_S", 0.5)
    host = ThreadHost(toys.ahead)
    context: Context = zmq.Context()
    with closing(DraftGroup(spec(), host, SimpleQueue(), QUICK)) as group:
        line = Line(context, host.ensure(), 2.0)
        line.send(Codec(()).encode(Hello(77, group._hello.spec), 5))
        until(lambda: bool(line.receive(0.05)))
        line.close()
        group.start()
    context.destroy(linger=0)


class _Borrowed:
    """Somebody else's worker, as a remote one is."""

    name, connect_s = "the draft worker", 10.0

    def __init__(self, host: ThreadHost) -> None:
        self.host = host

    def ensure(self) -> Address:
        return self.host.ensure()

    def ended(self) -> str | None:
        return None

    def end(self) -> None:
        pass


# ---------------------------------------------------------------- loss


def killed_midway(drive: Drive, how: int) -> Callable[[int], None]:
    """Sends a signal to the worker once, when some tokens are there."""
    done: list[bool] = []

    def each(num_tokens: int) -> None:
        if num_tokens > 60 and not done:
            done.append(True)
            os.kill(worker_pid(drive.host), how)

    return each


@pytest.mark.parametrize("ahead", ["off", "stream"])
def test_a_killed_worker_costs_nothing_but_its_guesses(ahead: str, caplog: pytest.LogCaptureFixture) -> None:
    with driving(process("ahead"), ahead, pause_s=0.004) as drive:
        drive.check(prompts(3), 200, killed_midway(drive, signal.SIGKILL))
        assert losses(caplog) == [
            "the draft worker was ended by signal 9; decoding goes on without it until it is back"
        ]
        assert drive.group.stats.losses == 1
        assert [lost.reason for lost in drive.seen(DrafterLost)] == ["was ended by signal 9"]
        if not drive.seen(DrafterJoined):
            drive.wait_for(DrafterJoined)
        before = drive.num_accepted
        drive.check(prompts(3), 100)
        assert drive.num_accepted > before, "guesses are back"
        assert drive.group.stats.joins == 1
    assert len(losses(caplog)) == 1


@pytest.mark.parametrize("settled", [False, True], ids=["in its first second", "after work"])
def test_a_stopped_worker_is_let_go_and_had_back(settled: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Where its loop has promised nothing (it may be loading what it needs for a first pass), the silence of
    its process alone tells."""
    with driving(process("ahead"), "stream", pause_s=0.002) as drive:
        pid = worker_pid(drive.host)
        if settled:
            drive.check(prompts(2), 40)
        os.kill(pid, signal.SIGSTOP)
        drive.check(prompts(2), 100)
        if not drive.seen(DrafterLost):
            drive.wait_for(DrafterLost, limit_s=5)
        drive.check(prompts(3), 60)
        time.sleep(1.0)
        os.kill(pid, signal.SIGCONT)
        drive.wait_for(DrafterJoined)
        assert worker_pid(drive.host) == pid, "the same process: nothing was loaded anew"
        before = drive.num_accepted
        drive.check(prompts(3), 100)
        assert drive.num_accepted > before
        stats = drive.group.stats
        assert (stats.losses, stats.joins) == (1, 1)
    assert len(losses(caplog)) == 1


def test_a_worker_that_does_not_come_back_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    patience = Patience(silence_s=0.5, revive_s=0.5, first_pause_s=0.02)
    with driving(process("ahead"), "stream", patience=patience) as drive:
        pid = worker_pid(drive.host)
        os.kill(pid, signal.SIGSTOP)
        drive.wait_for(DrafterJoined)
        assert worker_pid(drive.host) != pid
        assert not psutil.pid_exists(pid)
        drive.check(prompts(2), 60)
    assert len(losses(caplog)) == 1


@pytest.mark.parametrize("cause", [OSError(28, "No space left on device"), zmq.ZMQError(24)], ids=str)
def test_a_machine_that_refuses_a_worker_is_asked_again(
    cause: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Like any other reason, and told once."""
    host = ThreadHost(toys.ahead)
    real, calls = host.ensure, []

    def ensure() -> Address:
        calls.append(host.starts)
        if 2 <= len(calls) <= 5:
            raise cause
        return real()

    host.ensure = ensure  # type: ignore[method-assign]
    with driving(host, "stream") as drive:
        drive.check(prompts(1), 20)
        host.end()
        drive.wait_for(DrafterJoined)
        drive.check(prompts(2), 40)
    told = [text for text in losses(caplog) if "is not back" in text]
    assert len(told) == 1
    assert str(getattr(cause, "strerror", "")) in told[0]
    assert len(losses(caplog)) == 2


def test_a_loop_that_is_stuck_in_a_live_process_is_found_and_replaced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    patience = Patience(silence_s=0.5, revive_s=0.3, first_pause_s=0.02)
    with driving(process("stuck"), "stream", pause_s=0.002, patience=patience) as drive:
        drive.check(prompts(2), 100)
        lost = drive.seen(DrafterLost) or [drive.wait_for(DrafterLost)]
        assert "no sign of life" in lost[0].reason
        drive.check(prompts(2), 100)
        drive.wait_for(DrafterJoined)
    assert len(losses(caplog)) == 1


def test_a_drafter_that_fails_is_lost_once_per_failure(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, draft_group.__name__)
    with driving(ThreadHost(toys.raising), "stream", pause_s=0.001) as drive:
        drive.check(prompts(2), 120)
        until(lambda: drive.group.stats.losses >= 1)
        reasons = {lost.reason for lost in drive.seen(DrafterLost)}
        assert reasons == {"failed: RuntimeError: a hole in the drafter"}
    told = [record for record in caplog.records if record.name == draft_group.__name__]
    assert len(told) == drive.group.stats.losses


def test_work_for_a_worker_that_the_core_does_not_know_of_goes_nowhere() -> None:
    """A new worker may be there before the core has heard that the old one is gone."""
    events: SimpleQueue[Any] = SimpleQueue()
    host = ThreadHost(toys.raising)
    with closing(DraftGroup(spec("stream"), host, events, QUICK)) as group:
        group.start()
        for at in range(5):
            group.submit(advance_of(f"r{at}", [1, 2]))
        until(lambda: group.stats.joins == 1)
        group.submit(advance_of("late", [1, 2]))
        group.submit(GrowDrafts(1, ()))
        told = []
        while not told or not isinstance(told[-1], DrafterJoined):
            told.append(events.get(timeout=5))
        assert isinstance(told[-2], DrafterLost)
        group.turn_to(told[-2])
        assert not group.submit(advance_of("nobody", [1, 2]))
        group.turn_to(told[-1])
        group.submit(advance_of("new", [1, 2]))
        names = {nodes.request_id for nodes in events.get(timeout=5).grown}
        assert names == {"new"}


def test_a_packet_that_was_lost_on_the_way_begins_a_new_attachment() -> None:
    with driving(ThreadHost(toys.ahead), "stream") as drive:
        drive.check(prompts(1), 20)
        assert drive.group._current is not None
        drive.group._current.sent += 1
        drive.check(prompts(2), 60)
        lost = drive.seen(DrafterLost) or [drive.wait_for(DrafterLost)]
        assert "was lost on the way" in lost[0].reason
        drive.wait_for(DrafterJoined)
        drive.check(prompts(2), 60)


def test_a_message_that_cannot_be_read_is_dropped_with_its_sender(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with driving(ThreadHost(toys.ahead), "stream") as drive:
        drive.check(prompts(1), 20)
        real, sent = Codec.encode, []

        def damaged(codec: Codec, message: Any, attachment: int, number: int = 0) -> bytes:
            frame = real(codec, message, attachment, number)
            if isinstance(message, NodesDrafted) and not sent:
                sent.append(message)
                return frame[:-3]
            return frame

        monkeypatch.setattr(Codec, "encode", damaged)
        drive.check(prompts(2), 60)
        lost = drive.seen(DrafterLost) or [drive.wait_for(DrafterLost)]
        assert "cannot be read" in lost[0].reason
        drive.wait_for(DrafterJoined)
        drive.check(prompts(2), 60)
    assert len(losses(caplog)) == 1


def test_junk_from_an_engine_is_dropped_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    host = ThreadHost(toys.ahead)
    context: Context = zmq.Context()
    with driving(host, "stream") as drive:
        line = Line(context, host.ensure(), 2.0)
        for at in range(20):
            line.send(bytes([at]) * 50)
        line.send(bytes(draft_messages.MOST_BYTES // 1000))
        drive.check(prompts(2), 60)
        until(lambda: len(losses(caplog)) == 1)
        drive.check(prompts(2), 60)
        assert drive.group.stats.losses == 0
        line.close()
    context.destroy(linger=0)
    assert "dropped a message" in losses(caplog)[0]


def test_too_large_a_message_ends_the_attachment_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.engine.channel.MOST_BYTES_TO_ENGINE", 4000)
    with driving(ThreadHost(toys.too_many_nodes), "stream") as drive:
        drive.check(prompts(2), 40)
        until(lambda: drive.group.stats.losses >= 1)


# ---------------------------------------------------------------- nothing is left behind

ORPHAN = """
import sys, time
from queue import SimpleQueue
from paceline.engine.draft_group import DraftGroup
from tests.engine.draft_drive import QUICK, process, worker_pid
from tests.engine.draft_toys import spec
import tempfile
tempfile.tempdir = sys.argv[1]
group = DraftGroup(spec("stream"), process("ahead"), SimpleQueue(), QUICK)
group.start()
print(worker_pid(group._host), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_a_worker_dies_with_its_engine_and_leaves_nothing(folder: Path, stopped: bool) -> None:
    command = [sys.executable, "-c", textwrap.dedent(ORPHAN), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as engine:
        try:
            assert engine.stdout is not None
            worker = psutil.Process(int(engine.stdout.readline()))
            assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o700]
            if stopped:
                worker.suspend()
                until(lambda: worker.status() == psutil.STATUS_STOPPED)
        finally:
            engine.send_signal(signal.SIGKILL)
    gone, _ = psutil.wait_procs([worker], timeout=10)
    assert gone or worker.status() == psutil.STATUS_ZOMBIE
    until(lambda: list(folder.iterdir()) == [])


def test_closing_twice_and_closing_what_never_started() -> None:
    group = DraftGroup(spec(), ThreadHost(toys.ahead), SimpleQueue(), QUICK)
    group.close()
    group.close()
    group = DraftGroup(spec(), ThreadHost(toys.ahead), SimpleQueue(), QUICK)
    group.start()
    group.close()
    group.close()


def test_a_refusal_of_an_unknown_kind_is_an_engine_error() -> None:
    """A peer chooses no class of ours by name but for errors."""
    group = DraftGroup(spec(), ThreadHost(toys.ahead), SimpleQueue(), QUICK)
    attachment: Any = type("Attachment", (), {"began": 0.0})()
    for name in ("shown", "annotations", "nothing", "PacelineError"):
        with pytest.raises(draft_group.PacelineError, match="why"):
            group._refused(attachment, Refused(name, "why"))
    group.close()
    assert Refused in FOR_ENGINE
    assert Keys.new() != Keys.new()
