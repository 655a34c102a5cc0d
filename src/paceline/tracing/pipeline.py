"""From prompts to a file of traces, which goes on where it was stopped."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from paceline import __version__
from paceline.config import Config
from paceline.core.params import SamplingParams
from paceline.engine.draft_messages import fingerprint
from paceline.engine.intake import Intake
from paceline.errors import ConfigError, RequestError, shown
from paceline.loading import LoadedModel, load
from paceline.sim.acceptance import FORMAT, RequestTrace, encoded, encoded_header, read_traces
from paceline.tracing.ask import KnownText
from paceline.tracing.prompts import TracePrompt, read_trace_prompts
from paceline.tracing.tracer import Depth, TracedDrafter, Tracer, traced_config

_MOST_NAMED = 3
_SEED_STEP = 1_000_003
"""A request's seed is the plan's times this, and its number: texts do not depend on what was done before."""
_ROUNDS_OF_A_BATCH = 2
"""Texts written at once, in full batches, before drafters are asked along them; so many are lost at most when
it is stopped."""

_OPTIONS = {
    "looks_up": ("prompt_lookup_min", "prompt_lookup_max"),
    "looks_back": (
        "suffix_cache",
        "suffix_max_depth",
        "suffix_factor",
        "suffix_offset",
        "suffix_min_token_prob",
        "suffix_max_cached_requests",
        "suffix_max_memory",
    ),
    "target_slots": ("draft_layers",),
}
"""By a property of the kind: options that decide what it drafts."""


@dataclass(frozen=True, slots=True)
class TracePlan:
    """data: the file of prompts.  params: of every request; seed: of their seeds.  raw: without the chat
    template.  limit: only the first so many prompts."""

    config: Config
    data: Path
    params: SamplingParams
    seed: int = 0
    depth: Depth = field(default_factory=Depth)
    raw: bool = False
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class TraceReport:
    """problems: by drafter, why it drafted nothing where it said so, and at how many places."""

    requests: int
    tokens: int
    problems: Mapping[str, Mapping[str, int]]


def trace(
    plan: TracePlan, out: Path, *, progress: Callable[[int, int, int], None] = lambda *_: None
) -> TraceReport:
    """Writes the traces that `out` does not have yet.

    progress: called with requests done, requests in all, and tokens recorded by this call.
    Raises ConfigError for prompts that cannot be served, or a file begun with other options.
    """
    model = load(plan.config.model)
    if plan.params.n != 1 or plan.params.logprobs is not None:
        raise ConfigError("a trace is of one output per prompt, without logprobs: leave both out.")
    context = plan.config.scheduler.context_length or model.context_length
    intake = Intake(model, min(context, model.context_length), None)
    prompts = read_trace_prompts(plan.data, intake, raw=plan.raw, limit=plan.limit)
    try:
        requests = [_params(plan, intake, each) for each in prompts]
    except RequestError as error:
        raise ConfigError(str(error)) from None
    longest = max(
        len(each.token_ids) + (params.max_tokens or 0) for each, params in zip(prompts, requests, strict=True)
    )
    longest = min(longest, context, model.context_length)
    traced_config(plan.config, model, longest)
    with Tracer(plan.config, model, plan.depth, longest) as tracer:
        kept = _begun(out, _header(plan, model, tracer), prompts)
        for each, params in zip(kept, requests, strict=False):
            tracer.recall(KnownText(each.prompt, each.output, params))
        rest = list(zip(prompts, requests, strict=True))[len(kept) :]
        tokens = _write_rest(
            tracer, rest, out, plan, lambda done, count: progress(len(kept) + done, len(prompts), count)
        )
        return TraceReport(len(prompts), tokens, tracer.problems)


def _params(plan: TracePlan, intake: Intake, prompt: TracePrompt) -> SamplingParams:
    return intake.params(replace(plan.params, seed=plan.seed * _SEED_STEP + prompt.number))


def _write_rest(
    tracer: Tracer,
    rest: Sequence[tuple[TracePrompt, SamplingParams]],
    out: Path,
    plan: TracePlan,
    progress: Callable[[int, int], None],
) -> int:
    done = tokens = 0
    at_once = _ROUNDS_OF_A_BATCH * plan.config.scheduler.max_num_seqs
    progress(done, tokens)
    with out.open("ab") as file:
        for first in range(0, len(rest), at_once):
            part = rest[first : first + at_once]
            outputs = tracer.write([(each.request_id, each.token_ids, params) for each, params in part])
            for (each, params), output in zip(part, outputs, strict=True):
                text = KnownText(each.token_ids, tuple(output.token_ids), params)
                file.write(encoded(tracer.trace(each.request_id, text)))
                file.flush()
                done, tokens = done + 1, tokens + len(text.output)
                progress(done, tokens)
    return tokens


# ---------------------------------------------------------------- provenance


def _header(plan: TracePlan, model: LoadedModel, tracer: Tracer) -> dict[str, Any]:
    provenance = model.provenance
    return {
        "target": model.name,
        "drafters": [_of_drafter(plan, each) for each in tracer.drafters],
        "sampling": {**_given(plan.params), "seed": plan.seed},
        "provenance": {
            "paceline": __version__,
            "target_fingerprint": provenance.fingerprint,
            "target_revision": provenance.revision,
            "dtype": tracer.precision,
            "tokenizer_sha256": fingerprint(model.tokenizer.vocabulary()),
            "data": plan.data.name,
            "data_sha256": _sha256(plan.data),
            "chat_template": not plan.raw,
        },
    }


def _of_drafter(plan: TracePlan, drafter: TracedDrafter) -> dict[str, Any]:
    kind, setup = drafter.chosen.kind, drafter.chosen.setup
    found: dict[str, Any] = {
        "name": drafter.name,
        "drafter": drafter.named.name,
        "kind": kind.name,
        "depth": plan.depth.guesses,
        "top": plan.depth.top,
    }
    options = [name for asked, names in _OPTIONS.items() if getattr(kind, asked) for name in names]
    if options:
        found["options"] = {name: getattr(plan.config.speculation, name) for name in options}
    if setup is not None:
        weights = getattr(setup, "head", None) or getattr(setup, "model", None)
        assert weights is not None
        found |= {"dtype": setup.precision, "fingerprint": weights.provenance.fingerprint}
    return found


def _given(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults, and what is always good to know."""
    default = asdict(SamplingParams())
    always = ("max_tokens", "temperature")
    values = asdict(params)
    return {
        each.name: values[each.name]
        for each in fields(params)
        if each.name in always or values[each.name] != default[each.name]
    }


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------- going on


