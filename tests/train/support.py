"""A tiny target with answers, captured features of it, and a head in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline import LLM, SamplingParams
from paceline.engine.device_groups import DeviceGroup
from paceline.engine.model_setup import ModelSetup
from paceline.loading import LoadedModel, load
from paceline.train.head_shape import HeadShape, Parameters, head_shape, parameter_shapes
from tests import tiny

LAYERS = 8


def tiny_target(folder: Path) -> LoadedModel:
    return load(str(tiny.write_random(folder / "target", layers=LAYERS)))


def setup_of(model: LoadedModel) -> ModelSetup:
    return ModelSetup(model, "float32", "cpu", DeviceGroup((), 1))


def write_answers(path: Path, count: int, vocab_size: int, seed: int = 0) -> Path:
    """Random ones, of two categories."""
    generator = torch.Generator().manual_seed(seed)
    lines = []
    for number in range(count):
        text = torch.randint(3, vocab_size, (16 + number % 11,), generator=generator).tolist()
        lines.append(_line(number, text, 4 + number % 5))
    path.write_text("".join(lines), encoding="utf-8")
    return path


def write_own_answers(path: Path, model: LoadedModel, count: int, seed: int = 0) -> Path:
    """The target's own, greedy, to prompts that differ in their last token only: something can be learnt."""
    generator = torch.Generator().manual_seed(seed)
    lines = []
    with LLM(model.name, draft="none", max_num_seqs=32, **tiny.ENGINE) as llm:
        lasts = torch.randint(3, model.spec.vocab_size, (count,), generator=generator).tolist()
        prompts = [[5, 6, 7, 8, last] for last in lasts]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True))
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            lines.append(_line(number, [*prompt, *output.token_ids], len(prompt)))
    path.write_text("".join(lines), encoding="utf-8")
    return path


def _line(number: int, text: list[int], prompt: int) -> str:
    answer = {"prompt_token_ids": text[:prompt], "token_ids": text[prompt:]}
    return json.dumps({"category": "ab"[number % 2], "temperature": 0.0, **answer}) + "\n"


def random_head(
    model: LoadedModel, draft_vocab_size: int, seed: int = 0, **flags: Any
) -> tuple[HeadShape, Parameters]:
    """Every weight of which matters."""
    shape = head_shape(model.spec, draft_vocab_size, **flags)
    generator = torch.Generator().manual_seed(seed)
    parameters: dict[str, Tensor] = {}
    for name, size in parameter_shapes(shape).items():
        noise = torch.randn(size, generator=generator)
        parameters[name] = 1 + 0.3 * noise if len(size) == 1 else noise * size[1] ** -0.5
    return shape, parameters
