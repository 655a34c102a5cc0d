"""The drafter on another host: the same output over any distance, and nothing for strangers."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from paceline.cli import cli
from paceline.config import load_config
from paceline.core.work import DrafterJoined, DrafterLost
from paceline.engine.attachment import Patience
from paceline.engine.channel import Keys, Listener, read_key_file, write_key_file
from paceline.engine.draft_group import DraftGroup
from paceline.engine.draft_host import RemoteHost
from paceline.engine.draft_server import DraftServer, hosted
from paceline.engine.draft_worker import DraftWorker
from paceline.errors import ConfigError, EngineError, ModelError
from tests.engine import draft_toys as toys
from tests.engine.draft_drive import QUICK, Drive, driving, prompts
from tests.engine.draft_toys import spec

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from delayed_link import DelayedLink


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    write_key_file(path)
    return path


@contextmanager
def worker(keys: Keys, factory: Any = toys.ahead, port: str = "*") -> Iterator[int]:
    """A worker at a port of this host."""
    stop = threading.Event()
    listener = Listener(f"tcp://127.0.0.1:{port}", keys.worker, keys.engine_public)
    thread = threading.Thread(target=DraftWorker(listener, factory).run, args=(stop,))
    thread.start()
    try:
        yield int(listener.endpoint.rpartition(":")[2])
    finally:
        stop.set()
        thread.join()
        listener.close()


def remote(port: int, key_file: Path, **changes: Any) -> RemoteHost:
    return RemoteHost(f"tcp://127.0.0.1:{port}", key_file, **changes)


# ---------------------------------------------------------------- distance


@pytest.mark.parametrize("delay_ms", [0.2, 1, 5])
@pytest.mark.parametrize("ahead", ["off", "silent", "stream"])
def test_distance_does_not_change_the_output(ahead: str, delay_ms: float, key_file: Path) -> None:
    with ExitStack() as stack:
        port = stack.enter_context(worker(read_key_file(key_file)))
        link = stack.enter_context(closing(DelayedLink("127.0.0.1", port, delay_ms / 1000)))
        # Where the target waits for nobody, a pass must outlast the way there and back for guesses to count.
        pause_s = 0.004 if ahead != "stream" else 0.004 + 3 * delay_ms / 1000
        drive = stack.enter_context(driving(remote(link.port, key_file), ahead, pause_s=pause_s))
        drive.check(prompts(4), 60)
        assert drive.core.speculation.num_failed_drafts == 0
        assert drive.num_accepted > 0
        assert drive.group.stats.losses == 0


def test_a_broken_connection_is_made_again(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        port = stack.enter_context(worker(read_key_file(key_file)))
        link = DelayedLink("127.0.0.1", port, 0.0002)
        drive = stack.enter_context(driving(remote(link.port, key_file), "stream", pause_s=0.002))
        drive.check(prompts(2), 30)
        real = link.port
        link.close()
        drive.check(prompts(3), 100)
        (drive.seen(DrafterLost) or [drive.wait_for(DrafterLost)])
        drive.check(prompts(3), 30)
        stack.enter_context(closing(DelayedLink("127.0.0.1", port, 0.0002, listen=real)))
        drive.wait_for(DrafterJoined)
        before = drive.num_accepted
        drive.check(prompts(3), 100)
        assert drive.num_accepted > before
        assert drive.group.stats.losses == 1
        warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(warnings) == 1
        assert "decoding goes on without it" in warnings[0]


def test_a_worker_that_was_started_anew_is_found_again(key_file: Path) -> None:
    keys = read_key_file(key_file)
    with ExitStack() as stack:
        with worker(keys) as port:
            drive = stack.enter_context(driving(remote(port, key_file), "stream", pause_s=0.002))
            drive.check(prompts(2), 30)
        drive.check(prompts(2), 100)
        with worker(keys, port=str(port)):
            if not drive.seen(DrafterJoined):
                drive.wait_for(DrafterJoined)
            drive.check(prompts(2), 60)
        assert drive.group.stats.joins == 1


# ---------------------------------------------------------------- start


def start(host: RemoteHost, patience: Patience = QUICK) -> None:
    group = DraftGroup(spec(), host, SimpleQueue(), patience)
    try:
        group.start()
    finally:
        group.close()


def test_nobody_at_the_address_is_an_error_at_the_start(key_file: Path) -> None:
    with worker(read_key_file(key_file)) as port:
        pass
    with pytest.raises(EngineError, match=f"127.0.0.1:{port} cannot be reached: nobody listens there"):
        start(remote(port, key_file, connect_s=0.5))


def test_another_key_is_an_error_at_the_start(key_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_key_file(other)
    with worker(read_key_file(key_file)) as port:
        with pytest.raises(EngineError, match="the key is another"):
            start(remote(port, other))
        start(remote(port, key_file))


def test_something_else_at_the_address_is_an_error_at_the_start(key_file: Path) -> None:
    import http.server

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            with pytest.raises(EngineError, match=r"no Paceline draft worker|does not finish the handshake"):
                start(remote(other.server_port, key_file, connect_s=1.0))
        finally:
            other.shutdown()
            thread.join()


# ---------------------------------------------------------------- what a host decides for itself


def test_an_engine_names_no_file_of_the_workers_host() -> None:
    own = load_config(options={"draft": "here/draft", "draft_dtype": "int8", "threads": 3, "device": "cpu"})
    theirs = load_config(
        options={"model": "there/target", "draft": "there/draft", "threads": 64, "growth": "best-first"}
    )
    found = hosted(spec("stream", config=theirs, cores=(5,)), own)
    assert "there" not in msgspec.json.encode(found).decode()
    assert found.config.speculation.draft == "here/draft"
    assert found.config.speculation.draft_dtype == "int8"
    assert (found.config.threads, found.config.device, found.cores) == (3, "cpu", ())
    assert found.config.tree == theirs.tree
    assert found.ahead == "stream"


def test_another_vocabulary_is_refused(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = load_config(options={"draft": "ngram"})
    server = DraftServer(own, "tcp://127.0.0.1:*", read_key_file(key_file))
    monkeypatch.setattr(server, "_vocabulary", "mine")
    stop = threading.Event()
    thread = threading.Thread(target=server.run, args=(stop,))
    thread.start()
    host = RemoteHost(server.endpoint, key_file)
    try:
        with (
            pytest.raises(ModelError, match="different vocabularies"),
            closing(DraftGroup(spec(vocabulary="theirs"), host, SimpleQueue(), QUICK)) as group,
        ):
            group.start()
        with closing(DraftGroup(spec(vocabulary="mine"), host, SimpleQueue(), QUICK)) as group:
            assert group.start().name == "ngram"
    finally:
        stop.set()
        thread.join()


# ---------------------------------------------------------------- the command


def told(*arguments: str | Path) -> tuple[int, str]:
    found = CliRunner().invoke(cli, ["draft", *map(str, arguments)])
    return found.exit_code, found.output


def test_the_command_makes_keys_and_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    key = tmp_path / "key"
    assert told("--new-key", key)[0] == 0
    assert read_key_file(key)
    for arguments, reason in (
        (["--new-key", key], "exists already"),
        (["ngram"], "--key-file"),
        (["--key-file", key], "MODEL"),
        (["none", "--key-file", key], "nothing to serve"),
        (["ngram", "--key-file", key, "--listen", "7077"], "--listen"),
        (["ngram", "--key-file", key, "--listen", "ipc:///tmp/x"], "--listen"),
        (["ngram", "--key-file", key, "--threads", "-1"], "threads"),
        (["ngram", "--key-file", tmp_path / "nowhere"], "--new-key"),
    ):
        code, output = told(*arguments)
        assert (code, reason in output) == (2, True), output
    code, output = told(tmp_path / "no-model", "--key-file", key)
    assert code == 1
    assert "no-model" in output
    key.chmod(0o644)
    assert "chmod 600" in told("ngram", "--key-file", key)[1]


@contextmanager
def command(key_file: Path, listen: str, *prefix: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running `paceline draft` and the address it tells."""
    arguments = ["draft", "ngram", "--key-file", str(key_file), "--listen", listen]
    whole = [*prefix, sys.executable, "-m", "paceline", *arguments]
    with subprocess.Popen(whole, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            if prefix:
                yield process, ""
            else:
                told = process.stderr.readline()
                assert "drafting with ngram at" in told
                yield process, told.split(" at ")[1].split(";")[0]
        finally:
            process.kill()


def speculates(drive: Drive) -> None:
    """The n-gram drafter guesses right where a text repeats itself; the toy target's does not, so any guess
    will do."""
    drive.check({"a": [1, 2, 3, 4] * 8, "b": [5, 6] * 9}, 60)
    assert drive.core.speculation.num_drafted_nodes > 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_an_engine_and_ends_when_told(key_file: Path, how: int) -> None:
    with command(key_file, "tcp://127.0.0.1:*") as (process, endpoint):
        group_spec = spec("stream", config=load_config(options={"placement": "disaggregated"}))
        with driving(RemoteHost(endpoint, key_file), "stream", group_spec=group_spec) as drive:
            speculates(drive)
        process.send_signal(how)
        assert process.wait(timeout=10) == 0


# ---------------------------------------------------------------- another network


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    end = time.perf_counter() + limit_s
    while not condition():
        assert time.perf_counter() < end
        time.sleep(0.02)


@pytest.fixture
def network() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process that holds a network namespace of its own, and the address of its end of a cable to it."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    if subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make network namespaces")
    here, there = f"pl{os.getpid() % 10**6}a", f"pl{os.getpid() % 10**6}b"
    net = f"10.213.{os.getpid() // 64 % 256}.{os.getpid() % 64 * 4}"
    first, second = (f"{net.rpartition('.')[0]}.{int(net.rpartition('.')[2]) + at}" for at in (1, 2))
    with subprocess.Popen(["unshare", "-n", "sleep", "120"]) as holder:
        try:
            own = os.readlink("/proc/self/ns/net")
            _until(lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != own)
            try:
                _ip(
                    "link",
                    "add",
                    "dev",
                    here,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    there,
                    "netns",
                    str(holder.pid),
                )
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no cable between networks: {error.stderr.decode().strip()}")
            inside = ["nsenter", "-t", str(holder.pid), "-n"]
            _ip("addr", "add", f"{first}/30", "dev", here)
            _ip("link", "set", here, "up")
            subprocess.run([*inside, "ip", "addr", "add", f"{second}/30", "dev", there], check=True)
            subprocess.run([*inside, "ip", "link", "set", there, "up"], check=True)
            yield holder, second
        finally:
            holder.kill()  # the cable goes with the network


