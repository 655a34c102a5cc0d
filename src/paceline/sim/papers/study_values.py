"""What the study "Speculative Decoding: Performance or Illusion?" (arXiv 2601.11580) reports of
Llama-3.1-8B-Instruct on one H100: speed-ups over decoding without guesses, by batch size.

Figure 1 was measured with vLLM 0.10.1.1; figures 10 and 12 come from the authors' simulator. The values were
read off the figures' vector graphics: to 0.005, those of figures 10 and 12 to the two decimals they have.
"""

from __future__ import annotations

DATASETS = ("gsm8k", "instructcoder", "sharegpt", "cnn")
HEAD = "head"
"""Stands for EAGLE-3, whatever a file of traces calls it."""

Key = tuple[str, str, int | None]
"""Data set, drafter, guesses per step (None = oracle)."""


def _table(text: str) -> dict[Key, tuple[float, ...]]:
    found: dict[Key, tuple[float, ...]] = {}
    for line in text.strip().splitlines():
        dataset, drafter, guesses, *values = line.split()
        key = dataset, drafter, None if guesses == "oracle" else int(guesses)
        found[key] = tuple(map(float, values))
    return found


# Batches of 1, 16, 64, 128.
MEASURED = _table("""
gsm8k ngram 3 1.166 1.149 1.103 1.047
gsm8k head 3 1.749 1.699 1.486 1.222
instructcoder ngram 3 1.884 1.738 1.467 1.294
instructcoder ngram 5 2.099 1.895 1.512 1.299
instructcoder head 3 2.020 1.917 1.572 1.309
sharegpt ngram 3 1.271 1.248 1.194 1.113
sharegpt head 3 1.712 1.677 1.550 1.296
cnn ngram 3 1.338 1.285 1.182 1.122
cnn head 3 1.686 1.581 1.397 1.235
""")

# Batches of 1, 8, 16, 32, 64, 128.
SIMULATED = _table("""
gsm8k ngram 1 1.10 1.09 1.09 1.07 1.05 1.03
gsm8k ngram 3 1.15 1.13 1.11 1.08 1.03 0.97
gsm8k ngram 5 1.16 1.13 1.10 1.05 0.98 0.90
gsm8k ngram oracle 1.18 1.17 1.17 1.15 1.13 1.11
gsm8k head 1 1.29 1.28 1.26 1.23 1.19 1.14
gsm8k head 3 1.81 1.73 1.65 1.52 1.36 1.18
gsm8k head 5 2.01 1.86 1.73 1.53 1.29 1.07
gsm8k head oracle 2.13 2.06 1.98 1.87 1.71 1.54
instructcoder ngram 1 1.42 1.38 1.34 1.28 1.21 1.12
instructcoder ngram 3 1.86 1.73 1.62 1.46 1.27 1.10
instructcoder ngram 5 2.10 1.89 1.71 1.47 1.23 1.02
instructcoder ngram oracle 2.73 2.45 2.25 2.00 1.74 1.52
instructcoder head 1 1.34 1.32 1.30 1.26 1.21 1.16
instructcoder head 3 2.03 1.91 1.80 1.65 1.46 1.28
instructcoder head 5 2.38 2.17 1.98 1.74 1.47 1.23
instructcoder head oracle 2.73 2.52 2.35 2.12 1.85 1.61
sharegpt ngram 1 1.16 1.15 1.14 1.12 1.10 1.07
sharegpt ngram 3 1.28 1.25 1.22 1.18 1.12 1.05
sharegpt ngram 5 1.33 1.29 1.24 1.18 1.09 1.00
sharegpt ngram oracle 1.43 1.40 1.37 1.33 1.28 1.23
sharegpt head 1 1.26 1.25 1.24 1.22 1.20 1.16
sharegpt head 3 1.74 1.67 1.60 1.50 1.37 1.23
sharegpt head 5 1.93 1.80 1.68 1.51 1.31 1.12
sharegpt head oracle 2.10 2.03 1.97 1.88 1.77 1.64
cnn ngram 1 1.20 1.18 1.16 1.13 1.10 1.06
cnn ngram 3 1.33 1.28 1.23 1.17 1.10 1.03
cnn ngram 5 1.38 1.30 1.23 1.15 1.05 0.97
cnn ngram oracle 1.45 1.40 1.37 1.32 1.26 1.21
cnn head 1 1.28 1.26 1.24 1.21 1.18 1.15
cnn head 3 1.76 1.65 1.56 1.44 1.31 1.21
cnn head 5 1.94 1.76 1.62 1.45 1.28 1.14
cnn head oracle 2.10 1.96 1.86 1.72 1.58 1.45
gsm8k combined oracle 2.80 2.64 2.50 2.28 2.00 1.71
instructcoder combined oracle 4.89 4.08 3.53 2.90 2.32 1.87
sharegpt combined oracle 3.11 2.88 2.69 2.45 2.17 1.91
cnn combined oracle 2.97 2.62 2.36 2.07 1.80 1.58
""")
