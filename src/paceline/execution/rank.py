"""The process of one rank but the first: `python -m paceline.execution.rank DESCRIPTOR`.

It obeys rank 0, which started it, over the inherited socket, and ends with it. What goes wrong goes to
stderr, which rank 0 reads when this process ends.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec

from paceline.errors import ConfigError, ModelError, PacelineError
from paceline.execution.devices import current
from paceline.execution.forward_batch import SlotTables
from paceline.execution.rank_model import RankModel, RankPass, RankSetup
from paceline.loading import load

_LOOK_EVERY_MS = 1000


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    try:
        setup = msgspec.msgpack.decode(connection.recv_bytes(), type=RankSetup)
    except (EOFError, OSError):
        return
    watch = threading.Thread(
        target=_end_with_parent, args=(connection.fileno(), setup.group.parent), daemon=True
    )
    watch.start()
    try:
        _serve(connection, setup)
    except PacelineError as error:
        sys.exit(str(error))


def _end_with_parent(descriptor: int, parent: int) -> None:
    """Ends this process when rank 0 has closed the socket or is gone, whatever the main thread waits for.

    A process that rank 0 forked may hold a copy of the socket's other end, hence the look at the parent.
    """
    hangup = select.poll()
    hangup.register(descriptor, 0)
    while os.getppid() == parent and not hangup.poll(_LOOK_EVERY_MS):
        pass
    os._exit(0)


def _serve(connection: Connection, setup: RankSetup) -> None:
    if setup.cores and hasattr(os, "sched_setaffinity"):
        _take(setup.cores)
    group = setup.group
    model = load(group.source)
    if model.provenance != group.provenance:
        raise ModelError(
            f"{group.source} is not what rank 0 loaded: {model.provenance} instead of {group.provenance}. "
            "Leave the model's files alone while it is being loaded."
        )
    rank = RankModel(setup, model)
    del model  # what a rank does not own need not stay in memory
    tables = SlotTables(group.num_rows, group.context_length)
    connection.send_bytes(b"ready")
    rank.connect()
    passes = msgspec.msgpack.Decoder(RankPass)
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        work = passes.decode(message)
        batch = work.apply(tables)
        rank.begin(work.number)
        try:
            with current(setup.device):
                rank.decoder.forward(batch, rank.kv, work.layers)
        except ValueError:
            # A malformed batch, which the native pass refuses before the ranks meet: rank 0 refuses it too.
            if rank.native is None:
                raise


def _take(cores: Sequence[int]) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise ConfigError(
            f"cores {', '.join(map(str, cores))} are not to be had: {error.strerror}. Here are {allowed}."
        ) from error


if __name__ == "__main__":
    main()
