"""Acceptance traces: what every drafter would have had accepted after every token of recorded answers.

The file is JSONL. Ours begins with a header, `{"format": "paceline-acceptance", "version": 1, ...}`; those
published with arXiv 2601.11580 have none. Every other line is a request:

    {"id", "prompt_token_ids", "generated_token_ids", "acc_<drafter>": {"acc_len": [...]}, ...}

`acc_len[i]` is how many tokens a step emits, the bonus token included, when i tokens are generated already;
`acc_len[0]` stands for the token that comes with the prompt. A drafter may also have `confidence`, per
position the log-probability of each guess, and `top`, per position the `[token, log-probability]` of each
candidate for the next token.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.errors import ConfigError, shown
from paceline.jsonl import numbered_lines

FORMAT = "paceline-acceptance"
VERSION = 1
MODEL_FREE = ("ngram",)
"""Drafters whose guesses follow from the text alone: their record can only be of this very text."""

_PREFIX = "acc_"
_MOST_TOKEN = 2**31 - 1


@dataclass(frozen=True, slots=True)
class DrafterTrace:
    """accepted: tokens that a step emits, by how many are generated; each at least 1.

    confidence, top: per position, log-probabilities of the guesses, and candidates with theirs.
    """

    accepted: tuple[int, ...]
    confidence: tuple[tuple[float, ...], ...] | None = None
    top: tuple[tuple[tuple[int, float], ...], ...] | None = None


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One answer, greedy or sampled with a seed, and what each drafter was worth along it."""

    request_id: str
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    drafters: Mapping[str, DrafterTrace] = field(default_factory=dict)

    def aligned(self, name: str) -> bool:
        """Whether the drafter was recorded on as many tokens as the output has. Of the published files 18 to
        78 % of the requests are not: the head was recorded in another run, whose text differs a little."""
        trace = self.drafters.get(name)
        return trace is not None and len(trace.accepted) == len(self.output)


@dataclass(frozen=True, slots=True)
class TraceSet:
    """The requests of one file. name: the file's, without its endings. header: None in published files."""

    name: str
    header: Mapping[str, object] | None
    requests: tuple[RequestTrace, ...]

    @property
    def drafters(self) -> tuple[str, ...]:
        """All that any request has a record of, in the order they are met."""
        return tuple(dict.fromkeys(name for request in self.requests for name in request.drafters))


def read_traces(path: Path) -> TraceSet:
    """The traces of a JSONL file, `.gz` or not.

    In a file with our header every drafter's record is as long as the output. Published files have records of
    a head that differ in length (`RequestTrace.aligned`); those of a drafter without a model may not.

    Raises ConfigError naming file, line and remedy.
    """
    header: Mapping[str, object] | None = None
    requests = []
    first = True
    for number, line in numbered_lines(path, "acceptance traces"):
        where = f"{path}, line {number}"
        record = _object(line, where)
        if "format" in record:
            if not first:
                raise ConfigError(f"{where} is a second header: split the file there.")
            header = _header(record, where)
        else:
            requests.append(_request(record, where, own=header is not None))
        first = False
    if not requests:
        raise ConfigError(f"{path} holds no request: record some, or give a file with one per line.")
    return TraceSet(path.name.removesuffix(".gz").removesuffix(".jsonl"), header, tuple(requests))


