"""Files only: an EAGLE-3 head for SmolLM2-135M-Instruct, found by `paceline --draft eagle3`."""
