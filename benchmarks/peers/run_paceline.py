"""Measure Paceline through its Python interface.

`--speculation` is the `draft` option of `LLM` ("none", "ngram", a model); `--set-option key=value` passes any
other configuration key.
"""

from __future__ import annotations

import json
import time
from typing import Any

from protocol import Answer, Options, build_parser, run

DTYPES = {"bf16": "bfloat16", "int8": "int8", "fp32": "float32"}


class PacelineEngine:
    """`paceline.LLM` without prefix cache, so that a repeated prompt is computed again."""

    name = "paceline"

    def __init__(self, options: Options) -> None:
        import paceline

        self.version = paceline.__version__
        more = dict(_key_value(pair) for pair in options.extra.set_option)
        self._sampling_params = paceline.SamplingParams
        self._llm = paceline.LLM(
            options.model,
            draft=options.speculation,
            dtype=DTYPES[options.precision],
            threads=options.threads,
            max_num_seqs=options.max_batch,
            context_length=options.max_model_len,
            **{"prefix_cache": False, **more},
        )
        self.setting: dict[str, Any] = {
            "precision": options.precision,
            "speculation": options.speculation,
            "threads": options.threads,
            **more,
        }

    def generate(self, prompts: list[list[int]], new_tokens: int) -> tuple[list[Answer], float]:
        params = self._sampling_params(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params)
        total_s = time.perf_counter() - start
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        answers = [
            Answer(
                list(output.token_ids), output.timing.ttft_s, output.timing.ttft_s + output.timing.decode_s
            )
            for output in outputs
        ]
        return answers, total_s


def _key_value(pair: str) -> tuple[str, Any]:
    """`key=value` with the value in JSON, or as plain text where it is no JSON."""
    key, _, text = pair.partition("=")
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text


def main() -> None:
    parser = build_parser(__doc__)
    parser.add_argument("--set-option", action="append", default=[], metavar="KEY=VALUE")
    run(parser, PacelineEngine)


if __name__ == "__main__":
    main()
