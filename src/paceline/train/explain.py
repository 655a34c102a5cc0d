"""Why a head's guesses are not accepted: its acceptance as loaded, and with one thing changed at a time."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.engine.llm import LLM
from paceline.engine.model_setup import ModelSetup
from paceline.errors import KernelError, ModelError
from paceline.kernels.cpu.bindings import NativeDType
from paceline.loading.heads import LoadedHead
from paceline.models.head import HeadDecoder
from paceline.models.head_spec import HeadSpec
from paceline.models.native_head import NativeHead
from paceline.models.torch_head import TorchHead
from paceline.train.acceptance import Accepted, acceptance_length
from paceline.train.capture import capture
from paceline.train.generate import AnswerPlan, answer
from paceline.train.head_chains import chain_matches
from paceline.train.prompts import TrainingPrompt
from paceline.train.store import FeatureStore

DEPTH = 5

_MUCH_OUTSIDE = 0.1
"""Share of the target's tokens that the draft vocabulary may lack before it is worth saying."""

_NOTABLE = 0.1
"""Gain in accepted guesses per pass, as a share of what they would be, from which a change is a cause."""


@dataclass(frozen=True, slots=True)
class Change:
    """One thing done otherwise. spec: of the head, changed. shift: of the layers that are captured. earlier:
    from how many positions before the features are taken. dtype: of the native kernels, None = plain torch in
    float32. raw: on the answers without the chat template. remedy: what to do if it helps."""

    name: str
    remedy: str
    spec: HeadSpec
    shift: int = 0
    earlier: int = 0
    dtype: NativeDType | None = None
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """length: acceptance length with chains of DEPTH, bonus token included. first: share of first guesses
    accepted. gain: of length, over the head as it is loaded."""

    change: Change
    length: float
    first: float
    gain: float = 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """measured: as loaded, then the changes, best first. outside: share of the target's tokens that the draft
    vocabulary lacks. ceiling: acceptance length if every token that the head can say were guessed. causes:
    what is likely wrong, likeliest first, each with its remedy."""

    measured: list[Measured]
    outside: float
    ceiling: float
    causes: list[str]


@dataclass(frozen=True, slots=True)
class _Texts:
    """The target's answers with features. layers: of their columns."""

    store: FeatureStore
    layers: tuple[int, ...]


def explain(
    setup: ModelSetup,
    head: LoadedHead,
    engine: Callable[[], LLM],
    prompts: Sequence[TrainingPrompt],
    *,
    max_tokens: int = 64,
    progress: Callable[[str], None] = lambda _: None,
) -> Explanation:
    """The target answers the prompts greedily, once in its chat template and once without; each change is
    measured on the answers without the target. progress: called with what is done next."""
    changes = possible_changes(head, setup)
    shifts = {change.shift for change in changes}
    layers = tuple(sorted({place + shift for place in head.spec.capture for shift in shifts}))
    templates = [False] if setup.model.chat_template is None else [False, True]
    if setup.model.chat_template is None:
        changes = [replace(change, raw=True) for change in changes if not change.raw]
        templates = [True]
    with tempfile.TemporaryDirectory(prefix="paceline-explain-") as folder:
        texts: dict[bool, _Texts] = {}
        for raw in templates:
            progress("answers without the template" if raw else "answers")
            where = Path(folder) / ("raw" if raw else "chat")
            texts[raw] = _texts(setup, engine, prompts, where, layers, max_tokens, raw=raw)
        measured = []
        for change in changes:
            progress(change.name)
            one = _measure(head, change, texts[change.raw])
            if one is not None:
                measured.append(one)
        outside, ceiling = _vocabulary(head, texts[changes[0].raw])
    base = measured[0]
    ranked = sorted(
        (replace(each, gain=each.length - base.length) for each in measured[1:]), key=lambda each: -each.gain
    )
    return Explanation([base, *ranked], outside, ceiling, _causes(base, ranked, outside, head, setup))


def possible_changes(head: LoadedHead, setup: ModelSetup) -> list[Change]:
    """The head as it is loaded, then what could be otherwise."""
    spec, target = head.spec, setup.model.spec
    config = "its config.json"
    changes = [Change("as loaded", "", spec)]
    if not spec.joined:
        other = not spec.norm_before_residual
        text = f'set "norm_before_residual": {str(other).lower()} in {config}.'
        toggled = replace(spec, norm_before_residual=other)
        changes.append(Change(f"norm_before_residual {str(other).lower()}", text, toggled))
    other = not spec.norm_output
    text = f'set "norm_output": {str(other).lower()} in {config}.'
    changes.append(Change(f"norm_output {str(other).lower()}", text, replace(spec, norm_output=other)))
    for shift in (-1, 1):
        places = [place + shift for place in spec.capture]
        if min(places) < 0 or max(places) > target.num_layers:
            continue
        text = (
            f'its features are of other layers: set "eagle_aux_hidden_state_layer_ids": {places} in {config}.'
        )
        changes.append(Change(f"capture {places}", text, spec, shift=shift))
    # Those of a later position would hold the answer; rotary positions that are all shifted change nothing.
    text = "it was trained with features of the position before: it cannot be repaired by a setting."
    changes.append(Change("features of the position before", text, spec, earlier=1))
    rope = target.ropes[target.layers[-1].rope]
    if rope != spec.rope and target.head_dim == spec.head_dim:
        text = f"it was trained with the target's rope: set its rope_theta and rope_scaling in {config}."
        changes.append(Change("rope of the target", text, replace(spec, rope=rope)))
    narrower: tuple[NativeDType, ...] = ("bfloat16", "int8") if setup.device == "cpu" else ()
    changes += [Change(f"{dtype} weights", "", spec, dtype=dtype) for dtype in narrower]
    text = "it was trained on plain text: send prompts without the chat template, or train it on chats."
    return [*changes, Change("without the template", text, spec, raw=True)]


