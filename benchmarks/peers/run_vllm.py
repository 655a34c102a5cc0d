"""Measure vLLM on its CPU backend.

The engine's own advice for this backend is to preload tcmalloc and libiomp (LD_PRELOAD), to size the cache
with VLLM_CPU_KVCACHE_SPACE and to bind threads with VLLM_CPU_OMP_THREADS_BIND: the orchestrator's
configuration sets the first, this script the other two unless they are set. The engine runs inside this
process: a second one would compete for the cores.
"""

from __future__ import annotations

import os
import time
from typing import Any

from protocol import Answer, Options, build_parser, run


class VllmEngine:
    """`vllm.LLM`, without prefix cache and without detokenisation."""

    name = "vllm-cpu"

    def __init__(self, options: Options) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{options.threads - 1}")
        os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))
        import vllm

        self._sampling_params = vllm.SamplingParams
        self.version = vllm.__version__
        speculative = _speculative_config(options)
        self._llm = vllm.LLM(
            options.model,
            dtype={"bf16": "bfloat16", "fp32": "float32"}[options.precision],
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_batch,
            enable_prefix_caching=False,
            disable_log_stats=False,
            **({"speculative_config": speculative} if speculative else {}),
        )
        self.setting: dict[str, Any] = {
            "precision": options.precision,
            "speculation": options.speculation,
            "threads": options.threads,
            **({"speculative_config": speculative} if speculative else {}),
        }

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[Answer], float]:
        params = self._sampling_params(
            max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        total_s = time.perf_counter() - start
        queued = min(output.metrics.queued_ts for output in outputs)
        # The engine's own time stamps (monotonic, taken in its core) from the first request's arrival on.
        answers = [
            Answer(
                list(output.outputs[0].token_ids),
                output.metrics.first_token_ts - queued,
                output.metrics.last_token_ts - queued,
            )
            for output in outputs
        ]
        return answers, total_s


def _speculative_config(options: Options) -> dict[str, Any] | None:
    if options.speculation == "none":
        return None
    config = {"method": options.speculation, "num_speculative_tokens": options.num_speculative_tokens}
    if options.speculation == "ngram":
        config |= {"prompt_lookup_min": options.extra.ngram_min, "prompt_lookup_max": options.extra.ngram_max}
    return config


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--ngram-min", type=int, default=2)
    parser.add_argument("--ngram-max", type=int, default=4)
    run(parser, VllmEngine)


if __name__ == "__main__":
    main()
