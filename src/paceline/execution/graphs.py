"""CUDA graphs: a small pass is hundreds of kernel launches, and a recorded one is a single launch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.batch import TokenBatch
from paceline.kernels.kv_cache import KVCache
from paceline.models.spec import DecoderSpec
from paceline.models.torch_decoder import PassInputs, TorchDecoder

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Records what a function launches; the result launches it again on the same tensors."""


def capture_cuda(function: Callable[[], None]) -> Replay:
    """Three passes on a side stream first, so that libraries allocate and tune before the recording. The
    tensors' device must be current, or nothing is recorded."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


@dataclass(frozen=True)
class _Recorded:
    inputs: PassInputs
    logits: Tensor
    replay: Replay


class GraphedDecoder:
    """Runs passes of up to `max_tokens` tokens from recordings, one per depth and set of input shapes;
    larger passes (prompts) run directly.

    The number of slots looked at is rounded up, so that one recording serves a stretch of positions. The
    least recently used recordings are dropped beyond `max_recorded`.
    """

    def __init__(
        self,
        decoder: TorchDecoder,
        *,
        capture: Capture = capture_cuda,
        max_tokens: int = 64,
        pad_slots_to: int = 256,
        max_recorded: int = 64,
    ) -> None:
        self.spec: DecoderSpec = decoder.spec
        self.capture: tuple[int, ...] = decoder.capture
        self._decoder = decoder
        self._recorder = capture
        self._max_tokens = max_tokens
        self._pad_slots_to = pad_slots_to
        self._max_recorded = max_recorded
        self._recorded: OrderedDict[tuple[object, ...], _Recorded] = OrderedDict()
        self._cache: KVCache | None = None

    @property
    def kv_dtype(self) -> torch.dtype:
        return self._decoder.kv_dtype

    @torch.inference_mode()
    def forward(self, batch: TokenBatch, kv: KVCache, layers: int | None = None) -> Tensor:
        """As `TorchDecoder.forward`; the logits live in a buffer that the next pass overwrites."""
        if len(batch) > self._max_tokens:
            return self._decoder.forward(batch, kv, layers)
        if self._cache is not kv:  # a recording holds the addresses of one cache
            self._recorded.clear()
            self._cache = kv
        inputs = self._decoder.prepare(batch, pad_slots_to=self._pad_slots_to)
        key = (layers, *(tensor.shape for tensor in inputs.tensors()))
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._recorded[key] = self._record(inputs, kv, layers)
            if len(self._recorded) > self._max_recorded:
                self._recorded.popitem(last=False)
        else:
            self._recorded.move_to_end(key)
            for static, new in zip(recorded.inputs.tensors(), inputs.tensors(), strict=True):
                static.copy_(new)
        recorded.replay()
        return recorded.logits

    def _record(self, inputs: PassInputs, kv: KVCache, layers: int | None) -> _Recorded:
        logits = self._decoder.run(inputs, kv, layers).clone()

        def run() -> None:
            logits.copy_(self._decoder.run(inputs, kv, layers))

        return _Recorded(inputs, logits, self._recorder(run))
