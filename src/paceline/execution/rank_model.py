"""What every rank of a group holds: its share of the model, its part of the KV cache and the slot tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, cast

import msgspec
import numpy as np
import torch

from paceline.execution.collective import Collective
from paceline.execution.forward_batch import SlotTables
from paceline.execution.model_runner import Decoder
from paceline.kernels.batch import TokenBatch
from paceline.kernels.cpu.shared_group import GroupShape, NativeGroup
from paceline.kernels.kv_cache import KVCache
from paceline.loading import LoadedModel, Provenance
from paceline.models.native_decoder import NativeDecoder
from paceline.models.shard import shard
from paceline.models.torch_decoder import TorchDecoder

Precision = Literal["float32", "bfloat16", "int8"]

_ARRAYS = ("tokens", "positions", "slots", "rows", "prefix_len", "path_start", "path_len", "path_slots")


class GroupSetup(msgspec.Struct, frozen=True):
    """What the ranks of a group have in common.

    source, provenance: the model's name and what it was when rank 0 loaded it. memory: the descriptor of the
    group's shared memory, -1 = sums go through torch.distributed, whose ranks meet at the file `store`.
    max_batch_tokens: of one pass. timeout_s: how long rank 0 waits for the others. parent: rank 0's process.
    capture: what is written to rank 0's features.
    """

    source: str
    provenance: Provenance
    ranks: int
    dtype: Precision
    exact: bool
    num_slots: int
    num_rows: int
    context_length: int
    max_batch_tokens: int
    timeout_s: float
    parent: int
    capture: tuple[int, ...] = ()
    memory: int = -1
    store: str = ""


class RankSetup(msgspec.Struct, frozen=True):
    """All that a rank must know before the first pass. cores: of a CPU rank, one thread each."""

    group: GroupSetup
    rank: int
    cores: tuple[int, ...]
    device: str


class RankPass(msgspec.Struct, frozen=True, array_like=True):
    """The `number`th pass as rank 0 sends it: what was written to the slot tables since the last one, as
    (row, start, slots), how many layers run, and the arrays of a `TokenBatch` but the tables. Slots and
    arrays are int32."""

    number: int
    writes: list[tuple[int, int, bytes]]
    arrays: list[bytes]
    logit_rows: bytes
    layers: int | None = None

    @classmethod
    def of(
        cls, number: int, writes: list[tuple[int, int, bytes]], batch: TokenBatch, layers: int | None
    ) -> RankPass:
        arrays = [getattr(batch, name).tobytes() for name in _ARRAYS]
        return cls(number, writes, arrays, batch.logit_rows.tobytes(), layers)

    def apply(self, tables: SlotTables) -> TokenBatch:
        """Writes the tables and gives the batch over them."""
        for row, start, slots in self.writes:
            tables.write(row, start, cast("Sequence[int]", np.frombuffer(slots, dtype=np.int32)))
        # Copies, because torch takes no tensor of memory that cannot be written.
        arrays = {
            name: np.frombuffer(array, dtype=np.int32).copy()
            for name, array in zip(_ARRAYS, self.arrays, strict=True)
        }
        wanted = np.frombuffer(self.logit_rows, dtype=np.int32).copy()
        return TokenBatch(**arrays, tables=tables.rows, logit_rows=wanted)


class RankModel:
    """decoder, kv: this rank's share. Exactly one of `native` and `collective` adds up the ranks' parts.

    Raises ModelError when the model cannot be split so, KernelError when the kernels do not cover it.
    """

    def __init__(self, setup: RankSetup, model: LoadedModel) -> None:
        group = setup.group
        spec, weights = shard(model.spec, model.weights, setup.rank, group.ranks)
        self.native: NativeGroup | None = None
        self.collective: Collective | None = None
        self.decoder: Decoder
        # Rank 0 alone judges: it may be stopped for long, and a rank that waits goes with it anyway.
        patience = group.timeout_s if setup.rank == 0 else 0.0
        if group.memory >= 0:
            shape = GroupShape(group.ranks, group.max_batch_tokens, spec.hidden_size, spec.vocab_size)
            self.native = NativeGroup(group.memory, shape, setup.rank, patience)
            self.decoder = NativeDecoder(
                spec,
                weights,
                dtype=group.dtype,
                threads=len(setup.cores),
                cores=setup.cores,
                group=self.native,
                capture=group.capture,
            )
        else:
            device = torch.device(setup.device)
            if device.type == "cpu":
                torch.set_num_threads(len(setup.cores))
            self.collective = Collective(Path(group.store), setup.rank, group.ranks, device, patience)
            self.decoder = TorchDecoder(
                spec,
                weights,
                dtype={"float32": torch.float32, "bfloat16": torch.bfloat16}[group.dtype],
                device=device,
                exact=group.exact,
                reduce=self.collective.sum,
                capture=group.capture,
            )
        sizes = (spec.num_layers, group.num_slots, spec.num_kv_heads, spec.head_dim)
        # The residual stream is the same on all ranks.
        kept = (
            {"num_captured": len(group.capture), "hidden_size": spec.hidden_size} if setup.rank == 0 else {}
        )
        self.kv = KVCache(*sizes, self.decoder.kv_dtype, setup.device, **kept)

    def connect(self) -> None:
        """Meets the other ranks, which must be about to do the same."""
        if self.collective is not None:
            self.collective.connect()

    def begin(self, number: int) -> None:
        """Says which pass comes next."""
        if self.native is not None:
            self.native.begin(number)

    def abandon(self) -> None:
        """Frees whoever waits for the other ranks; from any thread."""
        for means in (self.native, self.collective):
            if means is not None:
                means.abandon()
