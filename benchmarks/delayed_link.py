"""A TCP relay that delivers every byte a given time later: another host, on this one.

    python benchmarks/delayed_link.py --to 127.0.0.1:7077 --delay-ms 1

prints the address to connect to. The order is kept and the bandwidth is not limited; in both directions each
byte takes the delay, so that a round trip takes twice as much more.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from contextlib import suppress


class DelayedLink:
    """Runs in a thread of its own until it is closed. delay_s: each way. port: to connect to, `listen` if
    given."""

    def __init__(self, host: str, port: int, delay_s: float, listen: int = 0) -> None:
        self.port = listen
        self._there = (host, port)
        self._delay_s = delay_s
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._done: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="delayed-link", daemon=True)
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """Breaks every connection."""
        if self._done is not None:
            self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._done = asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            with suppress(OSError, asyncio.CancelledError):
                await self._connect(reader, writer)
            tasks.discard(task)

        server = await asyncio.start_server(accept, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._done.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._there)
        except OSError:
            writer.close()
            return
        try:
            ways = [self._way(reader, far_writer), self._way(far_reader, writer)]
            done, rest = await asyncio.wait(
                [asyncio.ensure_future(way) for way in ways], return_when=asyncio.FIRST_COMPLETED
            )
            for task in rest:
                task.cancel()
            await asyncio.gather(*done, *rest, return_exceptions=True)
        finally:
            writer.close()
            far_writer.close()

    async def _way(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Bytes one way; reading never waits for the delay of what came before."""
        loop = asyncio.get_running_loop()
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def read() -> None:
            data = b"-"
            while data:
                data = await source.read(65536)
                under_way.put_nowait((loop.time() + self._delay_s, data))

        reading = asyncio.ensure_future(read())
        try:
            while True:
                due, data = await under_way.get()
                await asyncio.sleep(due - loop.time())
                if not data:
                    return
                sink.write(data)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", required=True, metavar="HOST:PORT")
    parser.add_argument("--delay-ms", type=float, required=True, help="each way")
    options = parser.parse_args()
    host, _, port = options.to.rpartition(":")
    link = DelayedLink(host, int(port), options.delay_ms / 1000)
    print(f"tcp://127.0.0.1:{link.port}", flush=True)
    with suppress(KeyboardInterrupt):
        threading.Event().wait()
    link.close()


if __name__ == "__main__":
    main()
