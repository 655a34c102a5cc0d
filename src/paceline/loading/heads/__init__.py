"""Draft heads from checkpoint folders."""

from paceline.loading.heads.load import LoadedHead, is_head, load_head

__all__ = ["LoadedHead", "is_head", "load_head"]
