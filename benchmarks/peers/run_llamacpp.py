"""Measure llama.cpp's server on a GGUF file.

Time stamps are the server's own (`timings`, with the answer sent in one piece), so that no client competes
with it for the cores while it works; the total is taken at the client. `--precision` is only the label of the
GGUF's type.
"""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from protocol import Answer, Options, build_parser, die_with_parent, run

START_TIMEOUT_S = 120.0


class LlamaCppEngine:
    """A `llama-server` process of our own, one slot per request, without prompt cache."""

    name = "llama.cpp"

    def __init__(self, options: Options) -> None:
        extra = options.extra
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self.version = _version(extra.server)
        command = [extra.server, "--model", options.model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--threads", str(options.threads), "--threads-batch", str(options.threads)]
        command += ["--parallel", str(options.max_batch), "--kv-unified", "--flash-attn", extra.flash_attn]
        command += ["--ctx-size", str(options.max_model_len * options.max_batch), "--threads-http", "2"]
        command += ["--no-cache-prompt", "--cache-ram", "0", "--slot-prompt-similarity", "0", "--no-ui"]
        if options.speculation != "none":
            command += ["--spec-type", options.speculation]
        command += extra.server_args.split()
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=die_with_parent
        )
        atexit.register(self._stop)
        self._wait_until_ready()
        self.setting: dict[str, Any] = {
            "precision": options.precision,
            "speculation": options.speculation,
            "threads": options.threads,
            "flash_attn": extra.flash_attn,
            "server_args": extra.server_args,
        }

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[Answer], float]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            start = time.perf_counter()
            answers = list(pool.map(lambda ids: self._complete(ids, new_tokens, start), prompts))
            return answers, time.perf_counter() - start

    def _complete(self, token_ids: list[int], new_tokens: int, start: float) -> Answer:
        body = {
            "prompt": token_ids,
            "n_predict": new_tokens,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        answer = self._request("/completion", body)
        last_s = time.perf_counter() - start
        decode_s = answer["timings"]["predicted_ms"] / 1e3
        return Answer(answer["tokens"], last_s - decode_s, last_s)

    def _request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(
            self._url + path, data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            return json.load(response)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with status {self._process.returncode}")
            try:
                self._request("/health")
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
            else:
                return
        raise RuntimeError(f"the server was not ready after {START_TIMEOUT_S:.0f} s")

    def _stop(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)


def _version(server: str) -> str:
    done = subprocess.run([server, "--version"], capture_output=True, text=True, check=True)
    lines = (done.stdout + done.stderr).strip().splitlines()
    return next((line.removeprefix("version: ") for line in lines if line.startswith("version")), lines[0])


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--server", required=True, help="path of llama-server")
    parser.add_argument("--flash-attn", choices=("on", "off", "auto"), default="auto")
    parser.add_argument("--server-args", default="", help="more options for the server, in one string")
    run(parser, LlamaCppEngine)


if __name__ == "__main__":
    main()
