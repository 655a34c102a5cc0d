"""An OpenAI-compatible server that answers with a script, several tokens to a chunk."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Chunks = tuple[tuple[str, int], ...]
"""Texts, and how many tokens each has."""
CHUNKS: Chunks = ((" one", 1), (" two three four", 3), (" five six", 2))


@dataclass
class Script:
    """usage: told with "each" chunk, at the "end" or "never".  refused: keys of stream_options that it does
    not know.  status: of every answer.  break_after: chunks, then the connection ends.  hang_after: requests,
    then each waits for a second, sending comments if it `drips`.  pause_s: before each chunk.  metrics:
    whether it has such a page."""

    chunks: Chunks = CHUNKS
    usage: str = "each"
    refused: tuple[str, ...] = ()
    status: int = 200
    break_after: int | None = None
    hang_after: int | None = None
    drips: bool = False
    pause_s: float = 0.002
    metrics: bool = True
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    most_open: int = 0
    open: int = 0
    drafts: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class _Handler(BaseHTTPRequestHandler):
    script: Script
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path != "/metrics" or not self.script.metrics:
            self._answer(404, b"no such page")
            return
        drafts = self.script.drafts
        lines = [
            "# TYPE vllm:spec_decode_num_drafts_total counter",
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}.0',
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {3 * drafts}.0',
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {1.5 * drafts:.0f}.0',
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {drafts}.0',
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {drafts / 2:.0f}',
        ]
        self._answer(200, "\n".join(lines).encode())

    def do_POST(self) -> None:
        script = self.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        script.asked.append((self.path, body, {name.lower(): value for name, value in self.headers.items()}))
        unknown = [name for name in body.get("stream_options", {}) if name in script.refused]
        if script.status != 200 or unknown:
            status = 400 if unknown else script.status
            self._answer(status, json.dumps({"error": {"message": f"no {unknown}"}}).encode())
            return
        with script.lock:
            script.open += 1
            script.most_open = max(script.most_open, script.open)
        try:
            self._stream(body)
        finally:
            with script.lock:
                script.open -= 1
                script.drafts += 2

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self, body: dict[str, Any]) -> None:
        script, told = self.script, body.get("stream_options", {})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if script.hang_after is not None and len(script.asked) > script.hang_after:
            for _ in range(20):
                time.sleep(0.05)
                if script.drips:
                    with suppress(OSError):  # the client has given up
                        self.wfile.write(b": wait\n\n")
            return
        chat = "messages" in body
        if chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        count = 0
        for at, (text, tokens) in enumerate(script.chunks):
            if at == script.break_after:
                return
            time.sleep(script.pause_s)
            count += tokens
            choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            choice["finish_reason"] = "length" if at == len(script.chunks) - 1 else None
            usage = {"prompt_tokens": 5, "completion_tokens": count}
            each = script.usage == "each" and told.get("continuous_usage_stats")
            self._event({"choices": [choice], **({"usage": usage} if each else {})})
        if script.usage != "never" and told.get("include_usage"):
            self._event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": count}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """The server's URL."""
    handler = type("Handler", (_Handler,), {"script": script})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
