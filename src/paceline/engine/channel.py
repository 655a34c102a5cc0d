"""The wire between engine and draft worker: ZeroMQ sockets that speak to nobody without the right key.

The worker listens, the engine connects, within a machine (ipc) and across hosts (tcp) alike. Both sides prove
themselves with CURVE (RFC 26/ZMTP-CURVE) and everything is encrypted; there is no mode without.
"""

from __future__ import annotations

import os
import re
import stat
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from paceline.engine.draft_messages import MOST_BYTES, MOST_BYTES_TO_ENGINE
from paceline.errors import ConfigError, EngineError, shown

Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]

_WAITING_MESSAGES = 4096
"""Messages that a socket holds for a peer that does not read, and that one call takes in at most."""
_HANDSHAKE_MS = 10_000
_DOMAIN = "paceline"
_HEADER = "paceline draft key 1"
_ENDPOINT = re.compile(r"tcp://(\[[0-9a-fA-F:.%\w]+\]|[^\s\[\]:/]+):(\d{1,5}|\*)|ipc://.+")


# ---------------------------------------------------------------- keys


@dataclass(frozen=True)
class Keys:
    """One secret for either side, and whoever has both can be either. Z85 text, 40 characters each."""

    worker: bytes = field(repr=False)
    engine: bytes = field(repr=False)

    @classmethod
    def new(cls) -> Keys:
        return cls(zmq.curve_keypair()[1], zmq.curve_keypair()[1])

    @property
    def worker_public(self) -> bytes:
        return zmq.curve_public(self.worker)

    @property
    def engine_public(self) -> bytes:
        return zmq.curve_public(self.engine)


def write_key_file(path: Path) -> None:
    """Makes new keys in a file that only its owner can read. Raises ConfigError if it exists already."""
    keys = Keys.new()
    text = f"{_HEADER}\nworker {keys.worker.decode()}\nengine {keys.engine.decode()}\n"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} exists already: choose another name, or delete it first.") from None
    except OSError as error:
        raise ConfigError(f"cannot write the key file {path}: {error.strerror}.") from None
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(text)


def read_key_file(path: Path) -> Keys:
    """Raises ConfigError if the file is damaged, or open to others than its owner."""
    try:
        with path.open(encoding="ascii") as file:
            status = os.fstat(file.fileno())
            text = file.read(1024)
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        raise ConfigError(
            f"cannot read the key file {path}: {error.strerror}. `paceline draft --new-key FILE` makes one; "
            "both hosts need the same."
        ) from None
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"the key file {path} can be read by others than its owner: chmod 600 it, or make a new one if "
            "others may have read it."
        )
    match = re.fullmatch(rf"{_HEADER}\nworker (\S{{40}})\nengine (\S{{40}})\n", text)
    try:
        if match is None:
            raise ValueError
        keys = Keys(match[1].encode(), match[2].encode())
        _ = keys.worker_public, keys.engine_public
    except (ValueError, zmq.ZMQError):
        raise ConfigError(
            f"{path} is not a draft key file: make one with `paceline draft --new-key FILE`."
        ) from None
    return keys


def check_endpoint(endpoint: str, key: str) -> None:
    """Raises ConfigError unless it is of a form that ZeroMQ takes. key: the option's name in the message."""
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or (match[2] and match[2] != "*" and int(match[2]) > 65535):
        raise ConfigError(
            f"{key} is {shown(endpoint)}: write tcp://HOST:PORT, with an IPv6 address in brackets."
        )


# ---------------------------------------------------------------- the worker's end


