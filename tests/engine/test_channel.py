"""The wire: what crosses it comes out as it went in, and nobody without the key gets or gives anything."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import load_config
from paceline.core.drafting import DrafterNeeds
from paceline.core.params import SamplingParams
from paceline.core.work import (
    AdvanceDrafts,
    Announcement,
    DraftDone,
    DraftItem,
    DraftNodes,
    GrowDrafts,
    NodesDrafted,
    Proposal,
    Release,
    RunTarget,
)
from paceline.engine import draft_messages
from paceline.engine.channel import (
    Address,
    Context,
    Keys,
    Line,
    Listener,
    Outlet,
    check_endpoint,
    read_key_file,
    write_key_file,
)
from paceline.engine.draft_messages import (
    FOR_ENGINE,
    FOR_WORKER,
    Beat,
    Bye,
    Codec,
    DraftGroupSpec,
    Fault,
    Hello,
    Malformed,
    Ping,
    Ready,
    Refused,
    fingerprint,
)
from paceline.errors import ConfigError, EngineError
from tests.engine.draft_toys import spec

PARAMS = SamplingParams(
    temperature=0.7,
    top_k=2**64 - 1,
    logit_bias={3: -1.5, 2**40: 2.0},
    bad_words=["no", [1, 2]],
    stop=["end", "."],
    stop_token_ids=[2],
    seed=-(2**63),
)
ITEM = DraftItem("a request", 0, (1, 2, 2**31 - 1), 64, 8, Announcement(3, PARAMS), 7)
NODES = DraftNodes("a request", 7, 3, 0, (4, 5), (-3, 0), (-0.25, -1e-30))
MESSAGES = [
    Hello(5, msgspec.Raw(msgspec.msgpack.encode(spec("silent", cores=(1, 3))))),
    Ping(),
    Bye(),
    GrowDrafts(2**40, (ITEM,)),
    AdvanceDrafts((ITEM, replace(ITEM, start=3, announcement=None))),
    Release(("a", "b")),
    Ready(DrafterNeeds("toy", 1024, True)),
    Refused("ModelError", "it is not there", busy=True),
    Beat(1.5, 3, 0.25, 2.0),
    Fault("a hole"),
    DraftDone(3, (Proposal("a", 5, (1,), (-1,), (-0.5,)), Proposal("b", 1, error="why")), 0.125),
    NodesDrafted((NODES,), 0.001),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_messages_come_out_as_they_went_in(message: Any) -> None:
    codec = Codec((*FOR_WORKER, *FOR_ENGINE))
    assert codec.decode(codec.encode(message, 2**62 - 1, 4)) == (2**62 - 1, 4, message)


def test_each_side_reads_only_what_it_may_be_sent() -> None:
    """A worker cannot answer for the target, and an engine cannot be made to serve one."""
    worker, engine = Codec(FOR_WORKER), Codec(FOR_ENGINE)
    for message in MESSAGES:
        reader, other = (worker, engine) if isinstance(message, FOR_WORKER) else (engine, worker)
        reader.decode(other.encode(message, 1))
        with pytest.raises(Malformed, match="unknown kind"):
            other.decode(reader.encode(message, 1))
    with pytest.raises(Malformed, match="RunTarget"):
        worker.decode(engine.encode(RunTarget(1, ()), 1))


def test_a_spec_comes_out_as_it_went_in() -> None:
    whole = spec("silent", ahead_passes=3, eos_token_ids=(2, 7), vocabulary="x", cores=(0,), threads=2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(whole), type=DraftGroupSpec) == whole


@given(st.binary(max_size=300))
def test_no_bytes_crash_the_reader(junk: bytes) -> None:
    with pytest.raises(Malformed):
        Codec(FOR_WORKER).decode(junk)


@given(st.data())
def test_no_damage_to_a_message_crashes_the_reader(data: st.DataObject) -> None:
    codec = Codec((*FOR_WORKER, *FOR_ENGINE))
    frame = bytearray(codec.encode(data.draw(st.sampled_from(MESSAGES)), 1))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with suppress(Malformed):
        codec.decode(bytes(frame[: data.draw(st.integers(0, len(frame)))]))


def test_a_value_that_its_own_class_refuses_is_malformed() -> None:
    codec = Codec(FOR_WORKER)
    params = SamplingParams(temperature=0.5)
    object.__setattr__(params, "temperature", -1.0)
    item = replace(ITEM, announcement=Announcement(3, params))
    with pytest.raises(Malformed, match="temperature"):
        codec.decode(codec.encode(AdvanceDrafts((item,)), 1))


def test_what_is_too_large_is_malformed() -> None:
    with pytest.raises(Malformed, match="bytes"):
        Codec(FOR_WORKER, 100).decode(bytes(101))
    assert draft_messages.MOST_BYTES_TO_ENGINE <= 2**20


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0], ids=str)
def test_a_time_that_is_none_is_malformed(number: float) -> None:
    codec = Codec(FOR_ENGINE)
    for message in (
        DraftDone(1, (), number),
        NodesDrafted((), number),
        Beat(number, 0, 0.0, 0.0),
        Beat(0.0, 0, number, 0.0),
    ):
        with pytest.raises(Malformed, match="seconds"):
            codec.decode(codec.encode(message, 1))


@pytest.mark.parametrize("score", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_a_score_that_no_recording_can_hold_is_malformed(score: float) -> None:
    codec = Codec(FOR_ENGINE)
    for message in (
        NodesDrafted((replace(NODES, scores=(-0.25, score)),)),
        DraftDone(1, (Proposal("a", 5, (1,), (-1,), (score,)),)),
    ):
        with pytest.raises(Malformed, match="not finite"):
            codec.decode(codec.encode(message, 1))


def test_a_peers_texts_command_no_terminal() -> None:
    codec = Codec(FOR_ENGINE)
    bad, good = "\x1b[2Jgone\r\n\x07\u202e", " [2Jgone    "
    for message in (Ready(DrafterNeeds(bad)), Refused("EngineError", bad), Fault(bad)):
        found = codec.decode(codec.encode(message, 1))[2]
        assert good == (found.needs.name if isinstance(found, Ready) else found.reason)
    assert len(codec.decode(codec.encode(Fault("x" * 10**5), 1))[2].reason) == 2000


def test_another_host_is_told_what_it_must_know_and_nothing_else() -> None:
    options = {"model": "a/secret/place", "draft": "another/one", "threads": 7, "seed": 5, "exact": True}
    groups = {"draft_key_file": "the/key", "draft_address": "tcp://a:1", "target_devices": "0"}
    more = {"mode": "swiftspec", "tree_width": 3, "num_speculative_tokens": 6}
    sent = spec("silent", config=load_config(options=options | groups | more), cores=(3,), threads=7).abroad()
    written = msgspec.json.encode(sent).decode()
    assert not [word for word in ("secret", "another", "the/key", "tcp://a:1") if word in written]
    assert (sent.cores, sent.threads, sent.config.threads, sent.config.seed) == ((), 0, 0, None)
    kept = sent.config
    assert (kept.groups.mode, kept.tree.tree_width, kept.exact) == ("swiftspec", 3, True)
    assert kept.speculation.num_speculative_tokens == 6


def test_fingerprints_tell_vocabularies_apart() -> None:
    assert fingerprint({"a": 0, "b": 1}) == fingerprint({"b": 1, "a": 0})
    assert fingerprint({"a": 0, "b": 1}) != fingerprint({"a": 1, "b": 0})


# ---------------------------------------------------------------- keys and addresses


def test_a_key_file_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_key_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    keys = read_key_file(path)
    assert keys == read_key_file(path)
    assert keys.worker.decode() not in repr(keys)
    with pytest.raises(ConfigError, match="exists already"):
        write_key_file(path)
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_key_file(path)


@pytest.mark.parametrize("text", ["", "secret", "paceline draft key 1\nworker a\nengine b\n", "\xff\xfe"])
def test_damaged_key_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "key"
    path.write_text(text, encoding="latin-1")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="--new-key"):
        read_key_file(path)
    with pytest.raises(ConfigError, match="--new-key"):
        read_key_file(tmp_path / "nowhere")


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:7077", "tcp://[::1]:1", "tcp://host.name:65535"])
def test_addresses(endpoint: str) -> None:
    check_endpoint(endpoint, "--listen")


@pytest.mark.parametrize(
    "endpoint", ["", "7077", "tcp://host", "tcp://::1:7077", "udp://a:1", "tcp://a:65536"]
)
def test_what_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--listen"):
        check_endpoint(endpoint, "--listen")


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        keys = Keys.new()
        with pytest.raises(EngineError, match=endpoint):
            Listener(endpoint, keys.worker, keys.engine_public)


# ---------------------------------------------------------------- strangers

KEYS = Keys.new()


@pytest.fixture
def listener() -> Iterator[Listener]:
    with closing(Listener("tcp://127.0.0.1:*", KEYS.worker, KEYS.engine_public)) as listener:
        yield listener


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)


def answered(listener: Listener, line: Line, frame: bytes = b"hello", within_s: float = 5.0) -> bool:
    """Whether `frame` arrives and an answer comes back."""
    line.send(frame)
    end = time.perf_counter() + within_s
    while time.perf_counter() < end and line.broken is None:
        for address, got in listener.receive(0.02):
            assert got == frame
            listener.send(address, b"answer")
        if line.receive(0.02) == [b"answer"]:
            return True
    return False


def test_without_an_authenticator_nobody_comes_in(listener: Listener) -> None:
    """What libzmq calls the enforced ZAP domain."""
    assert listener._socket.getsockopt(zmq.ZAP_ENFORCE_DOMAIN) == 1


def test_the_right_key_opens(listener: Listener, context: Context) -> None:
    with closing(Line(context, Address(listener.endpoint, KEYS), 2.0)) as line:
        assert answered(listener, line)


@pytest.mark.parametrize(
    "keys",
    [Keys.new(), Keys(KEYS.worker, Keys.new().engine), Keys(Keys.new().worker, KEYS.engine)],
    ids=["other keys", "an unknown engine", "another worker"],
)
def test_a_wrong_key_gets_nothing_and_is_told(listener: Listener, context: Context, keys: Keys) -> None:
    with closing(Line(context, Address(listener.endpoint, keys), 2.0)) as line:
        assert not answered(listener, line)
        assert "key" in (line.broken or "")
    with closing(Line(context, Address(listener.endpoint, KEYS), 2.0)) as line:
        assert answered(listener, line), "the right key still opens"


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ, zmq.PUB, zmq.ROUTER])
def test_plain_zeromq_gets_nothing(listener: Listener, context: Context, kind: int) -> None:
    with closing(context.socket(kind)) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(listener.endpoint)
        if kind != zmq.ROUTER:
            stranger.send(b"hello")
        assert listener.receive(0.3) == []
        assert stranger.poll(0) in (0, zmq.POLLOUT)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4096, b"\0" * 64, os.urandom(65536)], ids=len
)
def test_garbage_on_the_port_does_no_harm(listener: Listener, context: Context, garbage: bytes) -> None:
    host, port = listener.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        with suppress(ConnectionError):
            stranger.sendall(garbage)
        assert listener.receive(0.2) == []
        with closing(Line(context, Address(listener.endpoint, KEYS), 2.0)) as line:
            assert answered(listener, line), "the right key still opens"


def test_what_is_on_the_wire_cannot_be_read(context: Context) -> None:
    """A relay in the middle sees neither a token nor a word."""
    secret = b"a prompt nobody else should read" * 8
    with closing(Listener("tcp://127.0.0.1:*", KEYS.worker, KEYS.engine_public)) as listener:
        port = int(listener.endpoint.rpartition(":")[2])
        with socket.create_server(("127.0.0.1", 0)) as tap:
            outlet = Outlet(context, Address(f"tcp://127.0.0.1:{tap.getsockname()[1]}", KEYS))
            outlet.send(secret)
            seen = _relay(tap, port, lambda: listener.receive(0.0))
            outlet.close()
    assert len(seen) > len(secret)
    assert secret[:16] not in seen


def _relay(tap: socket.socket, port: int, received: Any) -> bytes:
    """Passes bytes on both ways until `received` has something."""
    seen = b""
    near, _ = tap.accept()
    with near, socket.create_connection(("127.0.0.1", port)) as far:
        near.settimeout(0.02)
        far.settimeout(0.02)
        for _ in range(200):
            for source, sink in ((near, far), (far, near)):
                try:
                    data = source.recv(65536)
                except TimeoutError:
                    continue
                seen += data
                sink.sendall(data)
            if received():
                break
    return seen


def test_a_line_notices_that_its_other_end_is_gone(context: Context) -> None:
    listener = Listener("tcp://127.0.0.1:*", KEYS.worker, KEYS.engine_public)
    with closing(Line(context, Address(listener.endpoint, KEYS), 2.0)) as line:
        assert answered(listener, line)
        listener.close()
        end = time.perf_counter() + 5
        while line.broken is None and time.perf_counter() < end:
            line.receive(0.05)
        assert line.broken == "the connection broke"


def test_what_nobody_would_take_is_not_sent(listener: Listener) -> None:
    assert not listener.send(b"\0\0\0\0\1", b"to nobody")
