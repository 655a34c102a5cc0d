"""Black-box cases from public bug reports of other engines; see README.md."""
