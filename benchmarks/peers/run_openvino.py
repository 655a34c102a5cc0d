"""Measure OpenVINO GenAI on an exported model folder (see README.md for the export).

`--precision` goes with the folder's weight format: `int8` for weights compressed by the exporter, `bf16` for
a 16-bit export run with bfloat16 arithmetic, `fp32` for float arithmetic on whatever is stored.
`--pipeline batching` uses the continuous-batching (paged) pipeline, `plain` the stateful one (batch 1 only).
"""

from __future__ import annotations

import time
from typing import Any

from protocol import Answer, Options, build_parser, run


class OpenVinoEngine:
    """`ContinuousBatchingPipeline` or the SDPA `LLMPipeline`, without prefix cache."""

    name = "openvino-genai"

    def __init__(self, options: Options) -> None:
        import openvino_genai

        self._genai = openvino_genai
        self.version = openvino_genai.__version__
        self._plain = options.extra.pipeline == "plain"
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads}
        if options.precision != "int8":
            properties["INFERENCE_PRECISION_HINT"] = {"bf16": "bf16", "fp32": "f32"}[options.precision]
        if options.extra.dynamic_quantization_group:
            properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = options.extra.dynamic_quantization_group
        self._config = self._generation_config(options)
        lookup = {"prompt_lookup": True} if options.speculation != "none" else {}
        if self._plain:
            self._pipeline = openvino_genai.LLMPipeline(
                options.model, "CPU", ATTENTION_BACKEND="SDPA", **properties, **lookup
            )
        else:
            self._pipeline = openvino_genai.ContinuousBatchingPipeline(
                options.model, self._scheduler(options), "CPU", {**properties, **lookup}
            )
        self.setting: dict[str, Any] = {
            "precision": options.precision,
            "speculation": options.speculation,
            "threads": options.threads,
            "pipeline": options.extra.pipeline,
            "properties": properties,
        }

    def _scheduler(self, options: Options) -> Any:
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_seqs = options.max_batch
        scheduler.max_num_batched_tokens = options.extra.max_batched_tokens
        scheduler.enable_prefix_caching = False
        return scheduler

    def _generation_config(self, options: Options) -> Any:
        config = self._genai.GenerationConfig()
        config.ignore_eos = True
        config.do_sample = False
        if options.speculation == "prompt_lookup":
            config.num_assistant_tokens = options.num_speculative_tokens
            config.max_ngram_size = options.extra.ngram_max
        elif options.speculation != "none":
            raise ValueError(f"unknown speculation {options.speculation!r}: none or prompt_lookup")
        return config

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[Answer], float]:
        self._config.max_new_tokens = new_tokens
        if self._plain:
            return self._generate_plain(prompts)
        return self._generate_batching(prompts)

    def _generate_plain(self, prompts: list[list[int]]) -> tuple[list[Answer], float]:
        if len(prompts) != 1:
            raise ValueError("the plain pipeline takes one prompt at a time")
        start = time.perf_counter()
        result = self._pipeline.generate(_tensor(prompts[0]), self._config)
        total_s = time.perf_counter() - start
        first_s = result.perf_metrics.get_ttft().mean / 1e3
        return [Answer(list(result.tokens[0]), first_s, total_s)], total_s

    def _generate_batching(self, prompts: list[list[int]]) -> tuple[list[Answer], float]:
        start = time.perf_counter()
        handles = [
            self._pipeline.add_request(index, _tensor(ids), self._config) for index, ids in enumerate(prompts)
        ]
        tokens: list[list[int]] = [[] for _ in prompts]
        first: list[tuple[float, int]] = [(0.0, 0)] * len(prompts)
        last = [0.0] * len(prompts)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter() - start
            for index, handle in enumerate(handles):
                while handle.can_read():
                    new = [token for part in handle.read().values() for token in part.generated_ids]
                    if new and not tokens[index]:
                        first[index] = (now, len(new))
                    tokens[index] += new
                    last[index] = now
        total_s = time.perf_counter() - start
        answers = [Answer(ids, f[0], end, f[1]) for ids, f, end in zip(tokens, first, last, strict=True)]
        return answers, total_s


def _tensor(token_ids: list[int]) -> Any:
    import numpy as np
    import openvino

    return openvino.Tensor(np.array([token_ids], dtype=np.int64))


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--pipeline", choices=("batching", "plain"), default="batching")
    parser.add_argument("--dynamic-quantization-group", type=int, default=0, help="0 = the engine's default")
    parser.add_argument("--max-batched-tokens", type=int, default=2048)
    parser.add_argument("--ngram-max", type=int, default=3)
    run(parser, OpenVinoEngine)


if __name__ == "__main__":
    main()
