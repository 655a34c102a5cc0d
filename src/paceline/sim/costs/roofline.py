"""Costs of a GPU and a model that are not at hand: from data sheets, and what others reached of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from paceline.errors import ConfigError, nearest, shown
from paceline.sim.costs.forms import PassesDraft, RooflinePass, ShareDraft
from paceline.sim.costs.hardware import GPU, MOST_BITS, ShapeSpec, gpu_named, positive, shape_of
from paceline.sim.costs.model import CostModel, DraftTime

USABLE = 0.9
"""Of a device's memory, for weights and KV."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What of the data sheet is reached, and what comes on top.

    The defaults are those of Llama-3.1-8B under vLLM 0.10 on an H100 (arXiv 2601.11580): the constants that
    its authors fitted are 81 % of the bandwidth for the weights, 100 % of it for KV, 77 % of the arithmetic,
    all parameters counted in both, and 1.2 ms per step; they add up, so sharpness is 1.
    draft_s, draft_layer_s: of one pass of a drafting model besides, and per layer: from the same paper's time
    breakdown at batch 1, where a pass of an EAGLE-3 head takes 0.66 ms and one of Qwen3-0.6B 2.3 ms.
    lookup_share: of a verifying pass, what an n-gram drafter takes, same source.
    exchange_s: of one sum over tensor parallel ranks, the smallest there is: 12 us on 4 H800 (arXiv
    2506.11309, table 3).
    """

    bandwidth: float = 0.81
    kv_bandwidth: float = 1.0
    compute: float = 0.77
    step_s: float = 1.2e-3
    request_s: float = 0.0
    sharpness: float = 1.0
    draft_s: float = 0.33e-3
    draft_layer_s: float = 54e-6
    lookup_share: float = 0.005875
    exchange_s: float = 12e-6


def efficiency_of(settings: dict[str, float]) -> Efficiency:
    """The defaults with some replaced. Raises ConfigError."""
    known = {field.name for field in fields(Efficiency)}
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"no efficiency is named {name!r}: {nearest(name, known)}")
        if name in ("bandwidth", "kv_bandwidth", "compute"):
            if not 1e-3 <= value <= 10.0:
                raise ConfigError(f"{name} is {value:g}: it must be a share of the data sheet, 0.001 to 10.")
        elif name == "sharpness" and not 1.0 <= value <= 64.0:
            raise ConfigError(f"sharpness is {value:g}: it must be from 1 (both add up) to 64 (the longer).")
        elif not 0.0 <= value < 1e6:
            raise ConfigError(f"{name} is {shown(value)}: it must be a number not below 0.")
    return Efficiency(**settings)


def roofline(
    gpu: str | GPU,
    model: str | ShapeSpec,
    tensor_parallel: int = 1,
    *,
    draft: str | ShapeSpec | None = None,
    draft_tensor_parallel: int = 1,
    weight_bits: float = 16.0,
    efficiency: Efficiency | None = None,
) -> CostModel:
    """Drafters: ngram, suffix, eagle3 (a head on the target's devices) and, with `draft`, a model, draft.

    weight_bits: per parameter of both models, scales included; arithmetic is bfloat16 all the same.
    Raises ConfigError for what is unknown or does not fit in memory.
    """
    device = gpu_named(gpu) if isinstance(gpu, str) else gpu
    reached = efficiency or Efficiency()
    shape = shape_of(model)
    positive("weight_bits", weight_bits, MOST_BITS)
    _fits(device, shape, tensor_parallel, weight_bits)
    target = _model_pass(device, shape, tensor_parallel, weight_bits, reached)
    lookup = ShareDraft(share=reached.lookup_share, of=target)
    head = PassesDraft(each=_head_pass(device, shape, tensor_parallel, reached))
    drafts: dict[str, DraftTime] = {"ngram": lookup, "suffix": lookup, "eagle3": head}
    source = {"gpu": device.name, "target": shape.name, "tensor_parallel": tensor_parallel}
    if draft is not None:
        small = shape_of(draft)
        _fits(device, small, draft_tensor_parallel, weight_bits)
        each = _model_pass(device, small, draft_tensor_parallel, weight_bits, reached, drafting=True)
        drafts["draft"] = PassesDraft(each=each)
        source |= {"draft": small.name, "draft_tensor_parallel": draft_tensor_parallel}
    return CostModel(
        target=target,
        drafts=drafts,
        step_overhead_s=reached.step_s,
        request_overhead_s=reached.request_s,
        provenance={"source": "roofline", **source, "weight_bits": weight_bits, **asdict(reached)},
    )


def kv_capacity(
    gpu: str | GPU, model: str | ShapeSpec, tensor_parallel: int = 1, weight_bits: float = 16.0
) -> int:
    """Tokens whose keys and values fit beside the weights. Raises as `roofline` does."""
    device, shape = gpu_named(gpu) if isinstance(gpu, str) else gpu, shape_of(model)
    _fits(device, shape, tensor_parallel, weight_bits)
    each = USABLE * device.memory - shape.parameters * weight_bits / 8 / tensor_parallel
    return int(each / kv_bytes_per_rank(shape, tensor_parallel))


def kv_bytes_per_rank(shape: ShapeSpec, ranks: int) -> float:
    """Per token and rank: beyond one KV head per rank, ranks hold copies."""
    return shape.kv_bytes_per_token / min(ranks, shape.kv_heads)


def _fits(device: GPU, shape: ShapeSpec, ranks: int, bits: float) -> None:
    if not 1 <= ranks <= shape.heads:
        raise ConfigError(
            f"tensor_parallel is {ranks}: {shape.name} has {shape.heads} attention heads to share out, so "
            f"it must be from 1 to {shape.heads}."
        )
    needed, there = shape.parameters * bits / 8, USABLE * device.memory
    if needed > there * ranks:
        raise ConfigError(
            f"{shape.name} takes {needed / 1e9:.0f} GB of weights and {ranks} x {device.name} hold "
            f"{there * ranks / 1e9:.0f}: raise tensor_parallel to {int(needed // there) + 1} or more, or "
            "give fewer weight_bits."
        )


def _model_pass(
    device: GPU, shape: ShapeSpec, ranks: int, bits: float, reached: Efficiency, *, drafting: bool = False
) -> RooflinePass:
    beside = reached.draft_s + reached.draft_layer_s * shape.layers if drafting else 0.0
    return _pass(device, shape, ranks, reached, shape.parameters, bits, shape.layers, beside)


def _head_pass(device: GPU, shape: ShapeSpec, ranks: int, reached: Efficiency) -> RooflinePass:
    """Of 16 bits, whatever the target's weights have, as published heads are."""
    beside = reached.draft_s + reached.draft_layer_s
    return _pass(device, shape, ranks, reached, shape.head_parameters, 16.0, 1, beside)


def _pass(
    device: GPU,
    shape: ShapeSpec,
    ranks: int,
    reached: Efficiency,
    parameters: int,
    bits: float,
    layers: int,
    beside_s: float,
) -> RooflinePass:
    exchanges = 2 * layers if ranks > 1 else 0
    # A ring sends each rank's share of a bfloat16 row around twice.
    row = 2 * shape.hidden * 2 * (ranks - 1) / ranks
    kv_bytes = kv_bytes_per_rank(shape, ranks) * layers / shape.layers
    return RooflinePass(
        read_s=parameters * bits / 8 / ranks / (reached.bandwidth * device.bandwidth),
        per_token_s=2 * parameters / ranks / (reached.compute * device.flops),
        per_kv_token_s=kv_bytes / (reached.kv_bandwidth * device.bandwidth),
        fixed_s=beside_s,
        exchange_s=exchanges * reached.exchange_s,
        exchange_per_token_s=exchanges * row / device.link,
        sharpness=reached.sharpness,
    )