def test_a_worker_in_another_network(network: tuple[subprocess.Popen[bytes], str], key_file: Path) -> None:
    holder, address = network
    inside = ["nsenter", "-t", str(holder.pid), "-n"]
    endpoint = f"tcp://{address}:7077"
    with command(key_file, endpoint, *inside) as (process, _):
        assert process.stderr is not None
        assert endpoint in process.stderr.readline()
        group_spec = spec("stream", config=load_config(options={"placement": "disaggregated"}))
        patience = Patience(silence_s=1.0, first_pause_s=0.02)
        with driving(
            RemoteHost(endpoint, key_file), "stream", pause_s=0.002, patience=patience, group_spec=group_spec
        ) as drive:
            speculates(drive)
            assert drive.group.stats.losses == 0
            _cable(holder, "down")
            drive.check(prompts(2), 30)
            (drive.seen(DrafterLost) or [drive.wait_for(DrafterLost)])
            _cable(holder, "up")
            drive.wait_for(DrafterJoined)
            speculates(drive)


def _cable(holder: subprocess.Popen[bytes], state: str) -> None:
    """Pulled or put back, at the far end: no packet says so."""
    inside = ["nsenter", "-t", str(holder.pid), "-n"]
    links = subprocess.run([*inside, "ip", "-o", "link"], check=True, capture_output=True, text=True).stdout
    name = next(line.split(": ")[1].split("@")[0] for line in links.splitlines() if ": pl" in line)
    subprocess.run([*inside, "ip", "link", "set", name, state], check=True)


def test_keys_are_checked_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--new-key"):
        remote(1, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        RemoteHost("host:7077", tmp_path / "nowhere")
