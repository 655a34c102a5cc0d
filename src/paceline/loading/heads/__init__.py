"""Draft heads from checkpoint folders."""

from paceline.loading.heads.load import LoadedHead, is_head, load_head
from paceline.loading.heads.shipped import shipped_head

__all__ = ["LoadedHead", "is_head", "load_head", "shipped_head"]