def _begun(out: Path, header: Mapping[str, Any], prompts: Sequence[TracePrompt]) -> tuple[RequestTrace, ...]:
    """The requests that are there already; a line that was being written is cut off.

    Raises ConfigError for a file that another plan has begun.
    """
    first = encoded_header(header)
    content = out.read_bytes() if out.exists() else b""
    end = content.rfind(b"\n") + 1
    if not content or (not end and first.startswith(content)):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(first)
        return ()
    _check_same(out, content[: content.find(b"\n") + 1], first)
    if end < len(content):
        os.truncate(out, end)
    if end == len(first):
        return ()
    kept = read_traces(out).requests
    names = [each.request_id for each in kept]
    if names != [each.request_id for each in prompts[: len(kept)]]:
        raise ConfigError(
            f"{out} has {len(kept)} requests, which are not the first of the prompts: raise --limit, delete "
            "the file, or give another --out."
        )
    return kept


def _check_same(out: Path, found: bytes, wanted: bytes) -> None:
    remedy = "delete the file, or give another --out."
    try:
        before = _leaves(msgspec.json.decode(found, type=dict[str, Any]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        before = {}
    if before.get("format") != FORMAT:
        raise ConfigError(f"{out}, line 1 is not the header of a file of traces: {remedy}")
    now = _leaves(msgspec.json.decode(wanted, type=dict[str, Any]))
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if changed:
        name, beyond = changed[0], len(changed) - _MOST_NAMED
        more = f" and {beyond} more" if beyond > 0 else ""
        raise ConfigError(
            f"{out} was begun with another {', '.join(changed[:_MOST_NAMED])}{more} ({name} was "
            f"{shown(before.get(name))}, and is {shown(now.get(name))}): go on with the same, {remedy}"
        )


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Each value that holds no others, by its path."""
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {path: value}
    return {
        name: leaf
        for key, below in value.items()
        for name, leaf in _leaves(below, f"{path}.{key}" if path else str(key)).items()
    }
