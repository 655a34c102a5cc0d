"""Figures that others published, computed again."""