def write_traces(path: Path, header: Mapping[str, object] | None, requests: Iterable[RequestTrace]) -> None:
    """Writes requests as they come, beside `path`, which appears when all are there. Format and version are
    put into the header; without one, the file is like the published ones.

    Raises ConfigError on a request that `read_traces` would refuse.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            if header is not None:
                file.write(encoded_header(header))
            for request in requests:
                file.write(encoded(request, own=header is not None))
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def encoded_header(header: Mapping[str, object]) -> bytes:
    """The first line of a file of ours, its end included."""
    whole = {**header, "format": FORMAT, "version": VERSION}
    return msgspec.json.encode({"format": whole.pop("format"), **whole}) + b"\n"


def encoded(request: RequestTrace, *, own: bool = True) -> bytes:
    """The line of one request, its end included. own: for a file with our header."""
    _check(request, f"request {shown(request.request_id)}", own=own)
    record: dict[str, object] = {
        "id": request.request_id,
        "prompt_token_ids": request.prompt,
        "generated_token_ids": request.output,
    }
    for name, trace in request.drafters.items():
        told: dict[str, object] = {"acc_len": trace.accepted}
        if trace.confidence is not None:
            told["confidence"] = trace.confidence
        if trace.top is not None:
            told["top"] = trace.top
        record[_PREFIX + name] = told
    return msgspec.json.encode(record) + b"\n"


# ---------------------------------------------------------------- reading


class _Recorded(msgspec.Struct):
    acc_len: tuple[int, ...]
    confidence: tuple[tuple[float, ...], ...] | None = None
    top: tuple[tuple[tuple[int, float], ...], ...] | None = None


def _object(line: bytes, where: str) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise ConfigError(
            f"{where} is {shown(line[:60].decode(errors='replace').strip())}: each line must be an object."
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}): mend or delete it. It knows no NaN.") from None


def _header(record: Mapping[str, msgspec.Raw], where: str) -> Mapping[str, object]:
    header = {name: _decoded(value, Any, name, where) for name, value in record.items()}
    if header["format"] != FORMAT:
        raise ConfigError(f'{where}: format is {shown(header["format"])}: this reads "{FORMAT}".')
    if header.get("version") != VERSION:
        raise ConfigError(
            f"{where}: version is {shown(header.get('version'))}, and this reads {VERSION}: record the "
            "traces again, or update paceline."
        )
    return header


def _request(record: Mapping[str, msgspec.Raw], where: str, *, own: bool) -> RequestTrace:
    missing = [each for each in ("id", "prompt_token_ids", "generated_token_ids") if each not in record]
    if missing:
        raise ConfigError(f"{where} has no {' and no '.join(missing)}: add it, or delete the line.")
    drafters = {}
    for name, value in record.items():
        if name.startswith(_PREFIX):
            found = _decoded(value, _Recorded, name, where)
            drafters[name.removeprefix(_PREFIX)] = DrafterTrace(found.acc_len, found.confidence, found.top)
    request = RequestTrace(
        str(_decoded(record["id"], str | int, "id", where)),
        _decoded(record["prompt_token_ids"], tuple[int, ...], "prompt_token_ids", where),
        _decoded(record["generated_token_ids"], tuple[int, ...], "generated_token_ids", where),
        drafters,
    )
    _check(request, where, own=own)
    return request


def _decoded(value: msgspec.Raw, kind: Any, name: str, where: str) -> Any:
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: {name}: {error}: mend or delete the line.") from None


# ---------------------------------------------------------------- what must hold


def _check(request: RequestTrace, where: str, *, own: bool) -> None:
    for name, tokens in (("prompt_token_ids", request.prompt), ("generated_token_ids", request.output)):
        if tokens and not 0 <= min(tokens) <= max(tokens) <= _MOST_TOKEN:
            wrong = next(token for token in tokens if not 0 <= token <= _MOST_TOKEN)
            raise ConfigError(f"{where}: {name} holds {shown(wrong)}: ids are from 0 to {_MOST_TOKEN}.")
    if not request.prompt:
        raise ConfigError(f"{where}: prompt_token_ids is empty: a request has at least one token.")
    for name, trace in request.drafters.items():
        length, said = len(trace.accepted), f"{where}: {_PREFIX}{name}"
        if length != len(request.output) and (own or name in MODEL_FREE):
            raise ConfigError(
                f"{said}: acc_len has {length} entries and generated_token_ids {len(request.output)}: they "
                "must agree. Record this request again, or delete the line."
            )
        beyond = next((each for each in trace.accepted if not 1 <= each <= _MOST_TOKEN), None)
        if beyond is not None:
            raise ConfigError(
                f"{said}: acc_len holds {shown(beyond)}: a step emits from 1 to {_MOST_TOKEN} tokens, "
                "the bonus token counted in. Record this request again, or delete the line."
            )
        _check_details(trace, said)


def _check_details(trace: DrafterTrace, said: str) -> None:
    for name, rows in (("confidence", trace.confidence), ("top", trace.top)):
        if rows is not None and len(rows) != len(trace.accepted):
            raise ConfigError(
                f"{said}: {name} has {len(rows)} entries and acc_len {len(trace.accepted)}: they must agree. "
                "Record this request again, or delete the line."
            )
    logprobs = [value for row in trace.confidence or () for value in row]
    logprobs += [value for row in trace.top or () for _, value in row]
    wrong = next((value for value in logprobs if not value <= 1e-4 or value == -float("inf")), None)
    if wrong is not None:
        raise ConfigError(
            f"{said}: {wrong} is not the logarithm of a probability: record this request again, or delete "
            "the line."
        )
