"""Packages that are installed beside this one and hold files only."""

EMBEDDED_HEAD = "paceline_smollm2_head"
"""The draft head of the embedded model."""
