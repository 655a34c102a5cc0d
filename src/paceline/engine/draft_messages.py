"""What engine and draft worker tell each other, and its written form: msgpack of typed values, never code."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isfinite, prod
from typing import Any, Literal

import msgspec

from paceline import __version__
from paceline.config import Config, GroupsConfig, SpeculationConfig
from paceline.core.drafting import DrafterNeeds
from paceline.core.scheduler import Limits
from paceline.core.work import AdvanceDrafts, DraftDone, GrowDrafts, NodesDrafted, Release
from paceline.drafters.service import AheadMode

PROTOCOL = 4
"""Raised with every change of a message that crosses; both sides must speak the same."""

MOST_BYTES = 64 * 2**20
"""Of one message to a worker: above what re-announcing a full batch of long contexts takes."""
MOST_BYTES_TO_ENGINE = 2**20
"""Of one message to an engine: some sixty thousand nodes, far more than a pass grows."""
MOST_ALLOWED_S = 120.0
"""Seconds that loading, the first passes and the reading of prompts may keep a worker's loop from giving a
sign; whatever it promises beyond is not believed."""
FEATURE_BYTES = 16 * 2**20
"""Of hidden states in one message: well below `MOST_BYTES`."""
_MOST_CHARACTERS = 2000

_PADDING_TOKEN = re.compile(r"\[PAD\d*\]")
"""What llama.cpp's converter fills a vocabulary up with."""


class DraftGroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All that a draft worker must know of the engine it works for.

    vocabulary: fingerprint of the target's tokenizer, empty = not checked.
    ahead: what the drafter does when nothing is asked of it. "stream": grows its trees and sends the nodes;
    "silent": after each answer at most `ahead_passes` passes whose nodes it keeps (SwiftSpec, arXiv
    2506.11309, Algorithm 1); "off": nothing.
    cores: that the worker is pinned to, empty = any.  threads: 0 = all of them.
    """

    config: Config
    limits: Limits
    target_vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    vocabulary: str = ""
    ahead: AheadMode = "stream"
    ahead_passes: int = 4
    cores: tuple[int, ...] = ()
    threads: int = 0

    def abroad(self) -> DraftGroupSpec:
        """For another host: without what that host decides for itself, and what it need not know."""
        config, default = self.config, SpeculationConfig()
        speculation = msgspec.structs.replace(
            config.speculation, draft=default.draft, draft_dtype=default.draft_dtype, suffix_cache_file=""
        )
        groups = GroupsConfig(placement=config.groups.placement, mode=config.groups.mode)
        kept = Config(exact=config.exact, speculation=speculation, tree=config.tree, groups=groups)
        return msgspec.structs.replace(self, config=kept, cores=(), threads=0)


# ---------------------------------------------------------------- engine to worker


class Hello(msgspec.Struct, frozen=True):
    """Begins an attachment: the worker forgets what it knew. The spec is read only once `protocol` is known
    to be ours. engine: the same in all attachments of one engine, which may replace one of its own."""

    engine: int
    spec: msgspec.Raw
    protocol: int = PROTOCOL
    version: str = __version__


class Ping(msgspec.Struct, frozen=True):
    """The engine is there."""


class TargetFeatures(msgspec.Struct, frozen=True):
    """Hidden states of the target at the request's positions from `start` on, which it has computed.

    shape: positions, places in the residual stream, hidden size.  data: row by row, in this machine's byte
    order.  generation: of the request's announcement, as in `DraftItem`.
    """

    request_id: str
    generation: int
    start: int
    dtype: Literal["float32", "bfloat16"]
    shape: tuple[int, int, int]
    data: bytes


class Bye(msgspec.Struct, frozen=True):
    """Ends the attachment."""


# ---------------------------------------------------------------- worker to engine


class Ready(msgspec.Struct, frozen=True):
    """The drafter is loaded and knows no request."""

    needs: DrafterNeeds


class Refused(msgspec.Struct, frozen=True):
    """No attachment. error: name of a class in `paceline.errors`. busy: another engine has the worker."""

    error: str
    reason: str
    busy: bool = False


class Beat(msgspec.Struct, frozen=True):
    """The worker's loop is alive. allow_s: how long it may be silent from here on.  received: number of the
    last packet of work taken in.  busy_s, up_s: seconds of work, and of the attachment, so far.  by_distance:
    of a head, guesses by how many of its own outputs they are made from: judged, and right."""

    allow_s: float
    received: int
    busy_s: float
    up_s: float
    by_distance: dict[int, tuple[int, int]] = {}


class Fault(msgspec.Struct, frozen=True):
    """The drafter failed, or what arrived cannot be followed: the attachment is over."""

    reason: str


# ---------------------------------------------------------------- the written form


class Packet(msgspec.Struct, frozen=True, array_like=True):
    """attachment: named by the engine with its Hello; whatever carries another is dropped.
    number: of work, counted from 0 within the attachment, so that a lost packet is noticed."""

    kind: str
    attachment: int
    number: int
    body: msgspec.Raw


class Malformed(Exception):
    """A frame that is none of ours; the text says why."""


class Codec:
    """Reads the kinds that one side may be sent, in frames of up to `most_bytes`, and writes any."""

    def __init__(self, kinds: Iterable[type[Any]], most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._packets = msgspec.msgpack.Decoder(Packet)
        self._bodies = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in kinds}

    def encode(self, message: Any, attachment: int, number: int = 0) -> bytes:
        body = msgspec.Raw(self._encoder.encode(message))
        return self._encoder.encode(Packet(type(message).__name__, attachment, number, body))

    def decode(self, frame: bytes) -> tuple[int, int, Any]:
        """(attachment, number, message). Raises Malformed, whatever the bytes."""
        if len(frame) > self._most_bytes:
            raise Malformed(f"a message of {len(frame)} bytes")
        try:
            packet = self._packets.decode(frame)
            decoder = self._bodies.get(packet.kind)
            if decoder is None:
                raise Malformed(f"a message of the unknown kind {packet.kind[:40]!r}")
            return packet.attachment, packet.number, _taken_in(decoder.decode(packet.body))
        except Malformed:
            raise
        # Fields are checked by their own classes, which raise their own errors.
        except Exception as error:  # noqa: BLE001
            cause = printable(f"{type(error).__name__}: {error}")
            raise Malformed(f"a message that cannot be read ({cause})") from None


def _taken_in(message: Any) -> Any:
    """The message with texts that are safe to show. Raises Malformed for numbers that would not survive a
    recording (JSON has neither infinity nor NaN), or that make no sense of a time."""
    match message:
        case Ready(needs=needs):
            return Ready(replace(needs, name=printable(needs.name)))
        case Refused() | Fault():
            return msgspec.structs.replace(message, reason=printable(message.reason))
        case Beat():
            _check_seconds(message.allow_s, message.busy_s, message.up_s)
        case DraftDone():
            _check_seconds(message.seconds)
            _check_scores(score for each in message.proposals for score in each.scores)
        case TargetFeatures():
            _check_size(message)
        case NodesDrafted():
            _check_seconds(message.seconds)
            _check_scores(score for each in message.grown for score in each.scores)
    return message


def printable(text: str) -> str:
    """A peer's text without what a terminal would obey, and of bounded length."""
    return "".join(sign if sign.isprintable() else " " for sign in text[:_MOST_CHARACTERS])


def _check_seconds(*numbers: float) -> None:
    if not all(isfinite(number) and number >= 0 for number in numbers):
        raise Malformed(f"a message with the seconds {', '.join(map(str, numbers))}")


def _check_size(features: TargetFeatures) -> None:
    size = 2 if features.dtype == "bfloat16" else 4
    if min(features.shape) < 1 or prod(features.shape) * size != len(features.data):
        raise Malformed(f"features of shape {features.shape} in {len(features.data)} bytes")


def _check_scores(scores: Iterable[float]) -> None:
    if not all(map(isfinite, scores)):
        raise Malformed("a message with a score that is not finite")


FOR_WORKER: tuple[type[Any], ...] = (Hello, Ping, Bye, GrowDrafts, AdvanceDrafts, Release, TargetFeatures)
FOR_ENGINE: tuple[type[Any], ...] = (Ready, Refused, Beat, Fault, DraftDone, NodesDrafted)


def fingerprint(vocabulary: Mapping[str, int]) -> str:
    """Of a tokenizer's texts and ids: equal where `loading.check_same_vocabulary` finds no difference."""
    known = ((index, token) for token, index in vocabulary.items() if not _PADDING_TOKEN.fullmatch(token))
    written = msgspec.json.encode(sorted(known))
    return hashlib.sha256(written).hexdigest()