def _texts(
    setup: ModelSetup,
    engine: Callable[[], LLM],
    prompts: Sequence[TrainingPrompt],
    folder: Path,
    layers: tuple[int, ...],
    max_tokens: int,
    *,
    raw: bool,
) -> _Texts:
    plan = AnswerPlan(max_tokens=max_tokens, raw=raw)
    greedy = [replace(prompt, temperature=0.0, max_tokens=max_tokens) for prompt in prompts]
    answers = folder / "answers.jsonl"
    if not answer(setup.model, engine, greedy, answers, plan):
        raise ModelError("the target answered none of the prompts: give shorter ones.")
    capture(setup, answers, folder / "features", layers)
    return _Texts(FeatureStore(folder / "features"), layers)


def _measure(head: LoadedHead, change: Change, texts: _Texts) -> Measured | None:
    """None where the kernels do not run it."""
    decoder: HeadDecoder
    try:
        if change.dtype is not None:
            decoder = NativeHead(
                change.spec, head.weights, dtype=change.dtype, threads=torch.get_num_threads()
            )
        else:
            decoder = TorchHead(change.spec, head.weights)
    except KernelError:
        return None
    columns = [texts.layers.index(place + change.shift) for place in change.spec.capture]
    found = []
    for tokens, features, prompt in _sequences(texts):
        seen = features[:, columns].roll(change.earlier, dims=0)
        found.append(Accepted("", chain_matches(decoder, seen.float(), tokens, prompt - 1, DEPTH)))
    first = torch.cat([one.first[:, 0] for one in found]).float().mean()
    return Measured(change, acceptance_length(found, DEPTH), float(first))


def _sequences(texts: _Texts) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Tokens, features and length of the prompt of every answer that is long enough to draft in."""
    store = texts.store
    for one in store.sequences:
        if one.answer_length >= 3:
            here = slice(one.start, one.start + one.length)
            yield store.tokens[here].long(), store.features[here], one.prompt_length


def _vocabulary(head: LoadedHead, texts: _Texts) -> tuple[float, float]:
    """Share of the answers' tokens outside the draft vocabulary, and the acceptance length of a head that
    guesses all others."""
    ids = head.weights.target_ids
    if ids is None:
        return 0.0, DEPTH + 1.0
    members = torch.zeros(head.spec.vocab_size, dtype=torch.bool)
    members[ids] = True
    said, found = [], []
    for tokens, _, prompt in _sequences(texts):
        inside = members[tokens[prompt + 1 :]]
        said.append(inside)
        # A window of DEPTH tokens from every row, those behind the end never accepted.
        padded = torch.cat([inside, torch.zeros(DEPTH - 1, dtype=torch.bool)])
        found.append(Accepted("", padded.unfold(0, DEPTH, 1).cumprod(1).bool()))
    return 1 - float(torch.cat(said).float().mean()), acceptance_length(found, DEPTH)


def _causes(
    base: Measured, ranked: Sequence[Measured], outside: float, head: LoadedHead, setup: ModelSetup
) -> list[str]:
    causes = [
        f"{each.change.name}: {each.length:.2f} instead of {base.length:.2f} tokens per pass: "
        f"{each.change.remedy}"
        for each in ranked
        if each.change.remedy and each.gain >= _NOTABLE * max(each.length - 1, 0.5)
    ]
    verifier = _verifier(head)
    if verifier and verifier.casefold() not in setup.model.name.casefold():
        causes.append(f"it was made for {verifier}, not for {setup.model.name}: choose a head made for that.")
    if outside >= _MUCH_OUTSIDE:
        causes.append(
            f"{outside:.0%} of the target's tokens are outside the draft vocabulary of "
            f"{head.spec.draft_vocab_size}: train it with a larger one, or on texts like these."
        )
    causes += [
        f"{each.change.name} cost {-each.gain:.2f} tokens per pass: choose draft_dtype = float32."
        for each in ranked
        if each.change.dtype and -each.gain >= _NOTABLE * max(base.length - 1, 0.5)
    ]
    return causes or [
        "none of these changes helps: the head foresees these texts no better. Train it longer, or on "
        f"answers of {setup.model.name} to prompts like these (paceline train eagle3)."
    ]


def _verifier(head: LoadedHead) -> str:
    """The last part of the name of the model that a head in the layout of speculators says it is for."""
    try:
        config = json.loads((Path(head.provenance.source) / "config.json").read_bytes())
        name = config["speculators_config"]["verifier"]["name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return str(name or "").rstrip("/").rsplit("/", 1)[-1]
