"""One model on several ranks: this process is rank 0, the others are processes of its own."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from torch import Tensor

from paceline.errors import ConfigError
from paceline.execution.devices import current
from paceline.execution.forward_batch import Segment, SlotTables, build_batch
from paceline.execution.interrupts import uninterrupted
from paceline.execution.model_runner import ModelRunner
from paceline.execution.rank_model import GroupSetup, Precision, RankModel, RankPass, RankSetup
from paceline.execution.rank_processes import RankProcesses
from paceline.kernels.batch import TokenBatch
from paceline.kernels.cpu.shared_group import GroupShape, new_memory
from paceline.loading import LoadedModel
from paceline.models.shard import share_of


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs. cores: of a CPU rank, one thread each; two ranks should have none in common."""

    cores: tuple[int, ...] = ()
    device: str = "cpu"


class RecordedTables(SlotTables):
    """Slot tables that remember what was written, for the other ranks."""

    def __init__(self, num_rows: int, context_length: int) -> None:
        super().__init__(num_rows, context_length)
        self.writes: list[tuple[int, int, bytes]] = []

    def write(self, row: int, start: int, slots: Sequence[int]) -> None:
        super().write(row, start, slots)
        self.writes.append((row, start, np.asarray(slots, dtype=np.int32).tobytes()))


class ParallelRunner(ModelRunner):
    """A `ModelRunner` whose passes all ranks of a group run in lockstep, for one thread at a time.

    `decoder` and `kv` are rank 0's share.
    Table writes go out with the next pass, as ids; the other ranks' logits go nowhere. A rank that ends, or
    that keeps rank 0 waiting for longer than `timeout_s`, ends the group: that pass and every later one raise
    the same EngineError, and the processes are gone.
    """

    def __init__(self, group: GroupSetup, rank: RankModel, processes: RankProcesses) -> None:
        rows, context = group.num_rows, group.context_length
        super().__init__(rank.decoder, rank.kv, num_rows=rows, context_length=context)
        self.tables: RecordedTables = RecordedTables(rows, context)
        self._rank = rank
        self._processes = processes
        self._encoder = msgspec.msgpack.Encoder()
        self._passes = 0
        # Also when nobody calls `close`: on collection or at exit.
        self._finalizer = weakref.finalize(self, processes.close)

    @classmethod
    def start(
        cls,
        model: LoadedModel,
        places: Sequence[Place],
        *,
        dtype: Precision,
        num_slots: int,
        num_rows: int,
        context_length: int,
        max_batch_tokens: int,
        native: bool = True,
        exact: bool = False,
        timeout_s: float = 5.0,
        capture: Sequence[int] = (),
    ) -> ParallelRunner:
        """Starts a process for each place but the first, which is this process's, and waits until all are
        ready.

        model: the others load it again by its name. places: rank r's cores or device. max_batch_tokens: of
        the largest pass; a larger one raises ValueError. native: the C++ kernels, with sums in shared memory;
        False takes plain torch with torch.distributed (gloo, or NCCL on CUDA devices), and `exact` is its
        option. timeout_s: seconds that rank 0 waits for the others at a sum; what a rank computes between two
        sums is half a layer. capture: as of the decoders, into rank 0's `kv`.

        Raises ConfigError for places that cannot be, ModelError for a model that cannot be split so,
        KernelError where the kernels do not serve, EngineError with its last words when a rank cannot start.
        """
        _check_places(places, native=native, dtype=dtype)
        for rank in range(len(places)):
            share_of(model.spec, rank, len(places))
        group = GroupSetup(
            source=model.name,
            provenance=model.provenance,
            ranks=len(places),
            dtype=dtype,
            exact=exact,
            num_slots=num_slots,
            num_rows=num_rows,
            context_length=context_length,
            max_batch_tokens=max_batch_tokens,
            timeout_s=timeout_s,
            parent=os.getpid(),
            capture=model.spec.checked_capture(capture),
        )
        # What the ranks meet through has a name, or a descriptor here, only until they have met.
        if native:
            shape = GroupShape(len(places), max_batch_tokens, model.spec.hidden_size, model.spec.vocab_size)
            descriptor = new_memory(shape)
            try:
                return cls._started(msgspec.structs.replace(group, memory=descriptor), places, model)
            finally:
                os.close(descriptor)
        with tempfile.TemporaryDirectory(prefix="paceline-ranks-", ignore_cleanup_errors=True) as folder:
            store = str(Path(folder) / "store")
            return cls._started(msgspec.structs.replace(group, store=store), places, model)

    @classmethod
    def _started(cls, group: GroupSetup, places: Sequence[Place], model: LoadedModel) -> ParallelRunner:
        setups = [RankSetup(group, rank, place.cores, place.device) for rank, place in enumerate(places)]
        processes = RankProcesses()
        try:
            processes.start(setups[1:])
            rank = RankModel(setups[0], model)
            processes.on_loss(rank.abandon)
            processes.wait_ready()
            try:
                rank.connect()
            except RuntimeError as error:
                raise processes.lose(error) from error
            return cls(group, rank, processes)
        except BaseException:
            processes.close()
            raise

    def forward(self, segments: Sequence[Segment], layers: int | None = None) -> Tensor:
        """As `ModelRunner.forward`. Raises EngineError when the group is lost."""
        self._processes.check()
        self.decoder.spec.checked_depth(layers)
        batch = build_batch(segments, self.tables)
        # A pass that some ranks have and others have not: their KV and tables would differ from then on.
        with uninterrupted(), current(self.kv.keys.device):
            try:
                self._send(batch, layers)
                logits = self.decoder.forward(batch, self.kv, layers)
                if self._rank.collective is not None:
                    self._rank.collective.settle(self._processes.check)
                return logits
            except BaseException as error:
                if self._rank.native is not None and isinstance(error, ValueError | MemoryError):
                    raise  # before this rank met the others: they come with it to the next pass
                lost = self._processes.lose(error)
                if isinstance(error, Exception):
                    raise lost from error
                raise

    def _send(self, batch: TokenBatch, layers: int | None) -> None:
        self._passes += 1
        message = self._encoder.encode(RankPass.of(self._passes, self.tables.writes, batch, layers))
        try:
            self._processes.send(message)
        except (ValueError, MemoryError) as error:
            raise self._processes.lose(error) from error
        self.tables.writes.clear()
        self._rank.begin(self._passes)

    def close(self) -> None:
        """Ends the other ranks, within seconds; later passes raise EngineError."""
        self._finalizer()


def _check_places(places: Sequence[Place], *, native: bool, dtype: Precision) -> None:
    if not places:
        raise ConfigError(
            "a group of ranks needs at least one place: give each rank its cores or its device."
        )
    on_cpu = {place.device == "cpu" for place in places}
    if len(on_cpu) > 1 or (native and on_cpu != {True}):
        raise ConfigError(
            "the ranks of a group run all on CPU cores or, without the native kernels, all on CUDA devices: "
            f"not on {', '.join(place.device for place in places)}."
        )
    if on_cpu == {True} and not all(place.cores for place in places):
        raise ConfigError("a rank on the CPU needs cores: give each rank at least one.")
    if dtype == "int8" and not native:
        raise ConfigError("int8 weights need the native kernels: choose dtype = bfloat16 or float32.")
