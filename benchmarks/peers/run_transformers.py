"""Measure `transformers.generate`: padded batches, and prompt lookup at batch 1.

`--compile` runs the decode step through torch.compile with a static cache, whose length is rounded up so that
few shapes are compiled; each takes about a minute, in the warm-up.
"""

from __future__ import annotations

import time
from typing import Any

from protocol import Answer, Options, build_parser, run

CACHE_STEP = 256
"""Static caches are a multiple of this many tokens long."""
MIN_NEW_TOKENS = 128
"""A static cache has room for this many at least, so that a shorter warm-up compiles the same shape."""


class TransformersEngine:
    """A causal language model under `generate`, with the library's default attention for CPUs."""

    name = "transformers"

    def __init__(self, options: Options) -> None:
        import torch
        import transformers

        torch.set_num_threads(options.threads)
        self._torch, self._transformers = torch, transformers
        self.version = f"{transformers.__version__} (torch {torch.__version__})"
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.precision]
        self._model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self._compile = options.extra.compile
        self._caches: dict[tuple[int, int], Any] = {}
        self._lookup: dict[str, int] = {}
        if options.speculation == "prompt_lookup":
            self._lookup["prompt_lookup_num_tokens"] = options.num_speculative_tokens
        elif options.speculation != "none":
            raise ValueError(f"unknown speculation {options.speculation!r}: none or prompt_lookup")
        self.setting: dict[str, Any] = {
            "precision": options.precision,
            "speculation": options.speculation,
            "threads": options.threads,
            "compile": self._compile,
            **self._lookup,
        }

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[Answer], float]:
        torch = self._torch
        width = max(map(len, prompts))
        rows = [[0] * (width - len(ids)) + ids for ids in prompts]
        mask = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        clock = _Clock()
        with torch.inference_mode():
            output = self._model.generate(
                torch.tensor(rows),
                attention_mask=torch.tensor(mask),
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
                streamer=clock,
                **self._lookup,
                **self._static_cache(len(prompts), width + max(new_tokens, MIN_NEW_TOKENS)),
            )
        total_s = time.perf_counter() - clock.start
        answers = [
            Answer(row[width:], clock.first_s, clock.last_s, clock.first_tokens) for row in output.tolist()
        ]
        return answers, total_s

    def _static_cache(self, batch: int, length: int) -> dict[str, Any]:
        """Arguments of `generate` that make it compile its decode step, or none."""
        if not self._compile:
            return {}
        length = -(-length // CACHE_STEP) * CACHE_STEP
        if (batch, length) not in self._caches:
            self._caches[batch, length] = self._transformers.StaticCache(
                config=self._model.config, max_cache_len=length
            )
        cache = self._caches[batch, length]
        cache.reset()
        compile_config = self._transformers.CompileConfig(mode="default", fullgraph=False, dynamic=False)
        compile_config._compile_all_devices = True
        return {"past_key_values": cache, "compile_config": compile_config}


class _Clock:
    """A streamer that only notes when tokens come. The first `put` carries the prompt."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first_s = self.last_s = 0.0
        self.first_tokens = 0
        self._saw_prompt = False

    def put(self, value: Any) -> None:
        if not self._saw_prompt:
            self._saw_prompt = True
            return
        self.last_s = time.perf_counter() - self.start
        if not self.first_tokens:
            self.first_s = self.last_s
            # One token a row, except for prompt lookup: several of its only row.
            self.first_tokens = 1 if value.ndim == 1 and len(value) > 1 else int(value.numel())

    def end(self) -> None:
        """Part of the streamer's interface."""


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--compile", action="store_true", help="torch.compile with a static cache")
    run(parser, TransformersEngine)


if __name__ == "__main__":
    main()