class _OnlyThisKey:
    """For ZeroMQ's authenticator: lets one public key in."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002 - its protocol
        return key == self._public


class Listener:
    """Messages come with the sender's address, which is where answers go."""

    def __init__(self, endpoint: str, secret: bytes, engine_public: bytes) -> None:
        """Raises EngineError when it cannot listen there."""
        self._context: Context = zmq.Context()
        self._guard = ThreadAuthenticator(self._context)
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            # Without its authenticator a CURVE server lets every key in: it is there before the port opens.
            self._guard.start()
            self._guard.configure_curve_callback(_DOMAIN, _OnlyThisKey(engine_public))
            _prepare(self._socket, endpoint, MOST_BYTES)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
            self._socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())
            with suppress(zmq.ZMQError):  # libzmq before 4.3.2 does not know the option
                self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise EngineError(
                f"cannot listen at {endpoint}: {error.strerror}. Choose another port, or end what has it."
            ) from None
        self.endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()  # type: ignore[union-attr]

    def receive(self, timeout_s: float) -> list[tuple[bytes, bytes]]:
        """All that is waiting: (address, frame); waits for the first up to `timeout_s`."""
        if not self._socket.poll(max(0, int(timeout_s * 1000))):
            return []
        return [(parts[0], parts[1]) for parts in _waiting(self._socket) if len(parts) == 2]

    def send(self, address: bytes, frame: bytes) -> bool:
        """False when nobody is there any more, or does not read."""
        try:
            self._socket.send_multipart((address, frame), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self._socket.close(linger=200)  # for a last word, such as why an attachment was refused
        self._guard.stop()
        self._context.term()


# ---------------------------------------------------------------- the engine's end


@dataclass(frozen=True)
class Address:
    endpoint: str
    keys: Keys


class Outlet:
    """A connection to send on, to be used by one thread at a time."""

    def __init__(self, context: Context, address: Address) -> None:
        self._socket = context.socket(zmq.DEALER)
        _prepare(self._socket, address.endpoint, MOST_BYTES_TO_ENGINE)
        _authenticate(self._socket, address)
        self._socket.connect(address.endpoint)

    def send(self, frame: bytes) -> bool:
        """False when too much is waiting to be sent."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self._socket.close(linger=0)


class Line:
    """A connection to send and receive on that notices when its other end is gone or stops breathing.

    broken: why it can no longer be used.  trouble: why it does not come about, as yet.
    """

    def __init__(self, context: Context, address: Address, silence_s: float) -> None:
        """silence_s: after which a process that is stopped, or a host that is gone, counts as lost: libzmq's
        own thread answers on the other side, so that no work there delays it."""
        self.broken: str | None = None
        self.trouble: str | None = None
        self.made = False
        self.heard_at = time.perf_counter()
        self._failures = 0
        self._socket = context.socket(zmq.DEALER)
        _prepare(self._socket, address.endpoint, MOST_BYTES_TO_ENGINE)
        _authenticate(self._socket, address)
        silence_ms = max(10, int(silence_s * 1000))
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, max(5, silence_ms // 4))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence_ms)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_CONNECTED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(address.endpoint)

    def send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self, timeout_s: float) -> list[bytes]:
        """All that is waiting; waits for the first up to `timeout_s`."""
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        frames = (
            [parts[0] for parts in _waiting(self._socket) if len(parts) == 1] if self._socket in ready else []
        )
        if frames:
            self.heard_at = time.perf_counter()
        if self._monitor in ready:
            self._look()
        return frames

    def close(self, linger_s: float = 0.0) -> None:
        """linger_s: for what was sent last."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(linger_s * 1000))

    def _look(self) -> None:
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.made, self.heard_at = True, time.perf_counter()
            elif event == zmq.EVENT_CONNECTED:
                self.trouble = "it does not finish the handshake"
            elif self.made:
                self.broken = "the connection broke"
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self.broken = "it refuses the key"
            else:
                # The end whose own key is not the one expected closes the connection and gives no reason.
                self._failures += 1
                self.trouble = "it ends the handshake: the key is another, or it is no Paceline draft worker"
                if self._failures >= 3:
                    self.broken = self.trouble


def _prepare(socket: Socket, endpoint: str, most_bytes: int) -> None:
    """most_bytes: of a message that comes in."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
    socket.setsockopt(zmq.SNDHWM, _WAITING_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, _WAITING_MESSAGES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))


def _authenticate(socket: Socket, address: Address) -> None:
    socket.setsockopt(zmq.CURVE_SERVERKEY, address.keys.worker_public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, address.keys.engine)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, address.keys.engine_public)


def _waiting(socket: Socket) -> list[list[bytes]]:
    messages: list[list[bytes]] = []
    while len(messages) < _WAITING_MESSAGES:
        try:
            messages.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            break
    return messages
